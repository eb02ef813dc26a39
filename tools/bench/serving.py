"""`make bench-serving`: what the server of a model costs beside the model, on this machine's CPU. Writes docs/benchmarks.md.

A real server (`python -m podway.serve`, with a probe: `probed_server.py`) of a model so small that a step takes a few milliseconds,
with a tokenizer trained on the manual and a chat template with tools:

  requests   chat and completions in turns: requests a second, and CPU of the server for each
  streams    many streams at once: CPU of the server for each token, by thread
  hostile    each request of `hostile_requests.py` beside a stream: how long the event loop was blocked, how long the stream stood still
  guided     streams with and without one among them that follows a grammar: tokens a second of the others

Other programs on the machine make times longer and CPU hardly: where both are given, CPU is the figure to compare.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tools.bench import report
from tools.bench.hostile_requests import HostileRequest, corpus

VOCAB, MAX_LEN = 4096, 4096
REPEATS = 2
WAIT = 300  # seconds for an answer: some hostile requests are much work for the model
# As long as the templates of today's models: a system turn with the tools, calls, results, and the rest.
TEMPLATE = """{%- set mark = '<|turn|>' %}
{%- if tools %}
{{- mark + 'system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'You may call these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nAnswer with <tool_call>{"name": …, "arguments": …}</tool_call>.\\n' }}
{%- elif messages[0].role == 'system' %}
{{- mark + 'system\\n' + messages[0].content + '\\n' }}
{%- endif %}
{%- set last = namespace(user=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- mark + message.role + '\\n' + message.content + '\\n' }}
{%- elif message.role == 'assistant' %}
{{- mark + 'assistant\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '\\n' }}
{%- elif message.role == 'tool' %}
{{- mark + 'tool\\n<tool_response>' + message.content + '</tool_response>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- mark + 'assistant\\n' }}{%- endif %}
"""


class Server(NamedTuple):
    """A running one."""

    pid: int
    port: int
    probe: Path

    def figures(self) -> dict[str, Any]:
        """The longest block since the last call, and the CPU of the threads so far."""
        with socket.socket(socket.AF_UNIX) as made:
            made.connect(str(self.probe))
            said = b""
            while piece := made.recv(65536):
                said += piece
        found: dict[str, Any] = json.loads(said)
        return found


def make_model(folder: Path) -> None:
    """A model of two layers, and a tokenizer of the manual's words."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    import msgspec
    import tokenizers

    from podway.model import decoder
    from podway.model.export import save_weights
    from podway.model.families import find_model

    shape = msgspec.structs.replace(find_model("tiny-llama3"), vocab=VOCAB, max_position=MAX_LEN)
    save_weights(decoder.init(shape, jax.random.key(3), jnp.float32), shape, folder)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|end|>", "<|turn|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train([str(page) for page in sorted(Path("docs").glob("*.md"))], trainer)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


@contextlib.contextmanager
def running(model: Path, work: Path, *options: str) -> Iterator[Server]:
    """A server of the model until the block ends."""
    place = work / f"probe-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "tools.bench.probed_server", str(place), str(model), "--port", "0",
               "--max-len", str(MAX_LEN), "--prompt-tokens", "256", "--compile-cache", str(work / "compiled"),
               "--max-queue", "4096", *options]  # fmt: skip
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if found := re.search(r"ready at http://[^:]+:(\d+)/v1", line):
                break
        else:
            raise RuntimeError(said)
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield Server(process.pid, int(found[1]), place)
    finally:
        process.kill()
        process.wait()


class Answer:
    """Of one request: its status, the events of it so far, and the longest time between two pieces."""

    def __init__(self) -> None:
        self.status, self.events, self.gap, self.last = 0, 0, 0.0, 0.0

    def take(self, piece: bytes) -> None:
        now = time.perf_counter()
        self.gap, self.last = max(self.gap, now - self.last if self.last else 0.0), now
        self.status = self.status or int(piece[9:12])
        self.events += piece.count(b"data: {")


async def ask(server: Server, path: str, body: bytes, answer: Answer | None = None) -> Answer:
    """One request on a connection of its own."""
    answer = answer or Answer()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 20)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with contextlib.suppress(ConnectionError):  # a server that has refused a body does not read the rest of it
        writer.write(head.encode() + body)
        await writer.drain()
    try:
        while piece := await reader.read(1 << 20):
            answer.take(piece)
    except ConnectionError:
        pass
    finally:
        writer.close()
    return answer


def body(prompt: str, tokens: int, chat: bool = False, **more: object) -> bytes:
    said: dict[str, object] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    return json.dumps({**said, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}).encode()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def requests_part(server: Server) -> list[list[object]]:
    """Chat and completions in turns, so that both have the same neighbours."""
    kinds = {
        "/v1/completions": body("Tell me about slices of a pod.", 1),
        "/v1/chat/completions": body("Tell me about slices of a pod.", 1, chat=True),
    }
    rates: dict[str, list[tuple[float, float]]] = {path: [] for path in kinds}
    for _ in range(4):
        for path, raw in kinds.items():
            left, begun, used = 80, time.perf_counter(), cpu_seconds(server.pid)

            async def client(path: str = path, raw: bytes = raw) -> None:
                nonlocal left
                while left > 0:
                    left -= 1
                    assert (await ask(server, path, raw)).status == 200

            await asyncio.gather(*(client() for _ in range(8)))
            rates[path].append((80 / (time.perf_counter() - begun), (cpu_seconds(server.pid) - used) / 80 * 1e3))
    rows: list[list[object]] = []
    for path, found in rates.items():
        found = found[1:]  # the first is for the caches
        rows.append([
            path, f"{statistics.median(rate for rate, _ in found):.0f}", f"{statistics.median(ms for _, ms in found):.2f} ms"
        ])  # fmt: skip
    return rows


async def streams_part(server: Server, streams: int, tokens: int, chat: bool) -> list[object]:
    """CPU for each token of many streams at once."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    raw = [body(f"{number} streams", tokens, chat, stream=True) for number in range(streams)]
    before = server.figures()["threads"]
    begun = time.perf_counter()
    answers = await asyncio.gather(*(ask(server, path, one) for one in raw))
    spent = time.perf_counter() - begun
    after = server.figures()["threads"]
    assert all(answer.status == 200 for answer in answers)
    made = streams * tokens
    used = {name: (after[name] - before.get(name, 0.0)) / made * 1e6 for name in after}
    events = sum(answer.events for answer in answers)
    rest = sum(used.values()) - used["MainThread"] - used["engine"] - used["launch"]
    parts = [f"{one:.0f}" for one in (used["MainThread"], used["engine"], used["launch"], rest)]
    return [f"{'chat' if chat else 'completions'}, {streams}", f"{made / spent:,.0f}", f"{events / made:.2f}", *parts]


async def hostile_part(server: Server, wanted: str) -> list[list[object]]:
    """Each hostile request beside one stream; of several tries the one that other programs disturbed least."""
    rows: list[list[object]] = []
    for request in [None, *corpus(MAX_LEN, VOCAB)]:
        if request is not None and wanted not in request.name:
            continue
        tries = [await _beside_a_stream(server, request) for _ in range(REPEATS)]
        status, first = tries[0].status, tries[0].cpu * 1e3  # nothing is cached yet
        answered, cpu, lag, gap = (min(values) for values in zip(*(one[1:] for one in tries), strict=True))
        took = f"{answered:.1f}" if request else "-"
        name = request.name if request else "nothing (the stream alone)"
        rows.append([name, status, took, f"{first:.0f}", *(f"{1e3 * one:.0f}" for one in (cpu, lag, gap))])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


class Delay(NamedTuple):
    """How a request was answered, and what it did to others, in seconds."""

    status: int | str
    answered: float
    cpu: float
    lag: float
    gap: float


async def _beside_a_stream(server: Server, request: HostileRequest | None) -> Delay:
    beside = Answer()
    stream = asyncio.ensure_future(ask(server, "/v1/completions", body("once", 3000, stream=True), beside))
    while beside.events < 2:
        await asyncio.sleep(0.02)
    server.figures()
    beside.gap = 0.0
    status: int | str = "-"
    begun = time.perf_counter()
    if request is None:
        await asyncio.sleep(1)
    else:
        with contextlib.suppress(TimeoutError):
            status = f"none in {WAIT} s"
            status = (await asyncio.wait_for(ask(server, request.path, request.body), WAIT)).status
    answered = time.perf_counter() - begun
    await asyncio.sleep(max(0.0, 0.3 - answered))
    figures = server.figures()
    stream.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stream
    return Delay(status, answered, figures["cpu"], figures["lag"], beside.gap)


async def guided_part(server: Server, others: int) -> list[list[object]]:
    """The same streams alone, with one more, and with one more that follows a grammar."""
    schema = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 200}
    kinds: dict[str, list[bytes]] = {
        "alone": [], "and one more": [body("x", 400, stream=True)],
        "and one that follows a schema": [body("x", 400, stream=True, guided_json=schema)],
    }  # fmt: skip
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(5):
        for name, more in kinds.items():
            extra = [asyncio.ensure_future(ask(server, "/v1/completions", raw)) for raw in more]
            begun, used = time.perf_counter(), cpu_seconds(server.pid)
            raws = [body(f"{number} streams", 300, stream=True) for number in range(others)]
            await asyncio.gather(*(ask(server, "/v1/completions", raw) for raw in raws))
            spent = time.perf_counter() - begun
            found[name].append((others * 300 / spent, (cpu_seconds(server.pid) - used) / (others * 300) * 1e6))
            for one in extra:
                one.cancel()
            await asyncio.gather(*extra, return_exceptions=True)
    return [
        [f"{others} streams {name}", f"{statistics.median(r for r, _ in tries):,.0f}",
         f"{statistics.median(c for _, c in tries):.0f}"] for name, tries in found.items()
    ]  # fmt: skip


async def measure(work: Path, parts: list[str], wanted: str) -> str:
    model = work / "model"
    make_model(model)
    text = [f"## The server of a model (`make bench-serving`)\n\nMachine: {report.machine()}."]
    small = ("--max-seqs", "8")
    if {"requests", "hostile", "guided"} & set(parts):
        with running(model, work, *small) as server:
            if "requests" in parts:
                rows = await requests_part(server)
                text.append("### Requests of one token, 8 at a time (goal: chat within 10 % of completions)\n")
                text.append(report.table(["path", "requests/s", "server CPU each"], rows))
            if "guided" in parts:
                rows = await guided_part(server, 7)
                text.append("### One guided stream among others\n")
                text.append(
                    report.table(["what", "tokens/s of the others", "server CPU µs for each of their tokens"], rows)
                )
            if "hostile" in parts:
                rows = await hostile_part(server, wanted)
                text.append(_HOSTILE)
                headers = [
                    "request",
                    "status",
                    "answered after s",
                    "CPU ms, first",
                    "CPU ms",
                    "lag ms",
                    "stream stood still ms",
                ]
                text.append(report.table(headers, rows))
    if "streams" in parts:
        with running(model, work, "--max-seqs", "256") as server:
            await streams_part(server, 256, 20, False)
            rows = [await streams_part(server, 256, 100, chat) for chat in (False, True)]
        text.append("### Streams at once: CPU µs of the server for each token\n")
        headers = [
            "streams",
            "tokens/s",
            "events a token",
            "event loop",
            "engine's thread",
            "launching",
            "the model and the rest",
        ]
        text.append(report.table(headers, rows))
    return "\n\n".join(text)


_HOSTILE = f"""### Requests that are meant to hold up a server (goal: no stream is delayed by more than 100 ms)

Beside each runs one stream. CPU is the longest that the event loop's thread computed without a turn for anyone else, at the first of
{REPEATS} tries and at the quickest; lag is the longest that it was away by the clock, at the quickest."""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="requests,guided,hostile,streams")
    parser.add_argument("--only", default="", help="hostile requests whose name has this")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    args = parser.parse_args()
    report.end_cleanly()
    with tempfile.TemporaryDirectory() as work:
        text = asyncio.run(measure(Path(work), args.parts.split(","), args.only))
    print(text)
    if args.write:
        report.write_section("serving", text)


if __name__ == "__main__":
    main()
