"""A day in the life of a server: fuzzed requests of all endpoints, clients that leave, and SIGTERM at a random time.

No answer that is not valid, no 5xx, no page left, no traceback. What follows a grammar is checked whole, and as it is put together
from a stream. PODWAY_DAY sets how many requests, PODWAY_DAY_SEED which.
"""

import json
import os
import random
import re
import signal
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

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
SEED = int(os.environ.get("PODWAY_DAY_SEED", "1"))
CLIENTS = 12
LONGEST = 3000  # seconds
SCHEMA = {
    "type": "object", "required": ["a", "b"], "additionalProperties": False,
    "properties": {"a": {"enum": ["x", "yy", 3]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
# Read at times between the others; those of adapters are not for this server, which has none.
PAGES = [
    "/v1/models",
    "/v1/models/model",
    "/health",
    "/ping",
    "/metrics",
    "/version",
    "/openapi.json",
    "/tokenizer_info",
]
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
    path = chance.choice(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"])
    if path == "/v1/completions":
        return path, {"prompt": text, **sampling, **extra}
    if path == "/v1/chat/completions":
        extra = {**extra, "logprobs": True, "top_logprobs": 1} if "logprobs" in extra else extra
        if not extra:
            extra = {"tools": [TOOL], "tool_choice": chance.choice(["auto", "required", "none"]), "max_tokens": 100}
        return path, {"messages": [{"role": "user", "content": text}], **sampling, **extra}
    if path == "/v1/responses":
        return path, {
            "input": text,
            "max_output_tokens": sampling["max_tokens"],
            "temperature": sampling["temperature"],
        }
    return path, {"tokens": list(text.encode())} if path == "/detokenize" else {"prompt": text}


def broken(chance: random.Random) -> tuple[str, bytes]:
    """A request that should be refused, or answered, but in good order."""
    path, body = plausible(chance)
    odd = [None, True, -1, 10**30, "", "\ud800", [], {}, [[]], {"type": "x"}, 1e308, "x" * 3000]
    for name in chance.sample(sorted(body), min(len(body), 2)):
        body[name] = chance.choice(odd)
    raw = json.dumps(body).encode()
    return path, raw[: chance.randrange(len(raw))] if chance.random() < 0.2 else raw


def check_text(body: dict[str, object], text: str) -> None:
    """What an answer that ended by itself must follow."""
    if "guided_choice" in body:
        assert text in CHOICES, text
    if "guided_regex" in body:
        assert re.fullmatch("[ab]{2,5}c?", text), text
    if "structured_outputs" in body:
        jsonschema.validate(json.loads(text), SCHEMA)


class StreamedChoices:
    """The texts and the arguments of calls, put together from the events of a stream."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.calls: dict[tuple[int, int], str] = {}
        self.finished: dict[int, str] = {}

    def add(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices", []):
            index, delta = choice["index"], choice.get("delta", {})
            self.texts[index] = self.texts.get(index, "") + (choice.get("text") or delta.get("content") or "")
            for call in delta.get("tool_calls") or []:
                key = index, call["index"]
                self.calls[key] = self.calls.get(key, "") + call["function"].get("arguments", "")
            if choice.get("finish_reason"):
                self.finished[index] = choice["finish_reason"]

    def check(self, body: dict[str, object]) -> None:
        for index, reason in self.finished.items():
            if reason == "stop":
                check_text(body, self.texts[index])
        for (index, _), arguments in self.calls.items():
            if self.finished[index] == "tool_calls":
                jsonschema.validate(json.loads(arguments), SCHEMA)


def check_whole(body: dict[str, object], choice: dict[str, Any]) -> None:
    if choice["finish_reason"] == "stop":
        check_text(body, choice["text"] if "text" in choice else choice["message"]["content"])
    if choice["finish_reason"] == "tool_calls":
        for call in choice["message"]["tool_calls"]:
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


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
        deadline = time.monotonic() + LONGEST
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert self.failures or not any(thread.is_alive() for thread in self.threads), f"{self.left} are left"
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
                    self.failures.append("".join(traceback.format_exception(error))[-2000:])

    def _one(self, session: httpx.Client, chance: random.Random) -> None:
        if chance.random() < 0.05:
            path = chance.choice(PAGES)
            self._count(session.get(path).status_code, path)
            return
        if chance.random() < 0.25:
            path, raw = broken(chance)
            status = session.post(path, content=raw).status_code
            self._count(status, path)
            return
        path, body = plausible(chance)
        if "tokenize" not in path and chance.random() < 0.5:
            self._stream(session, chance, path, {**body, "stream": True})
            return
        found = session.post(path, json=body)
        self._count(found.status_code, path)
        assert found.status_code in (200, 503), found.text
        for choice in found.json().get("choices", []) if found.status_code == 200 else []:
            check_whole(body, choice)

    def _stream(self, session: httpx.Client, chance: random.Random, path: str, body: dict[str, object]) -> None:
        leaves_after = chance.choice([0, 1, 3, 1000, 1000])
        with session.stream("POST", path, json=body) as response:
            self._count(response.status_code, path)
            assert response.status_code in (200, 503), body
            last, made = "", StreamedChoices()
            for count, line in enumerate(response.iter_lines()):
                if count >= leaves_after:
                    self.counts["left"] += 1
                    return
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                if event.get("error"):
                    self.counts["error events"] += 1
                    assert self.stopping.is_set(), line
                made.add(event)
                last = line or last
            made.check(body)
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
        day = Clients(server.url, REQUESTS, seed=SEED)
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
    evening = Clients(server.url, 100_000, seed=SEED + 1)
    deadline = time.monotonic() + 120
    while sum(evening.counts.values()) < random.Random(SEED).randrange(20, 200) and time.monotonic() < deadline:
        time.sleep(0.01)
    evening.stopping.set()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(120) == 0
    evening.left = 0
    evening.join()
    print(f"stopped: {dict(evening.counts)}")
