"""The list of workers that a router is kept at, against a router in memory that is slow, restarted and wrong."""

import asyncio
import json
from typing import cast

import msgspec
import pytest

from podway.control.router_lists import last_of_role
from podway.control.router_workers import HostPort, RouterWorkers, WorkerTarget, payload
from podway.task.task import RoutedWorker

PREFILL = RoutedWorker(role="prefill", engine="sglang", bootstrap_port=8998)


class MemoryRouter:
    """Answers as SGLang's model gateway does; a worker that was added is listed from the second look on."""

    def __init__(self) -> None:
        self.workers: dict[str, dict[str, object]] = {}
        self.accepted: list[dict[str, object]] = []
        self.status, self.count = 200, 0

    async def ask(self, method: str, path: str, body: str = "") -> tuple[int, str]:
        await asyncio.sleep(0)
        if self.status != 200:
            return self.status, "no"
        if method == "POST":
            told = json.loads(body)
            if any(one["url"] == told["url"] for one in (*self.accepted, *self.workers.values())):
                return 409, "{}"
            self.accepted.append(told)
            return 202, "{}"
        if method == "DELETE":
            return (202 if self.workers.pop(path.removeprefix("/workers/"), None) else 404), "{}"
        listed = json.dumps({"workers": list(self.workers.values()), "stats": {"more": 1}})
        for one in self.accepted:
            self.count += 1
            name = f"id{self.count}"
            self.workers[name] = {**one, "id": name}
        self.accepted.clear()
        return 200, listed

    def close(self) -> None:
        pass


class Worker(MemoryRouter):
    """Says what it is."""

    def __init__(self, info: object) -> None:
        super().__init__()
        self.info = info

    async def ask(self, method: str, path: str, body: str = "") -> tuple[int, str]:
        return (200, json.dumps(self.info)) if path == "/server_info" and self.info else (404, "")


def target(number: int, worker: RoutedWorker = RoutedWorker()) -> WorkerTarget:
    return WorkerTarget(number=number, url=f"http://10.0.0.{number}:8000", worker=worker)


def test_the_list_follows_what_is_wanted() -> None:
    async def run() -> None:
        router = MemoryRouter()
        router.workers["other"] = {"id": "other", "url": "http://10.9.9.9:1"}
        changed = asyncio.Event()
        kept = RouterWorkers(cast(HostPort, router), changed.set)

        async def until(numbers: tuple[int, ...]) -> None:
            async with asyncio.timeout(60):
                urls = {target(number).url for number in numbers}
                while kept.listed != numbers or {one["url"] for one in router.workers.values()} != urls:
                    await asyncio.sleep(0.01)

        told = Worker({"disaggregation_mode": "decode"})
        kept.want({1: target(1), 2: target(2)}, lambda number: cast(HostPort, told if number == 2 else Worker(None)))
        await until((1, 2))
        assert changed.is_set() and kept.complete
        roles = {one["url"]: one["worker_type"] for one in router.workers.values()}
        assert roles == {"http://10.0.0.1:8000": "regular", "http://10.0.0.2:8000": "decode"}
        assert kept.roles == {
            1: "regular",
            2: "decode",
        }  # by the router's word: the commands of the second do not say it
        router.workers.clear()  # it was restarted
        kept.want({2: target(2)}, lambda _: cast(HostPort, told))
        await until((2,))
        router.status = 404
        kept.want({2: target(2), 3: target(3)}, lambda _: cast(HostPort, told))
        async with asyncio.timeout(60):
            while "is it the router that the file says" not in kept.error:
                await asyncio.sleep(0.01)
        assert kept.listed == (2,) and not kept.complete
        router.status = 200
        await until((2, 3))
        assert kept.error == ""
        kept.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("roles", "leaving", "stay"),
    [
        ({1: "prefill", 2: "decode", 3: "decode"}, [3], []),
        ({1: "prefill", 2: "decode"}, [2], [2]),
        ({1: "prefill", 2: "decode", 3: "decode"}, [2, 3], [2, 3]),
        ({1: "prefill", 2: "decode"}, [1, 2], [1, 2]),
        ({1: "prefill"}, [2], []),  # off the list already
    ],
)
def test_the_last_worker_of_a_role_stays_until_requests_are_held(
    roles: dict[int, str], leaving: list[int], stay: list[int]
) -> None:
    """Taken off earlier, its router would answer 503 to what a gateway sends before it is told to hold requests."""
    assert sorted(last_of_role({number: target(number) for number in leaving}, roles)) == stay


@pytest.mark.parametrize(
    ("worker", "told"),
    [
        (RoutedWorker(), {"worker_type": "regular", "connection_mode": "http"}),
        (PREFILL, {"worker_type": "prefill", "runtime_type": "sglang", "bootstrap_port": 8998}),
        (
            RoutedWorker(role="decode", protocol="grpc", engine="vllm", kv_role="kv_consumer", kv_connector="N"),
            {"connection_mode": "grpc", "runtime_type": "vllm", "kv_role": "kv_consumer", "kv_connector": "N"},
        ),
    ],
)
def test_what_a_router_is_told(worker: RoutedWorker, told: dict[str, object]) -> None:
    found = payload(target(1, worker), worker)
    assert found["url"] == "http://10.0.0.1:8000" and told.items() <= found.items()
    assert None not in found.values() and msgspec.json.encode(found)
