"""Endpoints with a certificate of their own, on the port that plain requests come to as well: real handshakes, by real clients."""

import asyncio
import contextlib
import ssl
from pathlib import Path

import msgspec
import pytest

from podway.certificates import TlsKeyPair
from podway.control.vault import SecretVault
from podway.gateway import accepting
from podway.gateway.proxy import Gateway
from podway.gateway.server_link import ServerLink
from podway.gateway.table import RoutedService, RouteTable
from tests.key_pairs import key_pair

from .live import Live, Replica, live, says
from .test_proxy import body_of, run, status
from .test_server_link import Server

PAIR, OTHER = key_pair("one.example.org", "localhost"), key_pair("two.example.org", "127.0.0.1")
REQUEST = b"GET /services/%b/path HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def trusting(pair: TlsKeyPair) -> ssl.SSLContext:
    """Verifies, and knows this certificate alone."""
    return ssl.create_default_context(cadata=pair.certificate)


async def ask(up: Live, context: ssl.SSLContext, host: str, name: bytes = b"chat") -> bytes:
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", up.port, ssl=context, server_hostname=host)
        try:
            writer.write(REQUEST % name)
            return await reader.read()
        finally:
            writer.close()


def route(up: Live, *pairs: TlsKeyPair | None) -> None:
    """One service for each pair: `chat`, `chat1`, …"""
    (plain,) = up.gateway.routes.table.services
    services = tuple(
        msgspec.structs.replace(plain, name=f"chat{number or ''}", model=None, tls=pair, created=float(number))
        for number, pair in enumerate(pairs)
    )
    up.gateway.update(RouteTable(version=2, services=services))


def test_each_host_name_has_its_certificate() -> None:
    async def test() -> None:
        replica = Replica("a", says(b"fine"))
        async with live(replica) as up:
            route(up, PAIR, OTHER, None)
            answer = await ask(up, trusting(PAIR), "one.example.org")
            assert status(answer) == 200 and body_of(answer) == b"fine"
            assert replica.seen[-1].headers["x-forwarded-proto"] == "https"
            assert status(await ask(up, trusting(OTHER), "two.example.org", b"chat1")) == 200
            assert status(await ask(up, trusting(OTHER), "127.0.0.1", b"chat1")) == 200  # no host name: by the address
            with pytest.raises(ssl.SSLCertVerificationError):
                await ask(up, trusting(PAIR), "two.example.org")
            plain = await up.get("/services/chat/path")
            assert status(plain) == 403 and b"https only" in plain  # and nothing of it reached the replica
            assert len(replica.seen) == 3
            assert status(await up.get("/services/chat2/path")) == 200  # has no certificate

    run(test)


def test_a_renewed_certificate_is_used_by_the_next_connection() -> None:
    async def test() -> None:
        async with live(Replica("a", says(b"fine"))) as up:
            route(up, PAIR)
            assert status(await ask(up, trusting(PAIR), "localhost")) == 200
            new = key_pair("localhost")
            route(up, new)
            assert status(await ask(up, trusting(new), "localhost")) == 200
            with pytest.raises(ssl.SSLCertVerificationError):
                await ask(up, trusting(PAIR), "localhost")
            route(up, TlsKeyPair(certificate=new.certificate, key="not a key"), TlsKeyPair())  # the rest goes on
            assert status(await up.get("/services/chat/path")) == 403

    run(test)


def test_slow_and_broken_handshakes_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "HANDSHAKE_S", 1.0)

    async def test() -> None:
        async with live(Replica("a", says(b"fine"))) as up:
            route(up, PAIR)
            opened = [await asyncio.open_connection("127.0.0.1", up.port) for _ in range(30)]
            for number, (_, writer) in enumerate(opened):
                if number % 3:  # of three, one says nothing, one begins a handshake, one sends what is none
                    writer.write(b"\x16\x03\x01\x02\x00" if number % 3 == 1 else b"\x16" + b"x" * 600)
            assert status(await ask(up, trusting(PAIR), "localhost")) == 200
            assert status(await up.get("/services/chat/path")) == 403
            async with asyncio.timeout(60):
                for number, (reader, _) in enumerate(opened):
                    if number % 3:
                        with contextlib.suppress(ConnectionError):
                            await reader.read()  # closed: by an alert, or when its time was over
            for _, writer in opened:
                writer.close()

    run(test)


def test_stopping_waits_for_no_connection_that_says_nothing() -> None:
    async def test() -> None:
        async with live(Replica("a", says(b"fine"))) as up:
            route(up, PAIR)
            reader, writer = await asyncio.open_connection("127.0.0.1", up.port)
            assert status(await up.get("/health")) == 200
            await up.running.stop(0.0)
            assert await reader.read() == b""
            writer.close()

    run(test)


def test_the_pair_is_kept_sealed_while_the_server_is_away(tmp_path: Path) -> None:
    async def test() -> None:
        server, vault = Server(), SecretVault(tmp_path / "key")
        server.put(RouteTable(version=2, services=(RoutedService(name="web", tls=PAIR), RoutedService(name="open"))))
        assert await ServerLink(server, Gateway(), tmp_path, vault=vault).learn()
        kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert PAIR.key.splitlines()[1].encode() not in kept and PAIR.certificate.splitlines()[1].encode() not in kept
        server.away = True
        gateway = Gateway()
        assert ServerLink(server, gateway, tmp_path, vault=vault).use_kept()
        assert [one.tls for one in gateway.routes.table.services] == [PAIR, None]
        assert gateway.certificates.at("") is not None
        lost = Gateway()  # another key: the endpoint waits for the server, and is not served in clear
        assert ServerLink(server, lost, tmp_path, vault=SecretVault(tmp_path / "other")).use_kept()
        assert [one.tls for one in lost.routes.table.services] == [TlsKeyPair(), None]
        server.away = False
        server.put(RouteTable(version=3, services=(RoutedService(name="open"),)))
        assert await ServerLink(server, Gateway(), tmp_path, vault=vault).learn()
        assert not (tmp_path / "certificates.sealed").exists()

    run(test)
