"""The serving example on a simulated slice of four hosts: one model over all of them, asked and measured as a person would."""

import re
from pathlib import Path

import httpx
import pytest

from podway.task.task import Recovery
from tests.conftest import HURRY, free_port, wait_until
from tests.e2e.harness import TWO_HOSTS, Podway, task
from tests.e2e.test_commands import EXAMPLES, podway
from tests.serve.test_hosts import MODEL, PROMPTS, ask, greedy_text

FLAGS = "--max-len 64 --max-seqs 2 --prompt-tokens 16 --pages 40"
BENCHMARK = (
    "Successful requests: 6", "Benchmark duration:", "Total input tokens:", "Total generated tokens:", "Request throughput:",
    "Input token throughput:", "Output token throughput:", "Mean TTFT:", "Median TTFT:", "P99 TTFT:", "Mean TPOT:",
    "Median TPOT:", "P99 TPOT:",
)  # fmt: skip


def ready(pod: Podway, url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.HTTPError:
        assert (state := pod.client.job("s", 1).state) not in ("FAILED", "FAILED_SETUP", "FAILED_DRIVER"), (
            f"{state}: {pod.log_text('s', 1)}"
        )
        return False


@pytest.mark.timeout(500)
def test_a_model_over_a_v6e_16_answers_and_is_measured(pod: Podway, tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "serve.yaml"
    quick = f'export XLA_FLAGS="$XLA_FLAGS {HURRY}"'  # the example's own run, compiled for a moment's use
    file.write_text((EXAMPLES / "serve-llama2-7b.yaml").read_text().replace("run: |", f"run: |\n  {quick}", 1))
    values = {"MODEL": str(MODEL), "FLAGS": FLAGS, "TP": "16", "PORT": str(port)}
    settings = [word for name, value in values.items() for word in ("--env", f"{name}={value}")]
    podway("launch", "-y", "-d", "-c", "s", "--tpu", "v6e-16", *settings, str(file))
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: ready(pod, url), 300, "the server")
    for prompt in PROMPTS[:2]:
        assert ask(url, prompt) == greedy_text(prompt, 12)
    measure = tmp_path / "benchmark.yaml"
    text = (EXAMPLES / "benchmark-llama2-7b.yaml").read_text()
    measure.write_text(text.replace("--input-len 128 --output-len 64", "--input-len 20 --output-len 10"))
    shown = podway("exec", "s", "--env", f"PORT={port}", "--env", "NUM_PROMPTS=6", str(measure))
    lines = [re.sub(r"^\([^)]*\) ", "", line) for line in shown.splitlines()]
    assert [next(line for line in lines if line.startswith(name)) for name in BENCHMARK]
    podway("cancel", "-y", "s", "1")
    assert pod.finished("s", 1) == "CANCELLED"
    pod.down("s")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_replica_that_loses_a_host_says_which_and_comes_back(pod: Podway) -> None:
    """A host dies under a model over two of them, with a stream open: the stream ends with an error, the front by itself and in one
    sentence, and the job, which recovers from lost hosts, answers again."""
    pod.start()
    port = free_port()
    run = f'export XLA_FLAGS="$XLA_FLAGS {HURRY}"\npodway serve {MODEL} {FLAGS} --tp 8 --port {port}'
    pod.client.launch(task(run, tpu=TWO_HOSTS, recovery=Recovery()), cluster="s")
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: ready(pod, url), 300, "the server")
    expected = greedy_text(PROMPTS[0], 12)
    assert ask(url, PROMPTS[0]) == expected
    body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        pod.kill_all_in(pod.home / "local" / "s" / "host-1")
        last = [line for line in lines if line][-1]
    # All of it may have been computed before the host was gone.
    assert last == "data: [DONE]" or "the host of rank 1 is gone" in last, last
    wait_until(lambda: pod.client.job("s", 1).attempt == 2, 300, "the second attempt")
    wait_until(lambda: ready(pod, url), 300, "the server again")
    assert ask(url, PROMPTS[0]) == expected
    text = pod.log_text("s", 1, follow=False)
    assert "Error: the host of rank 1 is gone" in text and "Traceback" not in text, text
    pod.client.cancel("s", [1])
    assert pod.finished("s", 1) == "CANCELLED"
    pod.down("s")
