"""Simulated hosts while their cluster is deleted or stopped."""

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from podway.errors import ProviderError
from podway.hosts.link import kill_local_host
from podway.order import Host
from podway.providers.local import provider as local
from podway.providers.local.provider import LocalProvider
from tests.providers.test_contract import bring_up, order

pytestmark = pytest.mark.e2e


def processes(host_id: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("PODWAY_HOST_ID") == host_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.mark.parametrize("when", ["between", "after"])
def test_an_agent_that_starts_while_its_cluster_is_deleted_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Its start goes on between the kill of all processes and the end of the files, or after both."""
    begun, over, started = threading.Event(), threading.Event(), threading.Event()
    furnish = local.furnish_home

    def slowly(*words: Any) -> Any:
        begun.set()
        assert over.wait(60)
        return furnish(*words)

    def between(_: Any) -> None:
        over.set()
        assert started.wait(60)

    async def start(provider: LocalProvider, host: Host) -> None:
        with contextlib.suppress(ProviderError, OSError):
            await provider.ensure_agent(host)
        started.set()

    async def test() -> None:
        provider = LocalProvider(tmp_path)
        seen = await bring_up(provider, provider.render("gone", order("local", "v6e-1", 1)))
        (host,) = seen.hosts
        assert processes(host.id)
        await provider._kill("gone")
        monkeypatch.setattr(local, "furnish_home", slowly)
        if when == "between":
            monkeypatch.setattr(local, "remove_containers", between)
        starting = asyncio.ensure_future(start(provider, host))
        assert await asyncio.to_thread(begun.wait, 60)
        await provider.destroy("gone")
        over.set()
        await starting
        try:
            assert processes(host.id) == [] and not (tmp_path / "local" / "gone").exists()
        finally:
            await kill_local_host(host.id)

    asyncio.run(test())


def test_an_agent_that_starts_while_its_cluster_is_stopped_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over = threading.Event(), threading.Event()
    furnish = local.furnish_home

    def slowly(*words: Any) -> Any:
        begun.set()
        assert over.wait(60)
        return furnish(*words)

    async def test() -> None:
        provider = LocalProvider(tmp_path)
        seen = await bring_up(provider, provider.render("resting", order("local", "v6e-1", 1)))
        (host,) = seen.hosts
        try:
            await provider._kill("resting")
            monkeypatch.setattr(local, "furnish_home", slowly)
            starting = asyncio.ensure_future(provider.ensure_agent(host))
            assert await asyncio.to_thread(begun.wait, 60)
            await provider.stop("resting")
            over.set()
            with contextlib.suppress(ProviderError, OSError):
                await starting
            assert processes(host.id) == []
            with pytest.raises(ProviderError, match="is gone"):  # nor later, until it is started again
                await provider.ensure_agent(host)
            await provider.start("resting")
            assert processes(host.id)
        finally:
            await provider.destroy("resting")
        assert processes(host.id) == []

    asyncio.run(test())
