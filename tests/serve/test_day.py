"""A day in the life of a server: fuzzed requests of all endpoints, clients that leave, and SIGTERM at a random time.

No answer that is not valid, no 5xx, no page left, no traceback; PODWAY_DAY sets how many requests.
"""

import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import jsonschema
import pytest

from podway.model import decoder
from podway.model.export import save_weights
from podway.model.families import find_model
from tests.conftest import HURRY
from tests.serve.live import TEMPLATE
from tests.serve.test_command import Started, start

REQUESTS = int(os.environ.get("PODWAY_DAY", "20000"))
CLIENTS = 12
SCHEMA = {
    "type": "object", "required": ["a", "b"], "additionalProperties": False,
    "properties": {"a": {"enum": ["x", "yy", 3]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}  # fmt: skip
CHOICES = ["yes", "no", "yes, but", "é"]


def plausible(chance: random.Random) -> tuple[str, dict[str, object]]:
    """A request that should be answered."""
    text = "ab" * chance.randrange(1, 30)
    sampling = {
        "max_tokens": chance.randrange(1, 30),
        "temperature": chance.choice([0, 0, 0.7]),
        "seed": chance.randrange(9),
    }
    extra: dict[str, object] = chance.choice([
        {}, {"stop": ["b", "zz"]}, {"logprobs": 2}, {"presence_penalty": 1}, {"n": 2}, {"ignore_eos": True}, {"min_tokens": 1},
        {"guided_choice": CHOICES, "max_tokens": 60}, {"guided_regex": "[ab]{2,5}c?", "max_tokens": 60},
        {"structured_outputs": {"json": SCHEMA}, "max_tokens": 100}, {"cache_salt": "one"}, {"return_token_ids": True},
    ])  # fmt: skip
    path = chance.choice(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
    if path == "/v1/completions":
        return path, {"prompt": text, **sampling, **extra}
    if path == "/v1/chat/completions":
        extra = {**extra, "logprobs": True, "top_logprobs": 1} if "logprobs" in extra else extra
        return path, {"messages": [{"role": "user", "content": text}], **sampling, **extra}
    if path == "/v1/responses":
        return path, {
            "input": text,
            "max_output_tokens": sampling["max_tokens"],
            "temperature": sampling["temperature"],
        }
    return path, {"prompt": text}


def broken(chance: random.Random) -> tuple[str, bytes]:
    """A request that should be refused, or answered, but in good order."""
    path, body = plausible(chance)
    odd = [None, True, -1, 10**30, "", "\ud800", [], {}, [[]], {"type": "x"}, 1e308, "x" * 3000]
    for name in chance.sample(sorted(body), min(len(body), 2)):
        body[name] = chance.choice(odd)
    raw = json.dumps(body).encode()
    return path, raw[: chance.randrange(len(raw))] if chance.random() < 0.2 else raw


def check_choice(body: dict[str, object], choice: dict[str, object]) -> None:
    """What a finished answer must follow."""
    if choice.get("finish_reason") != "stop":
        return
    text = str(choice["text"] if "text" in choice else choice["message"]["content"])  # type: ignore[index]
    if "guided_choice" in body:
        assert text in CHOICES, text
    if "guided_regex" in body:
        assert re.fullmatch("[ab]{2,5}c?", text), text
    if "structured_outputs" in body:
        jsonschema.validate(json.loads(text), SCHEMA)


class Clients:
    """Threads that ask until there is nothing left to ask, or until they are told to end."""

    def __init__(self, url: str, requests: int, seed: int) -> None:
        self.url, self.left, self.seed = url, requests, seed
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.stopping = threading.Event()  # the server was told to stop: it may refuse and break off
        self._lock = threading.Lock()
        self.threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(600)
        assert not self.failures, self.failures[:5]

    def _run(self, number: int) -> None:
        chance = random.Random(self.seed * 1000 + number)
        with httpx.Client(base_url=self.url, timeout=300) as session:
            while not self.failures:
                with self._lock:
                    if self.left <= 0:
                        return
                    self.left -= 1
                try:
                    self._one(session, chance)
                except httpx.HTTPError as error:
                    if self.stopping.is_set():
                        return
                    self.failures.append(repr(error))
                except Exception as error:
                    self.failures.append(repr(error))

    def _one(self, session: httpx.Client, chance: random.Random) -> None:
        if chance.random() < 0.25:
            path, raw = broken(chance)
            status = session.post(path, content=raw).status_code
            self._count(status, path)
            return
        path, body = plausible(chance)
        if path != "/tokenize" and chance.random() < 0.5:
            self._stream(session, chance, path, {**body, "stream": True})
            return
        found = session.post(path, json=body)
        self._count(found.status_code, path)
        assert found.status_code in (200, 503), found.text
        for choice in found.json().get("choices", []) if found.status_code == 200 else []:
            check_choice(body, choice)

    def _stream(self, session: httpx.Client, chance: random.Random, path: str, body: dict[str, object]) -> None:
        leaves_after = chance.choice([0, 1, 3, 1000, 1000])
        with session.stream("POST", path, json=body) as response:
            self._count(response.status_code, path)
            assert response.status_code in (200, 503), body
            last = ""
            for count, line in enumerate(response.iter_lines()):
                if count >= leaves_after:
                    self.counts["left"] += 1
                    return
                if line.startswith("data: {") and "error" in (event := json.loads(line[6:])) and event["error"]:
                    self.counts["error events"] += 1
                    assert self.stopping.is_set(), line
                last = line or last
            assert last == "data: [DONE]" or response.status_code != 200 or self.stopping.is_set(), last

    def _count(self, status: int, path: str) -> None:
        self.counts[str(status)] += 1
        allowed = status == 200 or 400 <= status < 500 or (status == 503 and self.stopping.is_set())
        assert allowed, f"{path}: {status}"


def metric(url: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}{{.*}} (\S+)$", httpx.get(f"{url}/metrics", timeout=60).text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_day_in_the_life(tmp_path: Path) -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": HURRY}
    sizes = [
        "--max-len",
        "256",
        "--max-seqs",
        "8",
        "--prompt-tokens",
        "64",
        "--pages",
        "20",
        "--port",
        "0",
        "--drain-seconds",
        "2",
    ]
    shape = find_model("tiny-llama3")
    save_weights(decoder.init(shape, jax.random.key(3), jnp.float32), shape, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    arguments = [str(tmp_path / "model"), *sizes, "--speculate", "3", "--max-queue", "4096"]
    server = start([*arguments, "--compile-cache", str(tmp_path / "compiled")], environment)
    output: list[str] = []
    assert server.process.stdout is not None
    reader = threading.Thread(target=lambda: output.extend(server.process.stdout), daemon=True)  # type: ignore[arg-type]
    reader.start()
    try:
        day = Clients(server.url, REQUESTS, seed=1)
        day.join()
        deadline = time.monotonic() + 60
        while metric(server.url, "vllm:num_requests_running") and time.monotonic() < deadline:
            time.sleep(0.1)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert metric(server.url, f"vllm:{name}") == 0, name
        assert metric(server.url, "vllm:spec_decode_num_accepted_tokens_total") > 0
        print(f"\n{dict(day.counts)}; preempted {metric(server.url, 'vllm:num_preemptions_total'):.0f}")
        assert day.counts["200"] > REQUESTS / 2
        _stop_under_load(server)
    finally:
        server.process.kill()
    reader.join(10)
    assert "Traceback" not in "".join(output), "".join(output)[-3000:]


def _stop_under_load(server: Started) -> None:
    evening = Clients(server.url, 100_000, seed=2)
    deadline = time.monotonic() + 120
    while sum(evening.counts.values()) < random.Random(REQUESTS).randrange(20, 200) and time.monotonic() < deadline:
        time.sleep(0.01)
    evening.stopping.set()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(120) == 0
    evening.left = 0
    evening.join()
    print(f"stopped: {dict(evening.counts)}")
