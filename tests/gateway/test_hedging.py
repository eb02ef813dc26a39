"""Two replicas at once: the first that begins answers, and the other is told that nobody waits."""

import asyncio

from .live import Answer, Replica, Seen, breaks, live, says, streams
from .test_proxy import EVENTS, USAGE, body_of, run, status


def never(cut: asyncio.Event) -> Answer:
    """Takes a request and answers nothing but that it goes on, until the other side goes."""

    async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)
        finally:
            cut.set()

    return answer


def test_a_second_replica_answers_for_a_slow_one() -> None:
    async def test() -> None:
        cut = asyncio.Event()
        slow, quick = Replica("a", never(cut)), Replica("b", streams(EVENTS))
        async with live(slow, quick, hedge_s=0.05) as up:
            assert body_of(await up.post(body=b'{"model":"m","stream":true}')) == b"".join(EVENTS)
            await cut.wait()  # the slow one was told
            assert len(slow.seen) == len(quick.seen) == 1
            assert not up.gateway.forwarder.balancer.outstanding
            assert b'hedges_total{service="chat"} 1.0' in await up.get("/metrics")

    run(test)


def test_the_first_may_still_win() -> None:
    async def test() -> None:
        cut, gate = asyncio.Event(), asyncio.Event()

        async def late(seen: Seen, writer: asyncio.StreamWriter) -> None:
            await gate.wait()
            await says(USAGE)(seen, writer)

        slow, slower = Replica("a", late), Replica("b", never(cut))
        async with live(slow, slower, hedge_s=0.05) as up:
            waiting = asyncio.ensure_future(up.post())
            while not slower.seen:
                await asyncio.sleep(0.01)
            gate.set()
            assert body_of(await waiting) == USAGE
            await cut.wait()

    run(test)


def test_a_second_one_that_fails_does_not_end_the_first() -> None:
    async def test() -> None:
        for second in (breaks, says(b"later", status=503)):
            gate = asyncio.Event()

            async def late(seen: Seen, writer: asyncio.StreamWriter, gate: asyncio.Event = gate) -> None:
                await gate.wait()
                await says(USAGE)(seen, writer)

            slow, bad = Replica("a", late), Replica("b", second)
            async with live(slow, bad, hedge_s=0.05) as up:
                waiting = asyncio.ensure_future(up.post())
                while not bad.seen:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)
                gate.set()
                assert status(await waiting) == 200

    run(test)


def test_what_may_change_something_is_not_hedged() -> None:
    async def test() -> None:
        async def late(seen: Seen, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.3)
            await says(b"ok")(seen, writer)

        one, other = Replica("a", late), Replica("b", late)
        async with live(one, other, hedge_s=0.02) as up:
            assert status(await up.post("/services/chat/pay", b"x")) == 200
            assert len(one.seen) + len(other.seen) == 1

    run(test)


def test_a_client_that_leaves_ends_both() -> None:
    async def test() -> None:
        ends = asyncio.Event(), asyncio.Event()
        replicas = Replica("a", never(ends[0])), Replica("b", never(ends[1]))
        async with live(*replicas, hedge_s=0.02) as up:
            _, writer = await asyncio.open_connection("127.0.0.1", up.port)
            writer.write(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 13\r\n\r\n{"model":"m"}')
            while not all(one.seen for one in replicas):
                await asyncio.sleep(0.01)
            writer.close()
            for end in ends:
                await end.wait()
            while up.gateway.forwarder.balancer.outstanding:
                await asyncio.sleep(0.01)

    run(test)


def test_a_replica_that_comes_back_answers_what_waited() -> None:
    async def test() -> None:
        replica = Replica("a", says(USAGE))
        async with live(replica, hold_s=60.0) as up:
            port = replica.port
            await replica.kill()
            waiting = asyncio.ensure_future(up.post())
            while not up.gateway.forwarder.held:
                await asyncio.sleep(0.01)
            await replica.start(port)
            assert status(await waiting) == 200

    run(test)
