"""The gateway beside the proxies people use today, in front of the same dummy replica: `make bench-gateway`.

1. Small requests: how many a second one core passes on, and the CPU time of each.
2. Added latency: one request after the other, directly and through the proxy.
3. Streams: a thousand at once, every event numbered, so that one that is lost or out of order is seen; memory before and after, and
   for Podway after a second thousand, which shows whether it grows.

The proxy has one core and everything else the other. The replica and the clients are processes of this program (`replica`, `load`),
written for speed alone. The other proxies are started by `proxies.py`; one that cannot be installed or started is named with the reason.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import httptools
import msgspec
from tools.bench import proxies, report
from tools.bench.free_ports import free_port
from tools.bench.proxies import MODEL, OTHER_CORE, process

EVENTS = 100
START_S = 90.0  # of a proxy: some import for half a minute
STREAM_S = 45.0  # a stream of 2 s that is not over by then counts as lost
ANSWER = json.dumps(
    {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hello there."}}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
    }
).encode()
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16}


# the replica: `python -m tools.bench.gateway replica PORT`


class _Replica(asyncio.Protocol):
    """Answers at once; a request with "stream" gets numbered events, one every 20 ms."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.parser = httptools.HttpRequestParser(self)
        self.body = b""

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        body, self.body = self.body, b""
        if b'"stream": true' in body or b'"stream":true' in body:
            self.task = asyncio.get_running_loop().create_task(self._stream())
            return
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
        self.transport.write(head + ANSWER)

    async def _stream(self) -> None:
        write = self.transport.write
        write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number in range(EVENTS):
            event = b"data: " + json.dumps(_event(number)).encode() + b"\n\n"
            write(b"%x\r\n%b\r\n" % (len(event), event))
            await asyncio.sleep(0.02)
        write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def _event(number: int) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": f"<{number}>"}, "finish_reason": None}
    return {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}


async def replica(port: int) -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(_Replica, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


# the clients: `python -m tools.bench.gateway load KIND PORT …`, one line of JSON


class _Client(asyncio.Protocol):
    """Keeps one request on its connection until the time is over."""

    def __init__(self, request: bytes, until: float, done: "asyncio.Future[None]") -> None:
        self.request, self.until, self.done = request, until, done
        self.latencies: list[float] = []
        self.failures = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self._send()

    def _send(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.begun = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        if self.parser.get_status_code() != 200:
            self.failures += 1
        self.latencies.append(now - self.begun)
        if now < self.until:
            self._send()
        else:
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def _request(port: int, path: str, key: str, *, stream: bool = False) -> bytes:
    body = json.dumps({**QUESTION, "stream": stream} if stream else QUESTION).encode()
    return (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\nauthorization: Bearer {key}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


async def small(port: int, path: str, key: str, clients: int, seconds: float) -> dict[str, Any]:
    """Small requests from so many clients, each as soon as its last one is answered."""
    loop = asyncio.get_running_loop()
    until = time.perf_counter() + seconds
    request = _request(port, path, key)
    running = []
    for _ in range(clients):
        client = _Client(request, until, loop.create_future())
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
        running.append(client)
    begun = time.perf_counter()
    await asyncio.gather(*(client.done for client in running))
    took = time.perf_counter() - begun
    latencies = sorted(one for client in running for one in client.latencies)
    return {
        "requests": len(latencies),
        "failures": sum(client.failures for client in running),
        "seconds": took,
        "p50_ms": 1e3 * latencies[len(latencies) // 2],
        "p99_ms": 1e3 * latencies[int(len(latencies) * 0.99)],
    }


async def streams(port: int, path: str, key: str, clients: int) -> dict[str, Any]:
    """Streams that all run at once: how many came whole and in order."""

    async def one() -> str:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(_request(port, path, key, stream=True))
            text = b""
            async with asyncio.timeout(STREAM_S):
                while b"[DONE]" not in text[-200:]:
                    data = await reader.read(65536)
                    if not data:
                        break
                    text += data
            writer.close()
        except (OSError, TimeoutError) as error:
            return type(error).__name__
        expected = [b"<%d>" % number for number in range(EVENTS)]
        found = [text.find(mark) for mark in expected]
        if -1 in found:
            return "events lost"
        return "ok" if found == sorted(found) else "out of order"

    results = await asyncio.gather(*(one() for _ in range(clients)))
    return {"whole": results.count("ok"), "of": clients, "troubles": sorted(set(results) - {"ok"})}


# the comparison


def answers(port: int, path: str, key: str, within: float) -> bool:
    """Wait until a request is answered."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(QUESTION).encode())
        request.add_header("content-type", "application/json")
        request.add_header("authorization", f"Bearer {key}")
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=10) as answer:
            if answer.status == 200:
                return True
        time.sleep(0.3)
    return False


def _load(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.bench.gateway", "load", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, OTHER_CORE)
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _group(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if int((place / "stat").read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(place.name))
    return found


def _cpu_s(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _rss_mb(pids: list[int]) -> float:
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Measured(msgspec.Struct, kw_only=True):
    """One proxy."""

    name: str
    requests_s: float = 0.0
    cpu_us: float = 0.0  # for each request
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    whole: int = 0
    streams: int = 0
    rss_before: float = 0.0
    rss_after: float = 0.0
    rss_again: float = 0.0  # after as many streams once more
    trouble: str = ""


def measure(name: str, port: int, path: str, key: str, leader: int, *, seconds: float, many: int) -> Measured:
    """All figures of one proxy that answers on a port; `leader` 0: none, the replica itself."""
    _load("small", port, path, key, 8, 1.0)  # warm
    found = Measured(name=name)
    pids = _group(leader) if leader else []
    found.rss_before = _rss_mb(pids)
    before = _cpu_s(pids)
    loaded = _load("small", port, path, key, 32, seconds)
    found.requests_s = loaded["requests"] / loaded["seconds"]
    found.cpu_us = 1e6 * (_cpu_s(pids) - before) / loaded["requests"]
    if loaded["failures"]:
        found.trouble = f"{loaded['failures']} of {loaded['requests']} small requests failed"
    alone = _load("small", port, path, key, 1, seconds)
    found.p50_ms, found.p99_ms = alone["p50_ms"], alone["p99_ms"]
    many_streams = _load("streams", port, path, key, many)
    found.whole, found.streams = many_streams["whole"], many_streams["of"]
    if many_streams["troubles"]:
        found.trouble = "; ".join(filter(None, [found.trouble, ", ".join(many_streams["troubles"])]))
    found.rss_after = _rss_mb(_group(leader)) if leader else 0.0
    if name == OURS:
        again = _load("streams", port, path, key, many)
        found.whole, found.streams = found.whole + again["whole"], found.streams + again["of"]
        found.rss_again = _rss_mb(_group(leader))
    return found


PROXIES = {
    "Podway": proxies.podway,
    "LiteLLM proxy": proxies.litellm,
    "SkyServe load balancer": proxies.skyserve,
    "dstack in-server proxy": proxies.dstack,
}
OURS = "Podway"


def compare(seconds: float, many: int, only: list[str]) -> list[Measured]:
    """The replica by itself, then each proxy in front of it."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        upstream = free_port()
        command = [sys.executable, "-m", "tools.bench.gateway", "replica", str(upstream)]
        with process(command, OTHER_CORE, place / "replica.log"):
            assert answers(upstream, "/v1/chat/completions", "none", 30)
            found.append(measure("no proxy", upstream, "/v1/chat/completions", "none", 0, seconds=seconds, many=many))
            for name, proxy in PROXIES.items():
                if only and name not in only:
                    continue
                print(f"measuring {name}…", file=sys.stderr, flush=True)
                try:
                    with proxy(place, upstream) as (port, path, key, leader):
                        if not answers(port, path, key, START_S):
                            raise RuntimeError(f"did not answer within {START_S:g} s: {proxies.last_line(place)}")
                        found.append(measure(name, port, path, key, leader, seconds=seconds, many=many))
                except (RuntimeError, OSError, subprocess.SubprocessError, ValueError) as error:
                    found.append(Measured(name=name, trouble=str(error)))
    return found


def page(found: list[Measured], seconds: float) -> str:
    """The section of docs/benchmarks.md."""
    direct = found[0]
    rows = []
    for one in found:
        added = (
            [f"{one.p50_ms - direct.p50_ms:.2f}", f"{one.p99_ms - direct.p99_ms:.2f}"]
            if one is not direct
            else ["", ""]
        )
        if not one.requests_s:
            rows.append([one.name, "", "", "", "", "", "", one.trouble])
            continue
        memory = " → ".join(f"{size:.0f}" for size in (one.rss_before, one.rss_after, one.rss_again) if size)
        cpu = f"{one.cpu_us:.0f}" if one.rss_before else ""
        rows.append(
            [one.name, f"{one.requests_s:,.0f}", cpu, *added, f"{one.whole:,} of {one.streams:,}", memory, one.trouble]
        )
    headers = [
        "proxy",
        "requests/s",
        "CPU µs each",
        "added p50, ms",
        "added p99, ms",
        "streams whole",
        "MB before → after",
        "",
    ]
    return "\n".join(
        [
            "## The gateway beside other proxies (`make bench-gateway`)",
            "",
            f"{report.machine()}. One dummy replica that answers at once; the proxy on one core, replica and clients on the other. "
            f"Small requests from 32 clients for {seconds:g} s; latency of one client at a time, less that without a proxy; "
            f"streams of {EVENTS} numbered events, 20 ms apart, all at once.",
            "",
            report.table(headers, rows),
            "",
            *goals(found),
        ]
    )


def goals(found: list[Measured]) -> list[str]:
    """Whether what we want of the gateway holds in this run."""
    direct = found[0]
    ours = next((one for one in found if one.name == OURS and one.requests_s), None)
    if ours is None:
        return []
    best = max((one.requests_s for one in found[1:] if one is not ours), default=0.0)
    p50, p99 = ours.p50_ms - direct.p50_ms, ours.p99_ms - direct.p99_ms
    wanted = [
        (f"{ours.requests_s:,.0f} requests/s on one core (at least 2,000)", ours.requests_s >= 2000),
        (f"added p50 {p50:.2f} ms (at most 2)", p50 <= 2),
        (f"added p99 {p99:.2f} ms (at most 10)", p99 <= 10),
        (f"{ours.streams - ours.whole} streams lost or out of order (none)", ours.whole == ours.streams),
    ]
    if best:
        times = ours.requests_s / best
        wanted.insert(1, (f"{times:.1f} times the best of the others (at least 3)", times >= 3))
    return [f"- {'met' if met else 'NOT MET'}: {text}" for text, met in wanted]


def main() -> int:
    """Entry of all three programs."""
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    words = sys.argv[1:]
    if words[:1] == ["replica"]:
        asyncio.run(replica(int(words[1])))
        return 0
    if words[:2] == ["load", "small"]:
        print(json.dumps(asyncio.run(small(int(words[2]), words[3], words[4], int(words[5]), float(words[6])))))
        return 0
    if words[:2] == ["load", "streams"]:
        print(json.dumps(asyncio.run(streams(int(words[2]), words[3], words[4], int(words[5])))))
        return 0
    options = argparse.ArgumentParser(prog="python -m tools.bench.gateway")
    options.add_argument("--seconds", type=float, default=6.0)
    options.add_argument("--streams", type=int, default=1000)
    options.add_argument("--only", action="append", default=[])
    options.add_argument("--write", action="store_true")
    asked = options.parse_args()
    text = page(compare(asked.seconds, asked.streams, asked.only), asked.seconds)
    print(text)
    if asked.write:
        report.write_section("gateway", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
