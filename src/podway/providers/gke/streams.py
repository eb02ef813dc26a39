"""A command in a pod, with its stdin and stdout as a stream: how an agent and a port of a pod are reached.

The API server's `exec` over a WebSocket (RFC 6455), protocol v4.channel.k8s.io: the first byte of a message says which stream it
belongs to (0 stdin, 1 stdout, 2 stderr, 3 how it ended, 4 the size of a terminal). With v5, which Kubernetes has since 1.30, stdin can
be closed. Only exec is used, which every cluster allows that allows `kubectl exec`.
"""

import asyncio
import base64
import json
import os
import struct
from collections.abc import Sequence
from urllib.parse import quote, urlencode

from podway.errors import ProviderError
from podway.hosts.link import Connect, Reader, Writer
from podway.providers.gke.api import KubernetesApi, refusal

PROTOCOL, CLOSING = "v4.channel.k8s.io", "v5.channel.k8s.io"  # the second can close stdin
CLOSE_STREAM = 255
STDIN, STDOUT, STDERR, ERROR = range(4)
CHUNK = 64 << 10
OPEN_S = 30.0
MOST_HEAD = 64 << 10
MOST_MESSAGE = 64 << 20
_TEXT, _BINARY, _CLOSE, _PING, _PONG = 1, 2, 8, 9, 10


def run_in_pod(api: KubernetesApi, namespace: str, pod: str, container: str, command: Sequence[str]) -> Connect:
    """Opens streams to a fresh process in the pod."""
    target = _target(api, namespace, pod, container, command, "stderr")

    async def connect() -> tuple[Reader, Writer]:
        headers = await asyncio.to_thread(api.headers)
        async with asyncio.timeout(OPEN_S):
            reader, writer, _ = await _upgrade(api, target, headers, PROTOCOL)
        return ExecReader(reader, writer), ExecWriter(writer)

    return connect


def _target(api: KubernetesApi, namespace: str, pod: str, container: str, command: Sequence[str], third: str) -> str:
    """`third`: what there is besides stdin and stdout; a terminal has no stderr of its own."""
    path = f"{api.prefix}/api/v1/namespaces/{quote(namespace)}/pods/{quote(pod)}/exec"
    query = [("container", container), ("stdin", "true"), ("stdout", "true"), (third, "true")]
    return f"{path}?{urlencode([*query, *(('command', word) for word in command)])}"


class PodSession:
    """A process in a pod with all its streams, for a person at a terminal."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, closes: bool) -> None:
        self._reader, self._writer, self._closes = reader, writer, closes

    async def read(self) -> tuple[int, bytes] | None:
        """The next message: its channel and its bytes; None when the connection is gone."""
        while True:
            try:
                opcode, message = await read_message(self._reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                return None
            if opcode == _PING:
                self._writer.write(frame(_PONG, message, masked=True))
            elif opcode == _CLOSE:
                return None
            elif len(message) > 1:  # an API server begins each stream with a message that holds nothing
                return message[0], message[1:]

    def write(self, channel: int, data: bytes) -> None:
        """Bytes for one of its streams, sent as soon as they can be; OSError once the connection is gone."""
        if not self.is_open():
            raise ConnectionResetError("the connection is closed")
        self._writer.write(frame(_BINARY, bytes([channel]) + data, masked=True))

    def is_open(self) -> bool:
        """Whether anything can still be sent."""
        return not self._writer.is_closing()

    async def drain(self) -> None:
        """Until not much waits to be sent."""
        await self._writer.drain()

    def unsent(self) -> int:
        """How many bytes wait to be sent."""
        return self._writer.transport.get_write_buffer_size()

    def end_input(self) -> None:
        """Nothing more comes on stdin, where that can be said."""
        if self._closes:
            self.write(CLOSE_STREAM, bytes([STDIN]))

    def close(self) -> None:
        self._writer.close()


async def open_session(
    api: KubernetesApi, namespace: str, pod: str, container: str, command: Sequence[str], *, terminal: bool
) -> PodSession:
    """Start a process in the pod."""
    target = _target(api, namespace, pod, container, command, "tty" if terminal else "stderr")
    headers = await asyncio.to_thread(api.headers)
    async with asyncio.timeout(OPEN_S):
        reader, writer, chosen = await _upgrade(api, target, headers, f"{CLOSING}, {PROTOCOL}")
    return PodSession(reader, writer, closes=chosen == CLOSING)


async def open_stream(api: KubernetesApi) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the API server, secured as its context says."""
    secured = api.carried()[1]
    name = (api.context.server_name or api.host) if secured else None
    return await asyncio.open_connection(api.host, api.port, ssl=secured, server_hostname=name, limit=MOST_HEAD)


async def _upgrade(
    api: KubernetesApi, target: str, headers: dict[str, str], protocols: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
    reader, writer = await open_stream(api)
    lines = {
        "Host": f"{api.host}:{api.port}",
        **headers,
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
        "Sec-WebSocket-Protocol": protocols,
    }
    try:
        writer.write(f"GET {target} HTTP/1.1\r\n".encode())
        writer.write("".join(f"{key}: {value}\r\n" for key, value in lines.items()).encode() + b"\r\n")
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(None, 2)[1])
        if status != 101:
            raise refusal(api.context.name, status, await error_body(reader), "pods/exec")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        writer.close()
        raise ProviderError(f"context {api.context.name}: exec was not answered as it should be ({error})") from None
    except BaseException:
        writer.close()
        raise
    return reader, writer, CLOSING if CLOSING.encode() in head else PROTOCOL


async def error_body(reader: asyncio.StreamReader) -> dict[str, object]:
    """The Status object of an answer that is no stream."""
    data = await reader.read(CHUNK)
    start = data.find(b"{")
    try:
        found = json.loads(data[start : data.rfind(b"}") + 1])
    except ValueError:
        return {"message": data.decode(errors="replace")[:300]}
    return found if isinstance(found, dict) else {}


class ExecReader:
    """The process' stdout. What it wrote to stderr is the reason of an end that was not its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._data = b""
        self._said = b""
        self._ended = False

    async def read(self, n: int = -1) -> bytes:
        """Some bytes, as they come; b'' at the end."""
        while not self._data and not self._ended:
            await self._next()
        size = len(self._data) if n < 0 else n
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    async def _next(self) -> None:
        try:
            opcode, message = await read_message(self._reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._ended = True
            return
        if opcode == _PING:
            self._writer.write(frame(_PONG, message, masked=True))
        elif opcode == _CLOSE:
            self._ended = True
        elif opcode in (_TEXT, _BINARY) and message:
            channel, data = message[0], message[1:]
            if channel == STDOUT:
                self._data += data
            elif channel == STDERR:
                self._said = (self._said + data)[-2000:]
            elif channel == ERROR:
                self._end(data)

    def _end(self, data: bytes) -> None:
        self._ended = True
        try:
            status = json.loads(data)
        except ValueError:
            status = {}
        if status.get("status") == "Success":
            return
        said = self._said.decode(errors="replace").strip() or str(status.get("message") or "it ended")
        raise ConnectionResetError(said.splitlines()[-1][:300])


class ExecWriter:
    """The process' stdin."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def write(self, data: bytes) -> None:
        for start in range(0, len(data), CHUNK):
            self._writer.write(frame(_BINARY, bytes([STDIN]) + data[start : start + CHUNK], masked=True))

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


async def read_message(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The next whole message: its opcode and its bytes, unmasked."""
    opcode, message = 0, b""
    while True:
        first, second = await reader.readexactly(2)
        size = second & 0x7F
        if size > 125:
            size = int.from_bytes(await reader.readexactly(2 if size == 126 else 8), "big")
        if size + len(message) > MOST_MESSAGE:
            raise ConnectionResetError("a message is too long")
        mask = await reader.readexactly(4) if second & 0x80 else b""
        data = await reader.readexactly(size)
        message += _masked(data, mask) if mask else data
        opcode = opcode or first & 0x0F
        if first & 0x80:
            return opcode, message


def frame(opcode: int, data: bytes, *, masked: bool) -> bytes:
    """One message in one frame; a client's are masked."""
    size, bit = len(data), 0x80 if masked else 0
    if size < 126:
        head = struct.pack("!BB", 0x80 | opcode, bit | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", 0x80 | opcode, bit | 126, size)
    else:
        head = struct.pack("!BBQ", 0x80 | opcode, bit | 127, size)
    if not masked:
        return head + data
    mask = os.urandom(4)
    return head + mask + _masked(data, mask)


def _masked(data: bytes, mask: bytes) -> bytes:
    size = len(data)
    pattern = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(data, "big") ^ int.from_bytes(pattern, "big")).to_bytes(size, "big")
