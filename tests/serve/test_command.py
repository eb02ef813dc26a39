"""`python -m podway.serve` as a process: a folder to answers, and a second start that need not compile."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import pytest

from podway.model import decoder
from podway.model.export import save_weights
from podway.model.families import find_model
from tests.serve.tiny import all_logits

SMALL = ["--max-len", "64", "--max-seqs", "2", "--prompt-tokens", "32", "--pages", "40", "--port", "0"]


def start(arguments: list[str], environment: dict[str, str]) -> tuple[subprocess.Popen[str], str, float]:
    """The process, its address once it is ready, and the seconds of its warm-up."""
    command = [sys.executable, "-m", "podway.serve", *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    seen, warm = "", 0.0
    for line in process.stdout:
        seen += line
        if found := re.search(r"warm after ([\d.]+) s", line):
            warm = float(found[1])
        if found := re.search(r"ready at (\S+)/v1", line):
            return process, found[1], warm
    raise AssertionError(f"the server ended: {seen}")


def stop(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(20)
    finally:
        process.kill()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.timeout(200)
def test_a_folder_is_served_and_the_second_start_is_fast(tmp_path: Path) -> None:
    shape = find_model("tiny-llama3")
    tree = decoder.init(shape, jax.random.key(3), jnp.float32)
    save_weights(tree, shape, tmp_path / "model")
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"} | {"JAX_PLATFORMS": "cpu"}
    arguments = [str(tmp_path / "model"), *SMALL, "--compile-cache", str(tmp_path / "compiled")]
    times = []
    for _ in range(2):
        process, url, warm = start(arguments, environment)
        times.append(warm)
        try:
            body = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30).json()
            assert answer["model"] == "model"
            expected = _greedy(shape, tree, list(b"hello"), 5)
            assert len(answer["choices"][0]["logprobs"]["tokens"]) == 5
            text = bytes(t for t in expected if t).decode(errors="replace")
            assert answer["choices"][0]["text"] == text
        finally:
            assert stop(process) == 0
    assert times[1] < times[0], times


def _greedy(shape, tree, prompt, count):  # type: ignore[no-untyped-def]

    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(all_logits(shape, tokens, tree)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no folder"),
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
