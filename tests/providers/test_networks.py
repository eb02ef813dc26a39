"""The network of a simulated cluster reaches the outside under this machine's address."""

import secrets
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from podway.providers.local import networks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(networks.refusal() is not None, reason=str(networks.refusal())),
]
NUMBER = 250 + secrets.randbelow(6)  # claimed by no cluster: their numbers are below 250
SERVER = "import socket; s = socket.create_server(('0.0.0.0', 80)); print('up', flush=True); c, a = s.accept(); c.send(a[0].encode())"
CLIENT = "import socket, sys; print(socket.create_connection((sys.argv[1], 80), 20).recv(99).decode())"


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture
def outside() -> Iterator[tuple[str, str]]:
    """A network that knows the way to this machine and to nothing behind it: its name, and this machine's address there."""
    name, net = f"pwo-{secrets.token_hex(4)}", f"198.19.{secrets.randbelow(250)}"  # the kernel lets go of a name late
    run("ip", "netns", "add", name)
    try:
        run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "addr", "add", f"{net}.1/24", "dev", name)
        run("ip", "link", "set", name, "up")
        run("ip", "-n", name, "addr", "add", f"{net}.2/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        yield name, net
    finally:
        run("ip", "netns", "del", name)  # both ends of the pair go with it


@pytest.mark.parametrize("program", ["iptables", "nft"])
def test_connections_go_out(program: str, outside: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed (tools/system-packages installs it for root)")
    probe = ["iptables", "-t", "nat", "-S"] if program == "iptables" else ["nft", "add", "table", "ip", "podway_try"]
    if subprocess.run(probe, capture_output=True, timeout=60).returncode:
        pytest.skip("the kernel has no address translation")
    if program == "nft":
        run("nft", "delete", "table", "ip", "podway_try")
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if {name, program} == {"iptables", "nft"} else which(name))
    name, net = outside
    networks.make(NUMBER, 1)
    try:
        server = subprocess.Popen(
            ["ip", "netns", "exec", name, "python3", "-c", SERVER], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None and server.stdout.readline() == "up\n"
            seen = run("nsenter", f"--net={networks.path_of(NUMBER)}", "python3", "-c", CLIENT, f"{net}.2")
            assert seen == f"{net}.1"
        finally:
            server.kill()
            server.wait(60)
    finally:
        networks.remove(NUMBER)
    rules = run("iptables", "-t", "nat", "-S") if program == "iptables" else run("nft", "list", "tables")
    assert f".{NUMBER}.0/24" not in rules and f"podway_{NUMBER}" not in rules
