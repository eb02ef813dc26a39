"""A gateway over real sockets: what passes, what is refused, and what happens when replicas fail."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable

import pytest

from podway.gateway import connection, proxy
from podway.gateway.table import ApiKey, RequestLimit

from .live import Live, Replica, Seen, breaks, live, says, streams

USAGE = b'{"id":"1","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}'
EVENTS = [b'data: {"n":%d}\n\n' % number for number in range(50)] + [b"data: [DONE]\n\n"]


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(limited())


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def body_of(answer: bytes) -> bytes:
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" not in head:
        return body
    out = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        if not int(size, 16):
            return out
        out, body = out + body[: int(size, 16)], body[int(size, 16) + 2 :]
    raise AssertionError("the body has no end")


def used(up: Live) -> list[tuple[str, str, str, int, int, int]]:
    """What the next report tells of usage."""
    rows = up.gateway.ledger.next_report().usage
    return [(one.user, one.service, one.model, one.requests, one.prompt_tokens, one.completion_tokens) for one in rows]


def test_models_by_name_and_services_by_path() -> None:
    async def test() -> None:
        replica = Replica("a", says(USAGE))
        async with live(replica) as up:
            answer = await up.post(body=b'{"model": "m", "messages": [], "new_field": {"x": [1]}}')
            assert status(answer) == 200 and body_of(answer) == USAGE
            assert replica.seen[0].target == "/v1/chat/completions"
            assert replica.seen[0].body == b'{"model": "m", "messages": [], "new_field": {"x": [1]}}'
            assert status(await up.get("/services/chat/deep/path?q=1&r=%20")) == 200
            assert replica.seen[1].target == "/deep/path?q=1&r=%20"
            models = json.loads(body_of(await up.get("/v1/models")))
            assert [one["id"] for one in models["data"]] == ["m"]
            assert json.loads(body_of(await up.get("/v1/models/m")))["id"] == "m"
            missing = await up.post(body=b'{"model": "other"}')
            assert status(missing) == 404 and json.loads(body_of(missing))["error"]["code"] == "model_not_found"
            assert status(await up.get("/services/nope/x")) == 404
            assert status(await up.get("/elsewhere")) == 404
            assert used(up) == [("-", "chat", "m", 1, 7, 3)]

    run(test)


def test_host_names_stand_for_services() -> None:
    async def test() -> None:
        replica = Replica("a", says(b"hi"))
        async with live(replica, hosts=("chat.example.org",)) as up:
            head = b"GET /x HTTP/1.1\r\nhost: chat.EXAMPLE.org:8080\r\nconnection: close\r\n\r\n"
            assert body_of(await up.raw(head)) == b"hi"
            assert replica.seen[0].target == "/x"

    run(test)


def test_a_stream_passes_event_by_event() -> None:
    async def test() -> None:
        replica = Replica("a", streams(EVENTS))
        async with live(replica) as up:
            answers = await asyncio.gather(*(up.post(body=b'{"model":"m","stream":true}') for _ in range(20)))
            for answer in answers:
                assert body_of(answer) == b"".join(EVENTS)

    run(test)


def test_the_first_event_does_not_wait_for_the_second() -> None:
    async def test() -> None:
        gate = asyncio.Event()

        async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"9\r\ndata: 1\n\n\r\n")
            await gate.wait()
            writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

        async with live(Replica("a", answer)) as up:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 13\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
            writer.write(head + b'{"model":"m"}')
            assert (await reader.readuntil(b"data: 1")).endswith(b"data: 1")
            gate.set()
            assert (await reader.readuntil(b"data: 2")).endswith(b"data: 2")
            writer.close()

    run(test)


@pytest.mark.parametrize("first", [breaks, says(b"later", status=503)], ids=["breaks", "503"])
def test_a_replica_that_fails_before_its_answer_is_left_for_another(first: Callable[..., Awaitable[None]]) -> None:
    async def test() -> None:
        bad, good = Replica("a", first), Replica("b", says(USAGE))
        async with live(bad, good) as up:
            for _ in range(10):
                assert status(await up.post()) == 200
            assert len(good.seen) == 10
            assert 1 <= len(bad.seen) <= 4  # it rests after three failures

    run(test)


def test_a_replica_that_is_gone_is_left_for_another() -> None:
    async def test() -> None:
        bad, good = Replica("a", says(USAGE)), Replica("b", says(USAGE))
        async with live(bad, good) as up:
            assert status(await up.post()) == 200
            await bad.kill()
            for _ in range(5):
                assert status(await up.post()) == 200

    run(test)


def test_a_replica_whose_host_vanished_is_noticed() -> None:
    """By the kernel: no byte comes that would say so."""

    async def test() -> None:
        replica = Replica("a", says(USAGE))
        async with live(replica) as up:
            connection, _ = await up.gateway.forwarder.pool.connect(replica.backend)
            assert connection.transport is not None
            link = connection.transport.get_extra_info("socket")
            assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 30_000
            connection.close()

    run(test)


def test_what_may_change_something_is_not_sent_twice() -> None:
    async def test() -> None:
        bad, good = Replica("a", breaks), Replica("b", says(b"ok"))
        async with live(bad, good) as up:
            answer = await up.post("/services/chat/pay", b"x")
            assert status(answer) == 502
            assert len(bad.seen) == 1 and not good.seen
            assert status(await up.get("/services/chat/look")) == 200  # reading may be repeated

    run(test)


def test_a_connection_the_replica_closed_meanwhile_is_no_failure() -> None:
    async def test() -> None:
        async def once(_: Seen, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")  # keeps alive, by what it says
            await writer.drain()
            writer.close()

        replica = Replica("a", once)
        async with live(replica) as up:
            for _ in range(5):
                assert status(await up.post()) == 200
            assert not up.gateway.forwarder.balancer.health["a"].failures

    run(test)


def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    async def test() -> None:
        replica = Replica("a", streams(EVENTS[:3], then="break"))
        async with live(replica, Replica("b", breaks)) as up:
            up.route(replica)
            body = body_of(await up.post(body=b'{"model":"m","stream":true}'))
            assert body.startswith(b"".join(EVENTS[:3]))
            *_, error, done = [line for line in body.split(b"\n\n") if line]
            assert done == b"data: [DONE]"
            assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "replica_lost"

    run(test)


def test_an_answer_that_breaks_is_not_taken_for_whole() -> None:
    async def test() -> None:
        async def half(_: Seen, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.transport.abort()

        bad, good = Replica("a", half), Replica("b", says(USAGE))
        async with live(bad, good) as up:
            for _ in range(4):  # a short answer that may be asked for again comes from another replica
                answer = await up.post()
                assert status(answer) == 200 and body_of(answer) == USAGE
            assert bad.seen
            up.route(bad)
            assert status(await up.post()) == 502
            answer = await up.post("/services/chat/pay", b"x")
            assert b"content-length: 100" in answer and answer.endswith(b"\r\n\r\nhalf")

    run(test)


def test_a_client_that_leaves_ends_the_answer() -> None:
    async def test() -> None:
        ended = asyncio.Event()

        async def endless(_: Seen, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            try:
                while True:
                    writer.write(b"9\r\ndata: x\n\n\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.01)
            except ConnectionError:
                ended.set()
                raise

        async with live(Replica("a", endless)) as up:
            await up.raw(
                b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 13\r\n\r\n{"model":"m"}', until=b"x"
            )
            await ended.wait()
            assert up.gateway.forwarder.balancer.outstanding == {}

    run(test)


def test_a_slow_reader_holds_back_its_replica_and_nobody_else() -> None:
    async def test() -> None:
        sent = 0

        async def flood(seen: Seen, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            if seen.target == "/small":
                await says(b"ok")(seen, writer)
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 200000000\r\n\r\n")
            while sent < 200_000_000:
                writer.write(b"x" * 100_000)
                sent += 100_000
                await writer.drain()

        async with live(Replica("a", flood)) as up:
            reader, writer = await asyncio.open_connection("127.0.0.1", up.port, limit=1000)
            writer.write(b"GET /services/chat/big HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.read(100)
            last = -1
            while sent != last:  # until every buffer between is full
                last = sent
                await asyncio.sleep(0.3)
            assert sent < 50_000_000
            assert status(await up.get("/services/chat/small")) == 200
            writer.close()

    run(test)


def test_keys() -> None:
    keys = {
        "good": ApiKey(user="ann"),
        "narrow": ApiKey(user="bob", services=("other",)),
        "slow": ApiKey(user="cat", requests_per_minute=6),
        "poor": ApiKey(user="dan", tokens_per_day=10),
    }

    async def test() -> None:
        replica = Replica("a", says(USAGE))
        async with live(replica, keys=keys, auth=True) as up:
            assert status(await up.post()) == 401
            assert status(await up.post(authorization="Bearer wrong")) == 401
            assert status(await up.post(authorization="Bearer narrow")) == 403
            assert status(await up.post(authorization="Bearer good")) == 200
            assert status(await up.get("/services/chat/x", x_api_key="good")) == 200
            # Not for a job to see:
            assert not any({"authorization", "x-api-key"} & set(seen.headers) for seen in replica.seen)
            assert status(await up.post(authorization="Bearer slow")) == 200
            refused = await up.post(authorization="Bearer slow")
            assert status(refused) == 429 and b"retry-after: 10" in refused
            assert status(await up.post(authorization="Bearer poor")) == 200
            spent = await up.post(authorization="Bearer poor")
            assert status(spent) == 429 and json.loads(body_of(spent))["error"]["code"] == "budget_exceeded"
            assert json.loads(body_of(await up.get("/v1/models")))["data"] == []
            assert json.loads(body_of(await up.get("/v1/models", authorization="Bearer good")))["data"]

    run(test)


def test_limits_of_a_service() -> None:
    async def test() -> None:
        limits = (RequestLimit(prefix="/slow", header="X-Who", rps=0.001),)
        async with live(Replica("a", says(b"ok")), limits=limits) as up:
            assert status(await up.get("/services/chat/slow", x_who="a")) == 200
            assert status(await up.get("/services/chat/slow", x_who="a")) == 429
            assert status(await up.get("/services/chat/slow", x_who="b")) == 200
            assert status(await up.get("/services/chat/fast", x_who="a")) == 200

    run(test)


def test_a_request_waits_for_a_first_replica() -> None:
    async def test() -> None:
        replica = Replica("a", says(USAGE))
        async with live(replica, hold_s=30.0) as up:
            up.route()
            waiting = asyncio.ensure_future(up.post())
            await _until(lambda: up.gateway.forwarder.held == 1)
            up.route(replica)
            assert status(await waiting) == 200
            assert up.gateway.forwarder.held == 0

    run(test)


def test_past_the_bound_it_says_so() -> None:
    async def test() -> None:
        async with live(hold_s=0.2) as up:
            answer = await up.post()
            assert status(answer) == 503 and b"retry-after:" in answer
            gone = asyncio.ensure_future(_leaves(up))
            await gone
            await _until(lambda: up.gateway.forwarder.held == 0)

    run(test)


async def _leaves(up: Live) -> None:
    up.more["hold_s"] = 60.0
    up.route()
    _, writer = await asyncio.open_connection("127.0.0.1", up.port)
    writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 13\r\n\r\n{"model":"m"}')
    await _until(lambda: up.gateway.forwarder.held == 1)
    writer.close()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_websocket_passes() -> None:
    async def test() -> None:
        async def echo(seen: Seen, writer: asyncio.StreamWriter) -> None:
            assert seen.headers["upgrade"] == "websocket" and seen.headers["connection"] == "upgrade"
            writer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\nhello")

        replica = Replica("a", echo)
        async with live(replica) as up:
            reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
            writer.write(
                b"GET /services/chat/ws HTTP/1.1\r\nhost: x\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\n"
                b"sec-websocket-key: k\r\n\r\n"
            )
            answer = await reader.readuntil(b"hello")
            assert answer.startswith(b"HTTP/1.1 101") and b"upgrade: websocket" in answer.lower()
            await replica.kill()
            assert await reader.read() == b""

    run(test)


UPGRADE = b"GET /services/chat/ws HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n"


async def upgraded(_: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\nhello")


def test_a_websocket_is_under_way_until_it_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that drains, and a gateway that ends, wait for it; a client that leaves frees its replica."""
    monkeypatch.setattr("podway.gateway.connection.DRAIN_IDLE_S", 0.0)

    async def test() -> None:
        replica = Replica("a", upgraded)
        async with live(replica) as up:
            readers = [await asyncio.open_connection("127.0.0.1", up.port) for _ in range(2)]
            for reader, writer in readers:
                writer.write(UPGRADE)
                await reader.readuntil(b"hello")
            meter = up.gateway.loads.of("chat", 0.0)
            assert meter.take("chat", 1.0).open_requests == {"a": 2}
            readers[0][1].close()
            await _until(lambda: meter.take("chat", 1.0).open_requests == {"a": 1})
            await _until(lambda: len(replica._writers) == 1)  # the replica was told
            stopping = asyncio.ensure_future(up.running.stop(60.0))
            await _until(lambda: not up.gateway.ready)
            await asyncio.sleep(0.2)
            assert not stopping.done()
            readers[1][1].close()
            await stopping

    run(test)


def test_a_connection_that_was_promised_to_stay_open_takes_one_more_request() -> None:
    """The head of a stream went out before the gateway began to end: its client may send the next request at any moment."""

    async def test() -> None:
        gate = asyncio.Event()

        async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
            if seen.target == "/small":
                await says(b"ok")(seen, writer)
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"2\r\nhi\r\n")
            await gate.wait()
            writer.write(b"0\r\n\r\n")

        async with live(Replica("a", answer)) as up:
            reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
            writer.write(b"GET /services/chat/stream HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"close" not in await reader.readuntil(b"hi\r\n")
            stopping = asyncio.ensure_future(up.running.stop(60.0))
            await _until(lambda: not up.gateway.ready)
            gate.set()
            await reader.readuntil(b"0\r\n\r\n")
            await asyncio.sleep(0)  # the gateway knows that the answer has ended
            writer.write(b"GET /services/chat/small HTTP/1.1\r\nhost: x\r\n\r\n")
            last = await reader.read(-1)
            assert last.startswith(b"HTTP/1.1 200") and b"connection: close" in last and last.endswith(b"ok")
            await stopping

    run(test)


def test_a_websocket_is_read_no_faster_than_its_replica_takes_it() -> None:
    async def test() -> None:
        gate = asyncio.Event()

        async def slow(seen: Seen, writer: asyncio.StreamWriter) -> None:
            await upgraded(seen, writer)
            await gate.wait()

        async with live(Replica("a", slow)) as up:
            reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
            writer.write(UPGRADE)
            await reader.readuntil(b"hello")
            (connection,) = up.running.connections
            sent = 0
            while connection.transport is not None and connection.transport.is_reading():
                writer.write(bytes(1 << 20))
                sent += 1
                assert sent < 200
                await asyncio.sleep(0.01)
            gate.set()
            writer.close()

    run(test)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00 not http at all\r\n\r\n", 400),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(200)) + b"\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nnot json!", 400),
        (b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 11\r\n\r\n{"model":1}', 400),
    ],
)
def test_hostile_requests_are_refused(sent: bytes, expected: int) -> None:
    async def test() -> None:
        replica = Replica("a", says(b"ok"))
        async with live(replica) as up:
            assert status(await up.raw(sent, until=b"\r\n\r\n")) == expected
            assert not replica.seen
            assert status(await up.post()) == 200  # others are served as before

    run(test)


def test_forged_headers_do_not_reach_the_replica() -> None:
    async def test() -> None:
        replica = Replica("a", says(b"ok"))
        async with live(replica) as up:
            await up.get(
                "/services/chat/", x_forwarded_for="6.6.6.6", x_podway_user="root", connection="x-secret", x_secret="1"
            )
            headers = replica.seen[0].headers
            assert headers["x-forwarded-for"] == "127.0.0.1"
            assert "x-podway-user" not in headers and "x-secret" not in headers

    run(test)


def test_requests_on_one_connection_are_answered_in_order() -> None:
    async def test() -> None:
        async def named(seen: Seen, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.05 if seen.target == "/n0" else 0)
            await says(seen.target.encode())(seen, writer)

        async with live(Replica("a", named)) as up:
            heads = b"".join(b"GET /services/chat/n%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(5))
            answer = await up.raw(heads + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            places = [answer.index(b"/n%d" % number) for number in range(5)]
            assert places == sorted(places) and answer.endswith(b"ok\n")

    run(test)


def test_heads_and_idle_connections_have_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    monkeypatch.setattr(connection, "IDLE_S", 0.2)
    monkeypatch.setattr(connection, "BODY_S", 0.2)

    async def test() -> None:
        async with live(Replica("a", says(b"ok"))) as up:
            assert await up.raw(b"") == b""  # nothing at all
            assert await up.raw(b"GET / HTT") == b""
            assert await up.raw(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{") == b""
            await _until(lambda: not up.running.connections)

    run(test)


def test_large_bodies_pass_without_being_kept() -> None:
    async def test() -> None:
        replica = Replica("a", says(b"ok"))
        async with live(replica) as up:
            large = b"x" * (proxy.KEPT_TO_RETRY * 3)
            assert status(await up.post("/services/chat/up", large)) == 200
            assert replica.seen[0].body == large
            chunked = (
                b"POST /services/chat/up HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            assert status(await up.raw(chunked + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")) == 200
            assert replica.seen[1].body == b"abcde"

    run(test)


def test_head_requests_and_empty_answers() -> None:
    async def test() -> None:
        async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
            if seen.method == "HEAD":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

        async with live(Replica("a", answer)) as up:
            head = await up.raw(b"HEAD /services/chat/x HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert b"content-length: 1000" in head and head.endswith(b"\r\n\r\n")
            assert status(await up.get("/services/chat/x")) == 204

    run(test)


def test_an_answer_that_ends_with_its_connection_passes() -> None:
    async def test() -> None:
        async def old(_: Seen, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nall of it")
            await writer.drain()
            writer.close()

        async with live(Replica("a", old)) as up:
            assert body_of(await up.get("/services/chat/x")) == b"all of it"

    run(test)


def test_stopping_ends_what_is_under_way_first() -> None:
    async def test() -> None:
        replica = Replica("a", streams(EVENTS, pause=0.01))
        async with live(replica) as up:
            waiting = asyncio.ensure_future(up.post(body=b'{"model":"m","stream":true}'))
            await _until(lambda: bool(replica.seen))
            await up.running.stop(30.0)
            assert body_of(await waiting) == b"".join(EVENTS)
            with pytest.raises(OSError):
                await up.get("/health")

    run(test)


def test_metrics_are_shown() -> None:
    async def test() -> None:
        async with live(Replica("a", says(USAGE))) as up:
            await up.post()
            page = body_of(await up.get("/metrics")).decode()
            assert 'podway_gateway_requests_total{service="chat",status="200"} 1.0' in page
            assert 'podway_gateway_tokens_total{kind="completion",service="chat",user="-"} 3.0' in page

    run(test)


def test_metrics_are_for_this_machine_and_administrators(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        keys = {"boss": ApiKey(user="ann", admin=True), "member": ApiKey(user="bob")}
        async with live(Replica("a", says(USAGE)), keys=keys) as up:
            assert status(await up.get("/metrics", x_forwarded_for="6.6.6.6")) == 403  # a proxy on this machine
            monkeypatch.setattr(connection, "_is_loopback", lambda _: False)
            assert status(await up.get("/metrics")) == 403
            assert status(await up.get("/metrics", authorization="Bearer member")) == 403
            assert status(await up.get("/metrics", authorization="Bearer boss")) == 200

    run(test)
