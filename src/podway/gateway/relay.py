"""One answer on its way from a replica to a client: bytes as they come, no faster than the client takes them.

Until the head is there nothing has been sent, and the request may go to another replica. After it the answer is the client's: when
the replica breaks off then, a stream of events ends with an event that says so, and any other answer ends with the connection, so
that nobody takes half of it for the whole.
"""

import asyncio
import enum
import time

from podway.gateway import wire
from podway.gateway.connection import ClientConnection, Incoming
from podway.gateway.openai import UsageReader, error_event
from podway.gateway.upstream import ReplicaConnection
from podway.gateway.wire import Header

# What a replica says when it cannot answer now: another one may.
_ELSEWHERE = frozenset({502, 503, 504})


class RelayOutcome(enum.Enum):
    """How an attempt on one replica ended."""

    ANSWERED = "answered"
    TUNNELLED = "tunnelled"
    NOT_NOW = "not now"  # it refused, and nothing was sent to the client
    LOST = "lost"  # it broke before its head, and nothing was sent to the client
    BROKEN = "broken"  # it broke in the middle of its answer
    LEFT = "left"  # the client went


class Relay:
    """A `ResponseReceiver` that passes an answer on. `may_retry`: an answer of "not now" is kept back."""

    def __init__(self, request: Incoming, *, may_retry: bool, usage: UsageReader | None) -> None:
        self.request = request
        self.client: ClientConnection = request.connection
        self.usage = usage
        self.status = 0
        self.why = ""
        self.first_byte: float | None = None  # of the body, in monotonic time
        self.last_byte = time.monotonic()
        self.outcome: asyncio.Future[RelayOutcome] = asyncio.get_running_loop().create_future()
        self._may_retry = may_retry
        self._replica: ReplicaConnection | None = None
        self._chunked = False
        self._events = False
        self._sent = False
        self._ends_event = True
        self.client.on_left = self._left
        self.client.on_writable = self._pace

    def began(self, replica: ReplicaConnection) -> None:
        """The request is on this connection."""
        self._replica = replica
        if self.client.transport is None:
            self._left()

    def _finish(self, outcome: RelayOutcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)
        if outcome is not RelayOutcome.TUNNELLED:
            self.client.on_left = self.client.on_writable = None

    # the replica's side

    def on_head(self, status: int, reason: bytes, headers: list[Header], connection: ReplicaConnection) -> None:
        self.status = status
        if status in _ELSEWHERE and self._may_retry:
            connection.abandon()
            self._finish(RelayOutcome.NOT_NOW)
            return
        if status == 101:
            self._tunnel(reason, headers, connection)
            return
        bodiless = self.request.method == b"HEAD" or status in (204, 304)
        sized = any(name == b"content-length" for name, _ in headers)
        self._chunked = not bodiless and not sized
        self._events = (wire.value_of(headers, b"content-type") or b"").startswith(b"text/event-stream")
        self._sent = True
        head = wire.response_head(status, reason, headers, chunked=self._chunked, close=not self.request.keep_alive)
        self.client.write(head)

    def on_body(self, data: bytes) -> None:
        self.last_byte = time.monotonic()
        if self.first_byte is None:
            self.first_byte = self.last_byte
        if self.usage is not None:
            self.usage.feed(data)
        if self._events:
            self._ends_event = data.endswith((b"\n\n", b"\r\n\r\n"))
        self.client.write(wire.chunk(data) if self._chunked else data)

    def on_end(self) -> None:
        if self._chunked:
            self.client.write(wire.LAST_CHUNK)
        self._finish(RelayOutcome.ANSWERED)

    def on_lost(self, why: str) -> None:
        self.why = why
        if self.outcome.done():
            self.client.close()  # a tunnel ends with its other side
            return
        if not self._sent:
            self._finish(RelayOutcome.LOST)
            return
        if self._chunked and self._events:
            event = error_event("the replica stopped in the middle of its answer", inside_event=not self._ends_event)
            self.client.write(wire.chunk(event) + wire.LAST_CHUNK)
        else:
            self.request.keep_alive = False
            self.client.abort()
        self._finish(RelayOutcome.BROKEN)

    def on_tunnel(self, data: bytes) -> None:
        self.client.write(data)

    def _tunnel(self, reason: bytes, headers: list[Header], connection: ReplicaConnection) -> None:
        """From here on both sides speak another protocol, and bytes pass both ways."""
        upgrade = wire.value_of(headers, b"upgrade") or b"websocket"
        head = wire.response_head(101, reason, headers, chunked=False, close=False)[:-2]
        self.client.write(head + b"connection: upgrade\r\nupgrade: " + upgrade + b"\r\n\r\n")
        self.client.on_tunnel = connection.write_now
        if self.request.rest_of_tunnel:
            connection.write_now(self.request.rest_of_tunnel)
        self.client.go_on()
        self._finish(RelayOutcome.TUNNELLED)

    # the client's side

    def _left(self) -> None:
        if self._replica is not None:
            self._replica.abandon()
        self._finish(RelayOutcome.LEFT)

    def _pace(self, writable: bool) -> None:
        if self._replica is not None and not self._replica.idle:
            self._replica.go_on() if writable else self._replica.hold()
