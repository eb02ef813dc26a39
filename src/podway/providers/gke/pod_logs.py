"""The output of a pod, as the API server's `log` streams it: lines with their times, until its container has ended.

A stream that is silent for long is given up with a `ProviderError`, since what is between may have forgotten the connection: whoever
reads opens it again, and skips what it has of the second it begins with (`control/run_output.py`).
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from urllib.parse import quote, urlencode

from podway.errors import ProviderError
from podway.providers import OutputLine
from podway.providers.gke.api import KubernetesApi, refusal
from podway.providers.gke.streams import CHUNK, OPEN_S, error_body, open_stream

SILENT_S = 60.0
LONGEST_LINE = 1 << 20
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9})\d*)?(Z|[+-]\d\d:\d\d) ?")


async def follow_log(
    api: KubernetesApi, namespace: str, pod: str, container: str, since: int
) -> AsyncIterator[list[OutputLine]]:
    """Lines of the pod since that second (0: all of them), some at a time, until no more can come."""
    path = f"{api.prefix}/api/v1/namespaces/{quote(namespace)}/pods/{quote(pod)}/log"
    query = {"container": container, "follow": "true", "timestamps": "true"}
    if since:
        query["sinceTime"] = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    lines = LineSplitter()
    async for data in _body(api, f"{path}?{urlencode(query)}"):
        if found := lines.feed(data):
            yield found
    if found := lines.finish():
        yield found


class LineSplitter:
    """Bytes of a log with times -> its lines."""

    def __init__(self) -> None:
        self._rest = b""
        self._last = time.time_ns()

    def feed(self, data: bytes) -> list[OutputLine]:
        """The lines that are whole now."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            whole, self._rest = [*whole, self._rest], b""
        return [self._line(one + b"\n") for one in whole]

    def finish(self) -> list[OutputLine]:
        """The last line, where it has no newline."""
        rest, self._rest = self._rest, b""
        return [self._line(rest)] if rest else []

    def _line(self, raw: bytes) -> OutputLine:
        stamp = _STAMP.match(raw)
        if stamp is None:  # the node's own words, or a part of a line that was cut
            return OutputLine(self._last, raw)
        moment = datetime.fromisoformat((stamp[1] + stamp[3].replace(b"Z", b"+00:00")).decode())
        fraction = int((stamp[2] or b"0").ljust(9, b"0"))
        self._last = int(moment.timestamp()) * 1_000_000_000 + fraction
        return OutputLine(self._last, raw[stamp.end() :])


async def _body(api: KubernetesApi, target: str) -> AsyncIterator[bytes]:
    """The answer's bytes as they come."""
    headers = await asyncio.to_thread(api.headers)
    try:
        async with asyncio.timeout(OPEN_S):
            reader, writer = await open_stream(api)
    except (OSError, TimeoutError) as error:
        raise ProviderError(f"the cluster of context {api.context.name} cannot be reached: {error}") from None
    try:
        lines = {"Host": f"{api.host}:{api.port}", **headers, "Connection": "close"}
        head = "".join(f"{key}: {value}\r\n" for key, value in lines.items())
        writer.write(f"GET {target} HTTP/1.1\r\n{head}\r\n".encode())
        async with asyncio.timeout(OPEN_S):
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(answer.split(None, 2)[1])
        if status != 200:
            raise refusal(api.context.name, status, await error_body(reader), "pods/log")
        chunked = b"transfer-encoding: chunked" in answer
        while True:
            async with asyncio.timeout(SILENT_S):
                data = await _chunk(reader) if chunked else await reader.read(CHUNK)
            if not data:
                return
            yield data
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise ProviderError(f"context {api.context.name}: the log broke off: {error or 'it was silent'}") from None
    finally:
        writer.close()


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
    data = await reader.readexactly(size + 2)
    return data[:-2]
