"""Long runs: many requests, many clients, many bodies."""

import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.serve.live import Live, live


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("model"), max_queue=4096) as running:
        yield running


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_1000_streams_with_disconnects_leave_nothing(server: Live) -> None:
    """Two minutes of clients that come and go: no page, no task, no file, no memory is left."""
    end = time.monotonic() + float(os.environ.get("PODWAY_SOAK_SECONDS", "120"))
    counts: Counter[str] = Counter()
    failures: list[str] = []
    memory: list[int] = []
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2})
    process, tasks = psutil.Process(), server.tasks()
    files = process.num_fds()

    def one(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < end:
            body = {"prompt": f"{number} " * chance.randrange(1, 20), "max_tokens": chance.randrange(1, 60), "stream": True,
                    "ignore_eos": True, "seed": number}  # fmt: skip
            leaves_after = chance.randrange(1, 80)
            try:
                with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as response:
                    if response.status_code not in (200, 429):
                        failures.append(f"status {response.status_code}")
                    counts["begun"] += 1
                    for count, line in enumerate(response.iter_lines()):
                        if line.startswith("data: {") and "error" in json.loads(line[6:]):
                            failures.append(line)
                        if count > leaves_after:
                            counts["left"] += 1
                            break
            except httpx.HTTPError as error:
                failures.append(repr(error))

    streams = int(os.environ.get("PODWAY_STREAMS", "1000"))
    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(streams)]
    for thread in threads:
        thread.start()
    most = 0
    while time.monotonic() < end:
        memory.append(process.memory_info().rss)
        most = max(most, server.tasks())
        time.sleep(2)
    for thread in threads:
        thread.join(310)
    server.wait_until_empty(60)
    deadline = time.monotonic() + 20
    while server.tasks() > tasks + 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    pool = server.loop.batcher.pool
    print(
        f"\n{dict(counts)} of {streams} at a time; tasks {tasks} -> {most} -> {server.tasks()}, files {files} -> {process.num_fds()}, "
        f"pages held {pool.held}, memory at a third, half, end: "
        + ", ".join(f"{memory[int(len(memory) * part)] >> 20} MiB" for part in (0.33, 0.5, 0.999))
    )
    assert not failures, failures[:5]
    assert counts["left"] > 100 or streams < 1000
    assert server.loop._waiting == 0 and not server.loop._times and not server.loop._scored
    assert server.tasks() <= tasks + 2 and process.num_fds() <= files + 10
    assert memory[-1] < 1.3 * memory[len(memory) // 2], "memory grows"


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
