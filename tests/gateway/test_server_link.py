"""Routes from a server that goes away, lies or comes back; usage that is counted once whatever happens."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import UserError
from podway.gateway import server_link
from podway.gateway.ledger import UsageLedger, leftovers
from podway.gateway.limits import Budgets
from podway.gateway.load import LoadMeter, ServiceMeter
from podway.gateway.proxy import Gateway
from podway.gateway.report import GatewayReport
from podway.gateway.server_link import ServerLink
from podway.gateway.table import ApiKey, Backend, RequestLimit, RoutedService, Routes, RouteTable

from .live import Replica, live, says, streams
from .test_proxy import USAGE, run, status

DAY = "2026-11-16"


class Server:
    """What the control plane does with a gateway: tables by version, reports by number."""

    def __init__(self) -> None:
        self.table = RouteTable(version=1)
        self.away = False
        self.loses_answers = False
        self.reports: list[GatewayReport] = []
        self.tokens: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._changed = asyncio.Event()

    def put(self, table: RouteTable) -> None:
        self.table = table
        self._changed.set()
        self._changed = asyncio.Event()

    async def gateway_routes(self, after: int | None = None, wait: float = 0.0) -> RouteTable:
        if not self.away and after == self.table.version:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait)
        if self.away:
            raise UserError("no Podway server answers", "", status=503)
        return self.table

    async def gateway_report(self, report: GatewayReport) -> bool:
        if self.away:
            raise UserError("no Podway server answers", "", status=503)
        new = report.sequence > self._numbers.get(report.gateway, 0)
        if new:
            self._numbers[report.gateway] = report.sequence
            self.reports.append(report)
            for row in report.usage:
                self.tokens[row.user] = self.tokens.get(row.user, 0) + row.prompt_tokens + row.completion_tokens
        if self.loses_answers:
            raise OSError("broken pipe")
        return new


@contextlib.asynccontextmanager
async def following(link: ServerLink) -> AsyncIterator[None]:
    task = asyncio.ensure_future(link.follow_routes())
    try:
        yield
    finally:
        task.cancel()


def a_table(version: int, *backends: Backend, **more: object) -> RouteTable:
    service = RoutedService(name="chat", model="m", auth=False, backends=backends)
    return RouteTable(version=version, services=(service,), **more)  # type: ignore[arg-type]


def test_the_last_routes_serve_while_the_server_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_link, "PAUSE_S", (0.01, 0.02))

    async def test() -> None:
        replica = Replica("a", says(USAGE))
        async with live(replica) as up:
            server = Server()
            server.put(a_table(2, replica.backend))
            link = ServerLink(server, up.gateway, tmp_path)
            async with following(link):
                await _until(lambda: up.gateway.routes.table.version == 2)
                assert (tmp_path / "routes.json").stat().st_mode & 0o777 == 0o600
                server.away = True
                server.put(server.table)
                await asyncio.sleep(0.1)
                assert status(await up.post()) == 200
            other = Gateway()  # one that starts while the server is away
            fresh = ServerLink(server, other, tmp_path)
            assert not await fresh.learn() and fresh.use_kept()
            assert other.has_routes and other.routes.by_model["m"].backends
            server.away = False
            server.put(a_table(3))
            async with following(fresh):
                await _until(lambda: other.routes.table.version == 3)

    run(test)


def test_a_server_that_lies_does_no_harm(tmp_path: Path) -> None:
    async def test() -> None:
        replica = Replica("a", says(USAGE))
        bad = [
            Backend(id="x", address="nowhere"),
            Backend(id="y", address="host:99999"),
            Backend(id="z", address="unix:"),
            Backend(id="n", address="127.0.0.1:1", weight=float("nan")),
            Backend(id="m", address="127.0.0.1:1", weight=-1.0),
        ]
        async with live(replica) as up:
            server = Server()
            link = ServerLink(server, up.gateway, tmp_path)
            server.put(a_table(5, *bad, replica.backend))
            assert await link.learn()
            assert status(await up.post()) == 200
            odd = RoutedService(
                name="chat",
                model="m",
                auth=False,
                backends=(replica.backend, replica.backend),
                hold_s=float("inf"),
                limits=(RequestLimit(rps=0.0), RequestLimit(rps=-1.0)),
            )
            server.put(RouteTable(version=6, services=(odd, odd), keys={"": ApiKey(user="")}))
            assert await link.learn()
            assert status(await up.post()) == 200
            assert Routes(server.table).by_name["chat"].hold_s == 0.0

    run(test)


def test_a_full_disk_is_no_reason_to_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        full = Path("/dev/full/none") if os.geteuid() else tmp_path / "gone"  # nothing can be made in either
        async with live() as up:
            server = Server()
            link = ServerLink(server, up.gateway, full)
            for version in (7, 8):
                server.put(a_table(version, Backend(id="a", address="127.0.0.1:1")))
                assert await link.learn()
                assert up.gateway.routes.table.version == version
        assert caplog.text.count("cannot be written") == 1

    run(test)


def test_usage_is_counted_once_whatever_is_lost(tmp_path: Path) -> None:
    async def test() -> None:
        server = Server()
        gateway = Gateway(ledger=UsageLedger("g1", tmp_path))
        link = ServerLink(server, gateway, tmp_path)
        gateway.ledger.add(DAY, "ann", "chat", "m", prompt=5, completion=2)
        server.loses_answers = True
        assert not await link.report()  # it arrived, and the answer did not
        gateway.ledger.add(DAY, "ann", "chat", "m", prompt=1, completion=1)
        assert gateway.ledger.unreported(DAY, "ann") == 9
        server.loses_answers = False
        assert await link.report() and await link.report()
        assert server.tokens == {"ann": 9}
        gateway.ledger.add(DAY, "bob", "chat", "m", prompt=4, completion=0)
        server.away = True
        assert not await link.report()
        gateway.ledger.add(DAY, "bob", "chat", "m", prompt=3, completion=0)
        gateway.ledger.save()
        assert leftovers(tmp_path) == []  # its process lives
        os.close(gateway.ledger._lock)  # type: ignore[arg-type]  # as kill -9 does
        server.away = False
        found = leftovers(tmp_path)
        assert [one.gateway for one in found] == ["g1"]
        assert await ServerLink(server, Gateway(), tmp_path)._hand_in(found[0])
        assert server.tokens == {"ann": 9, "bob": 7}
        assert list(tmp_path.glob("usage-*")) == []

    run(test)


def test_loads_are_reported(tmp_path: Path) -> None:
    async def test() -> None:
        replica = Replica("a", says(USAGE))
        async with live(replica) as up:
            server = Server()
            link = ServerLink(server, up.gateway, tmp_path, "http://here")
            for _ in range(3):
                await up.post()
            await replica.kill()
            assert status(await up.post()) == 502
            assert await link.report()
            (load,) = server.reports[0].services
            assert (load.service, load.arrived, load.completed, load.failed) == ("chat", 4, 3, 1)
            assert load.failures == {"a": 1} and load.ttft.count == 3 and load.queue.count == 4
            assert server.reports[0].url == "http://here"
            (row,) = server.reports[0].usage
            assert (row.user, row.model, row.requests, row.prompt_tokens, row.completion_tokens) == ("-", "m", 3, 21, 9)
            assert await link.report()
            (load,) = server.reports[1].services  # a quiet service is told too
            assert (load.arrived, load.in_flight, load.waiting) == (0, 0.0, 0)

    run(test)


def test_the_time_between_tokens_of_streams_is_reported(tmp_path: Path) -> None:
    async def test() -> None:
        token = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
        counted = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":9}}\n\n'
        done = b"data: [DONE]\n\n"
        async with live(Replica("a", streams([token] * 5 + [done], pause=0.05))) as up:
            server = Server()
            link = ServerLink(server, up.gateway, tmp_path, "http://here")
            await up.post(body=b'{"model":"m","stream":true}')
            await up.post("/services/chat/v1/chat/completions", b'{"stream":true}')
            assert await link.report()
            (load,) = server.reports[0].services
            assert load.tpot.count == 2 and load.tpot.p50 >= 0.05  # five pauses between five tokens and the end
            assert len(server.reports[0].usage) == 1
            page = (await up.get("/metrics")).decode()
            assert 'podway_gateway_token_seconds_count{service="chat"} 2.0' in page
        async with live(Replica("a", streams([token, token, counted, done], pause=0.05))) as up:
            server = Server()
            await up.post(body=b'{"model":"m","stream":true}')
            assert await ServerLink(server, up.gateway, tmp_path, "http://here").report()
            (load,) = server.reports[0].services
            (usage,) = server.reports[0].usage
            # Nine tokens in two events: three pauses are the time of eight tokens.
            assert usage.completion_tokens == 9 and load.tpot.count == 1
            assert load.tpot.p50 == pytest.approx(load.tpot.mean) and load.tpot.p50 >= 3 * 0.05 / 8
        async with live(Replica("a", says(USAGE)), Replica("b", streams([token, done]))) as up:
            server = Server()
            for _ in range(4):
                await up.post(body=b'{"model":"m"}')
            assert await ServerLink(server, up.gateway, tmp_path, "http://here").report()
            assert (
                server.reports[0].services[0].tpot.count == 0
            )  # whole answers, and streams of one token, have no such time

    run(test)


def test_requests_that_wait_are_reported(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(hold_s=60.0) as up:
            server = Server()
            link = ServerLink(server, up.gateway, tmp_path)
            waiting = asyncio.ensure_future(up.post())
            await _until(lambda: up.gateway.forwarder.held == 1)
            assert await link.report()
            assert server.reports[0].services[0].waiting == 1
            waiting.cancel()

    run(test)


def test_budgets_hold_over_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        gateway = Gateway(clock=lambda: 1_763_251_200.0 + 3600)  # 2025-11-16
        gateway.ledger.add("2025-11-16", "ann/app", "chat", "m", prompt=5, completion=0)
        gateway.update(a_table(1, day="2025-11-16", spent={"ann/app": 90}))
        assert gateway.budgets.left("ann/app", 100, 1_763_251_200.0 + 3600) == 5
        gateway.update(a_table(2, day="2025-11-15", spent={"ann/app": 900}))  # of another day
        assert gateway.budgets.left("ann/app", 100, 1_763_251_200.0 + 3600) == 5

    run(test)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 100), st.booleans()), max_size=30))
def test_budgets_never_count_less_than_was_used(steps: list[tuple[str, int, bool]]) -> None:
    budgets, used = Budgets(), {"a": 0, "b": 0}
    for user, tokens, elsewhere in steps:
        if elsewhere:
            budgets.at_least(user, tokens, 0.0)
        else:
            budgets.spend(user, tokens, 0.0)
            used[user] += tokens
        assert budgets.left(user, 10_000, 0.0) <= 10_000 - used[user]


def test_concurrency_is_an_average() -> None:
    meters = LoadMeter()
    meter = meters.of("s", 100.0)
    meter.sent(0.5, 100.0)
    meter.sent(0.5, 105.0)
    meter.returned(110.0)
    (found,) = meters.take(110.0, {"s"})
    assert found.in_flight == 1.5 and found.window_s == 10.0 and found.queue.mean == 0.5
    (found,) = meters.take(120.0, {"s"})
    assert found.in_flight == 1.0
    assert msgspec.json.encode(found)
    meter.returned(120.0)
    assert meters.take(130.0, set()) == ()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_the_requests_that_each_replica_has_are_told() -> None:
    meter = ServiceMeter(100.0)
    for replica, change in (("s-1", 1), ("s-1", 1), ("s-2", 1), ("s-3", 1), ("s-3", -1)):
        meter.with_replica(replica, change)
    assert meter.take("s", 101.0).open_requests == {"s-1": 2, "s-2": 1}
