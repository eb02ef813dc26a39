"""Long runs: many requests, many clients, other people's clients."""

import json
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serve.live import Live, live
from tests.serve.tiny import LLAMA, Runner, engine_for, greedy

CLIENTS = Path(os.environ.get("PODWAY_CLIENTS_PYTHON", ".cache/clients/bin/python"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("model"), max_queue=4096) as running:
        yield running


@pytest.mark.soak
def test_500_requests_equal_one_by_one() -> None:
    chance = random.Random(1)
    engine = engine_for(LLAMA, pages=40)
    runner = Runner(engine)
    wanted = [
        ([chance.randrange(97) for _ in range(chance.randrange(1, 40))], chance.randrange(1, 20)) for _ in range(500)
    ]
    made = []
    for prompt, count in wanted:
        made.append(runner.submit(prompt, count))
        for _ in range(chance.randrange(3)):
            runner.turn()
        if chance.random() < 0.1:
            runner.batcher.cancel(chance.choice(made))
        runner.batcher.check()
    runner.finish()
    assert runner.batcher.preemptions
    for request, (prompt, count) in zip(made, wanted, strict=True):
        alone = greedy(LLAMA, prompt, count)
        assert request.answer == alone[: len(request.answer)]
        assert request.finish == "cancelled" or request.answer == alone


@pytest.mark.soak
def test_1000_streams_with_disconnects_leave_nothing(server: Live) -> None:
    """Two minutes of clients that come and go: no page, no task, no memory is left."""
    end = time.monotonic() + float(os.environ.get("PODWAY_SOAK_SECONDS", "120"))
    failures: list[str] = []
    memory: list[int] = []

    def one(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < end:
            body = {"prompt": f"{number} " * chance.randrange(1, 20), "max_tokens": chance.randrange(1, 60), "stream": True,
                    "ignore_eos": True, "seed": number}  # fmt: skip
            try:
                with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as response:
                    if response.status_code not in (200, 429):
                        failures.append(f"status {response.status_code}")
                    for count, line in enumerate(response.iter_lines()):
                        if line.startswith("data: {") and "error" in json.loads(line[6:]):
                            failures.append(line)
                        if count > chance.randrange(1, 80):
                            break
            except httpx.HTTPError as error:
                failures.append(repr(error))

    threads = [
        threading.Thread(target=one, args=(i,), daemon=True)
        for i in range(int(os.environ.get("PODWAY_STREAMS", "1000")))
    ]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        memory.append(psutil.Process().memory_info().rss)
        time.sleep(2)
    for thread in threads:
        thread.join(150)
    server.wait_until_empty(60)
    assert not failures, failures[:5]
    assert server.loop._waiting == 0 and not server.loop._arrived and not server.loop._scored
    assert memory[-1] < 1.3 * memory[len(memory) // 2], "memory grows"


@pytest.mark.soak
@pytest.mark.parametrize("client", ["litellm_asks", "langchain_asks", "lm_eval_asks"])
def test_clients_that_people_use(server: Live, client: str) -> None:
    if not CLIENTS.exists():
        pytest.skip(f"no {CLIENTS}: tests/serve/clients.py says how to make it")
    ran = subprocess.run(
        [str(CLIENTS), str(Path(__file__).parent / "clients.py"), server.url, client],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


@pytest.mark.soak
def test_20000_fuzzed_bodies(server: Live) -> None:
    chance = random.Random(7)

    def odd(depth: int = 0) -> object:
        simple = [None, True, False, -1, 0, 3, 1e308, "", "x", "\ud800", "\x00", 10**30, -(10**18)]
        if depth > 2 or chance.random() < 0.6:
            return chance.choice(simple)
        if chance.random() < 0.5:
            return [odd(depth + 1) for _ in range(chance.randrange(3))]
        names = ["type", "function", "name", "role", "content", "json_schema", "schema", "include_usage"]
        return {chance.choice(names): odd(depth + 1) for _ in range(chance.randrange(3))}

    fields = ["model", "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "stream_options", "logprobs",
              "top_logprobs", "logit_bias", "seed", "tools", "tool_choice", "response_format", "echo", "min_tokens", "stop_token_ids",
              "guided_json", "guided_regex", "guided_choice", "chat_template_kwargs", "presence_penalty", "min_p", "suffix", "tokens",
              "ignore_eos", "continue_final_message", "max_completion_tokens", "repetition_penalty"]  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=60) as session:
        for number in range(int(os.environ.get("PODWAY_FUZZ", "20000"))):
            base: dict[str, object] = {"prompt": "ab", "max_tokens": 1}
            if number % 2:
                base = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
            for field in chance.sample(fields, chance.randrange(1, 5)):
                base[field] = odd()
            path = chance.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
            status = session.post(path, content=json.dumps(base).encode()).status_code
            assert status == 200 or 400 <= status < 500, (path, base, status)
    server.wait_until_empty()
