"""Replicas behind real sshds, which listen on their host's loopback alone."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from podway.gateway.handover import listening_socket
from podway.gateway.main import RunningGateway
from podway.gateway.proxy import Gateway
from podway.gateway.table import Backend, RoutedService, RouteTable
from podway.hosts.ssh.endpoint import Endpoint
from podway.sandbox.hosts import HostSet, make_hosts, why_no_hosts
from podway.server.ssh_dial import SshDialer, SshRoute
from tests.conftest import free_port, wait_until

from .live import Live
from .test_proxy import body_of, run, status

pytestmark = pytest.mark.e2e
PROGRAM = Path(__file__).with_name("replica_program.py")


@pytest.fixture
def hosts() -> Iterator[HostSet]:
    if why_not := why_no_hosts():
        pytest.skip(why_not)
    with make_hosts(2) as made:
        yield made


def backend(made: HostSet, index: int, port: int) -> Backend:
    host = made.hosts[index]
    endpoint = Endpoint(address=host.address, port=host.port, user=host.user, identity_file=str(made.key))
    route = msgspec.json.encode(SshRoute(endpoint=endpoint)).decode()
    return Backend(id=f"r{index}", address=f"{host.address}:{port}", tunnel=route)


def start(made: HostSet, index: int, port: int) -> str:
    script = made.files(index) / "tmp" / f"replica-{port}.py"
    script.write_text(PROGRAM.read_text())
    command = f"LISTEN_ON=127.0.0.1 nohup python3 /tmp/{script.name} {port} r{index} >/dev/null 2>&1 & echo $!"
    pid = made.run(index, command).strip()
    wait_until(lambda: "up" in made.run(index, f"bash -c '</dev/tcp/127.0.0.1/{port} && echo up' 2>&1 || true"), 60)
    return pid


def test_replicas_are_reached_through_ssh(hosts: HostSet, tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    started = [start(hosts, index, port) for index, port in enumerate(ports)]
    backends = tuple(backend(hosts, index, port) for index, port in enumerate(ports))

    async def test() -> None:
        running = RunningGateway(Gateway(dial=SshDialer(tmp_path)))
        listener = listening_socket("127.0.0.1", 0)
        up = Live(running, listener.getsockname()[1], {}, {})
        running.listen(listener)
        service = RoutedService(name="chat", model="m", auth=False, backends=backends, hold_s=60.0)
        running.gateway.update(RouteTable(version=1, services=(service,)))
        names = set()
        for _ in range(6):
            answer = await up.post()
            assert status(answer) == 200
            names.add(json.loads(body_of(answer))["system_fingerprint"])
        assert names == {"r0", "r1"}
        # One host breaks: streams on it end with an error, every other request is answered by the other.
        asked = b'{"model":"m","stream":true,"max_tokens":400}'
        streams = [asyncio.ensure_future(up.post(body=asked)) for _ in range(6)]
        while len(up.gateway.forwarder.balancer.outstanding) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)  # of four seconds
        hosts.kill_sshd(0)
        for _ in range(6):
            answer = await up.post()
            assert json.loads(body_of(answer))["system_fingerprint"] == "r1"
        ends = [body_of(await stream) for stream in streams]
        whole = [end for end in ends if b"<399>" in end]
        cut = [end for end in ends if b"<399>" not in end]
        assert whole and cut and all(b"replica_lost" in end and end.endswith(b"data: [DONE]\n\n") for end in cut)
        hosts.start_sshd(0)  # and it is used again once it is back
        up.gateway.forwarder.balancer.health.clear()
        names = set()
        while names != {"r0", "r1"}:
            names.add(json.loads(body_of(await up.post()))["system_fingerprint"])
            up.gateway.forwarder.balancer.health.clear()
        await running.stop(0.0)

    try:
        run(test)
    finally:
        for index, port in enumerate(ports):
            hosts.run(index, f"kill {started[index]}; rm -f /tmp/replica-{port}.py")


def test_another_host_key_is_refused(hosts: HostSet, tmp_path: Path) -> None:
    host = hosts.hosts[0]
    other = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFl0a8mVgPk3bRkv1oiE1D3c3SxwzO1Yl9ZJcnTzmuBw"
    endpoint = Endpoint(address=host.address, port=host.port, user=host.user, identity_file=str(hosts.key))
    route = SshRoute(endpoint=endpoint, known_hosts=(f"{endpoint.known_as} {other}",))

    async def test() -> None:
        with pytest.raises(ConnectionError, match="host key"):
            await SshDialer(tmp_path)(msgspec.json.encode(route).decode(), 1, asyncio.Protocol())

    run(test)
