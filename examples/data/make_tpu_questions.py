"""Write tpu-questions.jsonl: conversations about TPU slices, made from Podway's own catalog."""

import json
from pathlib import Path

from podway.catalog.slices import Slice, all_slices


def conversation(number: int, tpu: Slice) -> list[dict[str, str]]:
    """Two questions and their answers, asked in one of three ways."""
    first, second = [
        (f"How many chips does {tpu.accelerator_type} have?", "And how many hosts?"),
        (f"What is {tpu.accelerator_type}?", "How are its chips laid out?"),
        (f"I want to train on {tpu.accelerator_type}. How large is it?", "How many machines must I log in to?"),
    ][number % 3]
    chips = f"{tpu.chips} {'chip' if tpu.chips == 1 else 'chips'}"
    hosts = "one host" if tpu.hosts == 1 else f"{tpu.hosts} hosts"
    holding = f"It has {hosts}, with {tpu.chips_per_host} chips{' each' if tpu.hosts > 1 else ''}."
    laid = f"As {tpu.topology_text}, with {tpu.chips_per_host} to a host."
    answers = [
        (f"{tpu.accelerator_type} has {chips}.", holding),
        (f"It is a {tpu.generation} slice of {chips} on {hosts}.", laid),
        (f"It is {chips} with the topology {tpu.topology_text}.", f"It has {hosts}; Podway reaches them all at once."),
    ][number % 3]
    roles = ["user", "assistant", "user", "assistant"]
    texts = [first, answers[0], second, answers[1]]
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


if __name__ == "__main__":
    names: dict[str, Slice] = {tpu.accelerator_type: tpu for tpu in all_slices()}
    lines = [json.dumps({"messages": conversation(i, tpu)}) for i, tpu in enumerate(names.values())]
    Path(__file__).with_name("tpu-questions.jsonl").write_text("\n".join(lines) + "\n")
