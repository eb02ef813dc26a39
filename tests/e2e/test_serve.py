"""The serving example on a simulated slice of four hosts: one model over all of them, asked and measured as a person would."""

import re
from pathlib import Path

import httpx
import pytest

from tests.conftest import HURRY, free_port, wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_commands import EXAMPLES, podway
from tests.serve.test_hosts import MODEL, PROMPTS, greedy_text

FLAGS = "--max-len 64 --max-seqs 2 --prompt-tokens 16 --pages 40"
BENCHMARK = (
    "Successful requests: 6", "Benchmark duration:", "Total input tokens:", "Total generated tokens:", "Request throughput:",
    "Input token throughput:", "Output token throughput:", "Mean TTFT:", "Median TTFT:", "P99 TTFT:", "Mean TPOT:",
    "Median TPOT:", "P99 TPOT:",
)  # fmt: skip


@pytest.mark.timeout(500)
def test_a_model_over_a_v6e_16_answers_and_is_measured(pod: Podway, tmp_path: Path) -> None:
    port = free_port()
    task = tmp_path / "serve.yaml"
    quick = f'export XLA_FLAGS="$XLA_FLAGS {HURRY}"'  # the example's own run, compiled for a moment's use
    task.write_text((EXAMPLES / "serve-llama2-7b.yaml").read_text().replace("run: |", f"run: |\n  {quick}", 1))
    values = {"MODEL": str(MODEL), "FLAGS": FLAGS, "TP": "16", "PORT": str(port)}
    settings = [word for name, value in values.items() for word in ("--env", f"{name}={value}")]
    podway("launch", "-y", "-d", "-c", "s", "--tpu", "v6e-16", *settings, str(task))
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.HTTPError:
            state = pod.client.job("s", 1).state
            assert state not in ("FAILED", "FAILED_SETUP"), pod.log_text("s", 1)
            return False

    wait_until(ready, 300, "the server")
    for prompt in PROMPTS[:2]:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["text"] == greedy_text(prompt, 12)
    measure = tmp_path / "benchmark.yaml"
    text = (EXAMPLES / "benchmark-llama2-7b.yaml").read_text()
    measure.write_text(text.replace("--input-len 128 --output-len 64", "--input-len 20 --output-len 10"))
    shown = podway("exec", "s", "--env", f"PORT={port}", "--env", "NUM_PROMPTS=6", str(measure))
    lines = [re.sub(r"^\([^)]*\) ", "", line) for line in shown.splitlines()]
    assert [next(line for line in lines if line.startswith(name)) for name in BENCHMARK]
    podway("cancel", "-y", "s", "1")
    assert pod.finished("s", 1) == "CANCELLED"
    pod.down("s")
