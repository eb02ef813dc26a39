"""What a hostile or broken client, replica or clock does to a gateway: nothing to anybody else."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podway.gateway.proxy import Gateway
from podway.gateway.table import ApiKey, RouteTable, digest

from .live import Replica, Seen, live, says
from .test_proxy import USAGE, body_of, run, status


def test_a_thousand_streams_that_say_nothing_hold_up_nobody() -> None:
    async def test() -> None:
        gate = asyncio.Event()

        async def silent(seen: Seen, writer: asyncio.StreamWriter) -> None:
            if b"stream" not in seen.body:
                await says(USAGE)(seen, writer)
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"9\r\ndata: 1\n\n\r\n")
            await writer.drain()
            await gate.wait()
            writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

        async with live(Replica("a", silent)) as up:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 27\r\n\r\n"
            opened = []
            for _ in range(1000):
                reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
                writer.write(head + b'{"model":"m","stream":true}')
                opened.append((reader, writer))
            for reader, _ in opened:
                await reader.readuntil(b"data: 1\n\n")
            assert status(await up.post()) == 200
            gate.set()
            ends = await asyncio.gather(*(reader.read() for reader, _ in opened))
            assert all(b"data: 2" in end and end.endswith(b"0\r\n\r\n") for end in ends)
            for _, writer in opened:
                writer.close()
            assert up.gateway.forwarder.balancer.outstanding == {}

    run(test)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300), st.sampled_from([b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", b"GET "]))
def test_any_bytes_leave_the_gateway_well(data: bytes, begin: bytes) -> None:
    async def test() -> None:
        async with live(Replica("a", says(USAGE))) as up:
            reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
            writer.write(begin + data)
            writer.write_eof()
            await reader.read()
            writer.close()
            assert status(await up.post()) == 200

    run(test)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(min_size=1, max_size=300), st.booleans())
def test_any_answer_of_a_replica_leaves_the_gateway_well(data: bytes, after_head: bool) -> None:
    async def test() -> None:
        async def odd(seen: Seen, writer: asyncio.StreamWriter) -> None:
            if seen.target == "/well":
                await says(USAGE)(seen, writer)
                return
            writer.write((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" if after_head else b"") + data)
            writer.close()

        async with live(Replica("a", odd)) as up:
            await up.post()
            assert status(await up.get("/services/chat/well")) == 200

    run(test)


def test_a_clock_that_jumps_breaks_no_limit() -> None:
    async def test() -> None:
        now = [1_800_000_000.0]
        gateway = Gateway(clock=lambda: now[0])
        keys = {digest("k"): ApiKey(user="ann", requests_per_minute=600, tokens_per_day=100)}
        gateway.update(RouteTable(version=1, keys=keys))
        gateway.budgets.spend("ann", 60, now[0])
        for jump in (-86_400.0 * 400, 86_400.0 * 800, -86_400.0 * 400):  # away, and back to the day that was
            now[0] += jump
            assert 0 <= gateway.budgets.left("ann", 100, now[0]) <= 100
        spent = RouteTable(version=2, keys=keys, day="2027-01-15", spent={"ann": 60})
        gateway.update(spent)  # the server knows what was spent on this day
        assert gateway.budgets.left("ann", 100, now[0]) == 40

    run(test)


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "m", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"model": "' + b"m" * 1_000_000 + b'"}',
        b'{"model": "m", "max_tokens": -5, "stream": null}',
        b'{"model": "\\ud800"}',
        b"\xff\xfe{}",
        b"[]",
        b"",
    ],
    ids=["deep", "huge number", "long name", "odd values", "surrogate", "bom", "list", "empty"],
)
def test_hostile_bodies_are_answered(body: bytes) -> None:
    async def test() -> None:
        async with live(Replica("a", says(USAGE))) as up:
            answer = await up.post(body=body)
            assert status(answer) in (200, 400, 404)
            if status(answer) != 200:
                assert json.loads(body_of(answer))["error"]["type"] == "invalid_request_error"
            assert status(await up.post()) == 200

    run(test)
