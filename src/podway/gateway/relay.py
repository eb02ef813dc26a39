"""One answer on its way from a replica to a client: bytes as they come, no faster than the client takes them.

A request may be on two replicas at once (`forward.py`, hedging): the `Race` lets the first that has a head answer, and ends the other.
Until the head is there nothing has been sent, and the request may go to another replica. A short answer to a request that may be
repeated is kept until it is whole, so that holds to its end. Any other answer is the client's from its head on: when the replica
breaks off then, a stream of events ends with an event that says so, and everything else ends with the connection, so that nobody
takes half of it for the whole.
"""

import asyncio
import enum
import time

from podway.gateway import wire
from podway.gateway.connection import ClientConnection, Incoming
from podway.gateway.openai import Question, TokenUsage, UsageReader, error_event
from podway.gateway.tgi import TgiAnswer
from podway.gateway.upstream import ReplicaConnection
from podway.gateway.wire import Header

# What a replica says when it cannot answer now: another one may.
_ELSEWHERE = frozenset({502, 503, 504})
KEPT_BYTES = 256 << 10  # an answer of at most so many is kept until it is whole


def _short(length: bytes) -> bool:
    return length.isdigit() and int(length) <= KEPT_BYTES


class RelayOutcome(enum.Enum):
    """How an attempt on one replica ended."""

    ANSWERED = "answered"
    TUNNELLED = "tunnelled"
    NOT_NOW = "not now"  # it refused, and nothing was sent to the client
    LOST = "lost"  # it broke, and nothing was sent to the client
    BROKEN = "broken"  # it broke in the middle of its answer
    LEFT = "left"  # the client went
    OUTRUN = "outrun"  # another replica answered first


class Race:
    """The attempts for one request, of which one may answer. What the client does is told to all of them."""

    def __init__(self, request: Incoming) -> None:
        self.request = request
        self.winner: Relay | None = None
        self._relays: list[Relay] = []
        request.connection.on_left = self._left
        request.connection.on_writable = self._pace

    def join(self, relay: "Relay") -> None:
        """One more attempt."""
        self._relays.append(relay)

    def claim(self, relay: "Relay") -> bool:
        """Whether this attempt is the one that answers; the others end with the first that asks."""
        if self.winner is None:
            self.winner = relay
            for other in self._relays:
                if other is not relay:
                    other.abandon(RelayOutcome.OUTRUN)
        return self.winner is relay

    def alone(self, relay: "Relay") -> bool:
        """Whether no other attempt may still answer."""
        return all(other is relay or other.outcome.done() for other in self._relays)

    def end(self) -> None:
        """The client's connection is its own again."""
        self.request.connection.on_left = self.request.connection.on_writable = None

    def _left(self) -> None:
        for relay in self._relays:
            relay.abandon(RelayOutcome.LEFT)

    def _pace(self, writable: bool) -> None:
        if self.winner is not None:
            self.winner.pace(writable)


class Relay:
    """A `ResponseReceiver` that passes an answer on. `may_retry`: an answer of "not now" is kept back; `repeatable`: a short
    answer is kept until it is whole."""

    def __init__(
        self,
        race: Race,
        *,
        may_retry: bool,
        repeatable: bool = False,
        usage: UsageReader | None,
        translated: TgiAnswer | None = None,
    ) -> None:
        self.request = race.request
        self.client: ClientConnection = race.request.connection
        self.status = 0
        self.why = ""
        self.first_byte: float | None = None  # of the body, in monotonic time
        self.last_byte = time.monotonic()
        self.outcome: asyncio.Future[RelayOutcome] = asyncio.get_running_loop().create_future()
        self._race = race
        self._may_retry = may_retry
        self._repeatable = repeatable
        self._kept: list[bytes] | None = None  # an answer that is sent when it is whole
        self._usage = usage
        self._translated = translated
        self._replica: ReplicaConnection | None = None
        self._chunked = False
        self._events = False
        self._sent = False
        self._ends_event = True
        race.join(self)

    def began(self, replica: ReplicaConnection) -> None:
        """The request is on this connection."""
        self._replica = replica
        if self.client.transport is None:
            self.abandon(RelayOutcome.LEFT)

    def usage(self, question: Question) -> TokenUsage | None:
        """What the answer took, where it can be known."""
        if self._translated is not None:
            return self._translated.usage
        return self._usage.usage(question) if self._usage is not None else None

    @property
    def token_s(self) -> float | None:
        """The time between two tokens of a streamed answer, as a mean over it; None where there are no two."""
        if not self._events or self.first_byte is None or self.status >= 400:
            return None
        if self._translated is not None:
            tokens = self._translated.usage.completion
        else:
            tokens = self._usage.completion if self._usage is not None else 0
        return (self.last_byte - self.first_byte) / (tokens - 1) if tokens > 1 else None

    def abandon(self, outcome: RelayOutcome) -> None:
        """Nobody waits for this answer."""
        if self._replica is not None and not self.outcome.done():
            self._replica.abandon()
        self._finish(outcome)

    def pace(self, writable: bool) -> None:
        """Read from the replica no faster than the client takes it."""
        if self._replica is not None and not self._replica.idle:
            self._replica.resume_reading() if writable else self._replica.pause_reading()

    def _finish(self, outcome: RelayOutcome) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    # the replica's side

    def on_head(self, status: int, reason: bytes, headers: list[Header], connection: ReplicaConnection) -> None:
        self.status = status
        if status in _ELSEWHERE and (self._may_retry or not self._race.alone(self)):
            connection.abandon()
            self._finish(RelayOutcome.NOT_NOW)
            return
        if not self._race.claim(self):
            connection.abandon()
            self._finish(RelayOutcome.OUTRUN)
            return
        if status == 101:
            self._tunnel(reason, headers, connection)
            return
        if self._translated is not None:
            headers = self._translated.head(status, headers)
        bodiless = self.request.method == b"HEAD" or status in (204, 304)
        length = wire.value_of(headers, b"content-length")
        self._chunked = not bodiless and length is None
        self._events = (wire.value_of(headers, b"content-type") or b"").startswith(b"text/event-stream")
        if self._events and self._usage is None and self._translated is None:
            self._usage = UsageReader(streamed=True)  # of a service by its path: for its latencies
        if self.client.draining:
            self.request.keep_alive = False
        head = wire.response_head(status, reason, headers, chunked=self._chunked, close=not self.request.keep_alive)
        if self._repeatable and not self._events and length is not None and _short(length):
            self._kept = [head]
            return
        self._sent = True
        self.client.write(head)

    def on_body(self, data: bytes) -> None:
        self.last_byte = time.monotonic()
        if self.first_byte is None:
            self.first_byte = self.last_byte
        if self._usage is not None:
            self._usage.feed(data)
        if self._translated is not None:
            try:
                data = self._translated.feed(data)
            except ValueError as error:
                connection, self._replica = self._replica, None
                if connection is not None:
                    connection.abandon()
                self.on_lost(str(error))
                return
        self._pass_on(data)

    def _pass_on(self, data: bytes) -> None:
        if not data:
            return  # an empty chunk would end the body
        if self._kept is not None:
            self._kept.append(data)
            return
        if self._events:
            self._ends_event = data.endswith((b"\n\n", b"\r\n\r\n"))
        self.client.write(wire.chunk(data) if self._chunked else data)

    def on_end(self) -> None:
        if self._translated is not None:
            self._pass_on(self._translated.end())
        if self._kept is not None:
            self.client.write(b"".join(self._kept))
        elif self._chunked:
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

    def on_writable(self, writable: bool) -> None:
        if self.client.on_tunnel is not None:  # a body is sent no faster than it is taken anyway
            self.client.resume_reading() if writable else self.client.pause_reading()

    def _tunnel(self, reason: bytes, headers: list[Header], connection: ReplicaConnection) -> None:
        """From here on both sides speak another protocol, and bytes pass both ways."""
        upgrade = wire.value_of(headers, b"upgrade") or b"websocket"
        head = wire.response_head(101, reason, headers, chunked=False, close=False)[:-2]
        self.client.write(head + b"connection: upgrade\r\nupgrade: " + upgrade + b"\r\n\r\n")
        self.client.on_tunnel = connection.write
        if self.request.rest_of_tunnel:
            connection.write(self.request.rest_of_tunnel)
        self.client.resume_reading()
        self._finish(RelayOutcome.TUNNELLED)
