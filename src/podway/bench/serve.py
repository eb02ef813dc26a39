"""`podway bench serve`: load on any server with OpenAI's API, and what it did under it.

1. Prompts: synthetic (random tokens of given lengths), a ShareGPT file, or a file with a JSON object on each line.
2. They are sent all at once, at a rate (gaps as of a Poisson process), or with a fixed number of concurrent requests.
   The clock of a request starts when it is sent, so whatever time it waits in the server's queue is in its numbers.
3. The report: first the twelve lines that the JetStream benchmark prints, line for line; then what they leave out.

Two things are called TPOT. JetStream's is latency / tokens, with the wait for the first token in it; vLLM's is
(latency - first token) / (tokens - 1). Both are shown, each under its name. ITL is the time from one token to the next.
"""

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from podway.bench.sse import Target, ask, request
from podway.errors import UserError

Prompt = str | list[int]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent and how."""

    prompts: list[tuple[Prompt, int]]  # and the most tokens of the answer
    model: str
    rate: float | None = None  # requests a second; None: all at once
    concurrency: int | None = None
    seed: int = 0
    ignore_eos: bool = True
    temperature: float = 0.0
    chat: bool = False  # /v1/chat/completions


class Outcome(msgspec.Struct, kw_only=True):
    """One request."""

    sent: float
    first: float | None = None
    ended: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    gaps: list[float] = []
    error: str | None = None

    @property
    def latency(self) -> float:
        return self.ended - self.sent

    @property
    def ttft(self) -> float:
        return (self.first if self.first is not None else self.ended) - self.sent


def synthetic(count: int, length: int, answer: int, seed: int, spread: float = 0.0) -> list[tuple[Prompt, int]]:
    """Random tokens. Ids stay below 256, which every vocabulary has; `spread` varies lengths by that fraction."""
    chance = random.Random(seed)

    def near(value: int) -> int:
        return max(1, round(value * chance.uniform(1 - spread, 1 + spread)))

    return [([chance.randrange(1, 256) for _ in range(near(length))], near(answer)) for _ in range(count)]


def from_lines(path: Path, count: int | None) -> list[tuple[Prompt, int]]:
    """{"prompt": …, "max_tokens": …} on each line."""
    found: list[tuple[Prompt, int]] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found.append((row["prompt"], int(row.get("max_tokens", 128))))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UserError(
                f"{path}:{number} is not an object with a prompt", 'write {"prompt": "…", "max_tokens": 64}'
            ) from None
    return found[:count]


async def from_sharegpt(path: Path, count: int, seed: int, target: Target) -> list[tuple[Prompt, int]]:
    """First turns of conversations by people, with answers as long as those in the file (JetStream's rules).

    Shorter than 4 tokens, prompts above 1024 and both above 2048 are left out; the server counts the tokens."""
    try:
        rows = json.loads(read_text(path))
        turns = [list(row.get("conversations", row.get("conversation", []))) for row in rows]
        pairs = [(t[0]["value"], t[1]["value"]) for t in turns if len(t) >= 2 and t[0].get("from") == "human"]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"{path} is not a ShareGPT file", "it must be a JSON list of conversations") from None
    random.Random(seed).shuffle(pairs)
    found: list[tuple[Prompt, int]] = []
    for prompt, answer in pairs:
        asked, given = [await _length(target, text) for text in (prompt, answer)]
        if asked >= 4 and given >= 4 and asked <= 1024 and asked + given <= 2048:
            found.append((prompt, given))
        if len(found) == count:
            break
    return found


async def _length(target: Target, text: str) -> int:
    status, answer = await ask(target, "POST", "/tokenize", {"prompt": text})
    if status != 200 or not isinstance(answer, dict):
        raise UserError("the server has no /tokenize", "use --dataset file, with max_tokens in the file")
    return int(answer["count"])


def read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}", "check --dataset-path") from None


async def until_ready(target: Target, seconds: float) -> None:
    """Wait until /health says 200; a server that is still starting, or not there yet, may take so long."""
    deadline, said = time.monotonic() + seconds, "it does not answer"
    while True:
        try:
            status, answer = await ask(target, "GET", "/health")
            if status == 200:
                return
            said = str(answer.get("status", status)) if isinstance(answer, dict) else f"status {status}"
        except OSError as error:
            said = str(error)
        if time.monotonic() >= deadline:
            raise UserError(
                f"the server at {target.host}:{target.port} is not ready after {seconds:g} s: {said}",
                "look at its log, or wait longer with --wait",
            )
        await asyncio.sleep(0.25)


async def model_name(target: Target) -> str:
    """What the server calls its first model."""
    try:
        status, answer = await ask(target, "GET", "/v1/models")
    except OSError as error:
        raise UserError(
            f"no server at {target.host}:{target.port}: {os.strerror(error.errno) if error.errno else error}",
            "start one with: podway serve MODEL",
        ) from None
    if status == 200 and isinstance(answer, dict) and answer.get("data"):
        return str(answer["data"][0]["id"])
    raise UserError(f"{target.host}:{target.port} does not list its models (status {status})", "name it with --model")


async def run(target: Target, load: Load) -> tuple[list[Outcome], float]:
    """Send it all: the outcomes, and the seconds from the first request sent to the last answer."""
    gate = asyncio.Semaphore(load.concurrency or len(load.prompts) or 1)
    chance = random.Random(load.seed)
    tasks = []
    begun = time.perf_counter()
    due = begun
    for prompt, most in load.prompts:
        if load.rate is not None:
            due += chance.expovariate(load.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        else:
            await gate.acquire()
        tasks.append(asyncio.ensure_future(_one(target, load, prompt, most)))
        if load.rate is None:
            tasks[-1].add_done_callback(lambda _: gate.release())
    outcomes = await asyncio.gather(*tasks)
    return list(outcomes), time.perf_counter() - begun


async def _one(target: Target, load: Load, prompt: Prompt, most: int) -> Outcome:
    outcome = Outcome(sent=time.perf_counter(), gaps=[])
    try:
        await _ask(target, load, prompt, most, outcome)
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    if not outcome.ended:
        outcome.ended = time.perf_counter()
    if outcome.error is None and not outcome.tokens:
        outcome.error = "no tokens came"
    return outcome


async def _ask(target: Target, load: Load, prompt: Prompt, most: int, outcome: Outcome) -> None:
    body: dict[str, object] = {
        "model": load.model, "max_tokens": most, "temperature": load.temperature, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    if load.ignore_eos:
        body["ignore_eos"] = True
    if load.chat:
        text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = prompt
    path = "/v1/chat/completions" if load.chat else "/v1/completions"
    status, lines = await request(target, "POST", path, body)
    if status == 200:
        await _follow(lines, outcome)
        return
    whole = b"\n".join([line async for line in lines])
    if status in (400, 422) and b"continuous_usage_stats" in whole:  # a server that counts tokens only at the end
        body["stream_options"] = {"include_usage": True}
        outcome.sent = time.perf_counter()
        status, lines = await request(target, "POST", path, body)
        if status == 200:
            await _follow(lines, outcome)
            return
        whole = b"\n".join([line async for line in lines])
    outcome.error = f"status {status}: {whole[:200].decode(errors='replace')}"


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Whether a chunk's choice brings tokens; a chat begins with a chunk that only names the role."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return True
    return any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")) or bool(
        choice.get("finish_reason")
    )


async def _follow(lines: AsyncIterator[bytes], outcome: Outcome) -> None:
    """Times of tokens. Several that come in one chunk have even gaps; how many there are is in the chunk's usage, else one."""
    last, chunks, counted = outcome.sent, 0, 0
    async for line in lines:
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        event = json.loads(line[6:])
        if "error" in event:
            outcome.error = str(event["error"])[:200]
            return
        usage = event.get("usage")
        if usage:
            outcome.prompt_tokens, outcome.tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if event.get("choices") and _has_tokens(event["choices"][0]):
            new = outcome.tokens - counted if usage else 1
            if new <= 0:  # a chunk that says only why the answer ended
                continue
            chunks += 1
            counted += new
            if outcome.first is None:
                outcome.first = now
            else:
                outcome.gaps += [(now - last) / new] * new
            last = outcome.ended = now
    outcome.tokens = outcome.tokens or chunks


def percentile(values: Sequence[float], share: float) -> float:
    """Between neighbours, as numpy has it."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(outcomes: list[Outcome], seconds: float, slo: tuple[float, float] | None = None) -> dict[str, Any]:
    """Every number of the report, times in milliseconds."""
    good = [o for o in outcomes if o.error is None]
    series = {
        "ttft": [o.ttft for o in good],
        "tpot": [o.latency / o.tokens for o in good],
        "tpot_after_first": [(o.latency - o.ttft) / (o.tokens - 1) for o in good if o.tokens > 1],
        "itl": [gap for o in good for gap in o.gaps],
        "latency": [o.latency for o in good],
    }
    found: dict[str, Any] = {
        "successful": len(good), "failed": len(outcomes) - len(good), "seconds": seconds,
        "input_tokens": sum(o.prompt_tokens for o in good), "output_tokens": sum(o.tokens for o in good),
    }  # fmt: skip
    for name, values in series.items():
        mean = statistics.fmean(values) if values else 0.0
        numbers = (mean, percentile(values, 0.5), percentile(values, 0.99))
        found |= {f"{kind}_{name}_ms": 1e3 * v for kind, v in zip(("mean", "median", "p99"), numbers, strict=True)}
    if slo is not None:
        met = [
            o for o in good if o.ttft * 1e3 <= slo[0] and (o.latency - o.ttft) / max(1, o.tokens - 1) * 1e3 <= slo[1]
        ]
        found["goodput"] = len(met) / seconds
    found["errors"] = sorted({o.error for o in outcomes if o.error})[:5]
    return found


def report(s: dict[str, Any], slo: tuple[float, float] | None = None) -> str:
    """The twelve lines, then the others."""
    each = s["seconds"] or 1.0
    lines = [
        f"Successful requests: {s['successful']}",
        f"Benchmark duration: {s['seconds']:2f} s",
        f"Total input tokens: {s['input_tokens']}",
        f"Total generated tokens: {s['output_tokens']}",
        f"Request throughput: {s['successful'] / each:.2f} requests/s",
        f"Input token throughput: {s['input_tokens'] / each:.2f} tokens/s",
        f"Output token throughput: {s['output_tokens'] / each:.2f} tokens/s",
    ]
    lines += [f"{k} TTFT: {s[f'{k.lower()}_ttft_ms']:.2f} ms" for k in ("Mean", "Median", "P99")]
    lines += [f"{k} TPOT: {s[f'{k.lower()}_tpot_ms']:.2f} ms" for k in ("Mean", "Median", "P99")]
    lines += [
        "",
        "TPOT above: latency / tokens (JetStream), the first token's wait included. Below: after the first token (vLLM).",
    ]
    for name, label in (("tpot_after_first", "TPOT after the first token"), ("itl", "ITL"), ("latency", "latency")):
        lines += [f"{k} {label}: {s[f'{k.lower()}_{name}_ms']:.2f} ms" for k in ("Mean", "Median", "P99")]
    if slo is not None:
        lines.append(f"Goodput: {s['goodput']:.2f} requests/s with TTFT <= {slo[0]:g} ms and TPOT <= {slo[1]:g} ms")
    if s["failed"]:
        lines.append(f"Failed requests: {s['failed']} ({'; '.join(s['errors'])})")
    return "\n".join(lines)


def plot(outcomes: list[Outcome], path: Path) -> None:
    """An SVG: the share of requests whose TTFT, and whose TPOT, is at most so long."""
    good = [o for o in outcomes if o.error is None]
    curves = {
        "TTFT": ("#1f6feb", sorted(o.ttft * 1e3 for o in good)),
        "TPOT": ("#d1242f", sorted(o.latency / o.tokens * 1e3 for o in good)),
    }
    most = max((values[-1] for _, values in curves.values() if values), default=1.0) or 1.0
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 360" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="640" height="360" fill="white"/><path d="M50 20V320H620" fill="none" stroke="black"/>')
    for tick in range(5):
        x, y = 50 + 570 * tick / 4, 320 - 300 * tick / 4
        parts.append(f'<text x="{x:.0f}" y="338" text-anchor="middle">{most * tick / 4:.0f} ms</text>')
        parts.append(f'<text x="44" y="{y + 4:.0f}" text-anchor="end">{tick * 25}%</text>')
    for number, (name, (colour, values)) in enumerate(curves.items()):
        points = " ".join(
            f"{50 + 570 * v / most:.1f},{320 - 300 * (i + 1) / len(values):.1f}" for i, v in enumerate(values)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="70" y="{40 + 18 * number}" fill="{colour}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>"]))
