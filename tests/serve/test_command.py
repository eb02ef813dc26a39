"""`python -m podway.serve` as a process: a folder to answers, and a second start that need not compile."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import httpx
import jax
import jax.numpy as jnp
import pytest

from podway.model import decoder
from podway.model.export import save_weights
from podway.model.families import find_model
from tests.conftest import HURRY
from tests.model.hub import Hub, running
from tests.serve.tiny import all_logits

SMALL = ["--max-len", "64", "--max-seqs", "2", "--prompt-tokens", "32", "--pages", "40", "--port", "0"]


class Started(NamedTuple):
    """A server that is ready: its process, its address, and how many programs it found on disk and compiled."""

    process: subprocess.Popen[str]
    url: str
    found: int
    compiled: int


def start(arguments: list[str], environment: dict[str, str]) -> Started:
    command = [sys.executable, "-m", "podway.serve", *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    seen, counts = "", (0, 0)
    for line in process.stdout:
        seen += line
        if told := re.search(r"(\d+) programs found on disk, (\d+) compiled", line):
            counts = int(told[1]), int(told[2])
        if told := re.search(r"ready at (\S+)/v1", line):
            return Started(process, told[1], *counts)
    raise AssertionError(f"the server ended: {seen}")


def stop(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> int:
    process.send_signal(number)
    try:
        return process.wait(20)
    finally:
        process.kill()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_folder_is_served_again_after_kill_9_without_compiling(tmp_path: Path) -> None:
    shape = find_model("tiny-llama3")
    tree = decoder.init(shape, jax.random.key(3), jnp.float32)
    save_weights(tree, shape, tmp_path / "model")
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": HURRY}
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | flags
    compiled = tmp_path / "compiled"
    arguments = [str(tmp_path / "model"), *SMALL, "--compile-cache", str(compiled)]
    expected = bytes(t for t in _greedy(shape, tree, list(b"hello"), 5) if t).decode(errors="replace")
    body = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": 0}

    def answers(url: str, name: str = "model") -> None:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()
        assert answer["model"] == name
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 5
        assert answer["choices"][0]["text"] == expected

    first = start(arguments, environment)
    answers(first.url)
    with httpx.stream("POST", f"{first.url}/v1/completions", json={**body, "max_tokens": 40, "stream": True}) as stream:
        next(stream.iter_lines())
        assert stop(first.process, signal.SIGKILL) == -signal.SIGKILL
    assert first.compiled >= 4, "programs of steps and of slots"

    files = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    with running(Hub({"a/tiny": files})) as hub:  # the same model by its id, downloaded
        at_hub = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        second = start(["a/tiny", *arguments[1:]], environment | at_hub)
    answers(second.url, "a/tiny")
    assert second.compiled == 0 and second.found == first.compiled
    assert stop(second.process) == 0

    # What a kill in the middle of writing may leave: an entry cut in two is compiled again, and nothing else.
    entry = max(compiled.glob("*-cache"), key=lambda file: file.stat().st_size)
    entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    third = start(arguments, environment)
    answers(third.url)
    assert third.found == first.compiled - 1
    with httpx.stream(
        "POST", f"{third.url}/v1/completions", json={**body, "max_tokens": 58, "stream": True}, timeout=60
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        third.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]", "a stream under way is answered to its end"
    assert third.process.stdout is not None
    rest = third.process.stdout.read()
    assert third.process.wait(60) == 0 and "Traceback" not in rest, rest
    third.process.stdout.close()


def _greedy(shape, tree, prompt, count):  # type: ignore[no-untyped-def]

    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(all_logits(shape, tokens, tree)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no such directory"),
        (["tiny-llama3", "--random", "--tp", "64"], "--tp 64"),
        (["tiny-llama3", "--random", "--max-len", "100000"], "--max-len"),
        (["no-such-model", "--random"], "unknown model"),
    ],
)
def test_what_cannot_be_served_is_said_in_two_lines(arguments: list[str], words: str) -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-m", "podway.serve", *arguments, "--port", "0"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 1 and words in ran.stderr and "Traceback" not in ran.stderr
