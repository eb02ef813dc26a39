"""Which local ports are taken for a cluster's ports, and what the links of editors look like."""

import socket

import pytest

from podway.cli.forwarding import choose_ports
from podway.cli.ide_links import LINKS, ide_link
from podway.errors import UserError
from podway.task.ports import forwarded_ports
from podway.task.task import Resources, Task


def test_local_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(UserError, match=f"port {taken} of this machine is taken") as refused:
            choose_ports([f"{taken}:8000"])
        assert "'*:8000'" in refused.value.hint
        (any_port,) = choose_ports([f"{taken}?:8000"])  # SkyPilot's: another one will do
        assert any_port.local != taken and any_port.remote == 8000
    (own,) = choose_ports([f"{taken}:8000"])
    assert str(own) == f"localhost:{taken} -> 8000"
    first, second = choose_ports(["*:1", "*:2"])
    assert first.local != second.local
    with pytest.raises(UserError, match="is taken"):
        choose_ports([f"{taken}:1", f"{taken}:2"])


def test_ports_of_both_dialects() -> None:
    task = Task(
        ports=("80:8080", "*:9"), resources=(Resources(ports=("8080", "9000-9001")), Resources(ports=("9000",)))
    )
    assert forwarded_ports(task) == ("80:8080", "*:9", "9000?:9000", "9001?:9001")
    assert len(forwarded_ports(Task(resources=(Resources(ports=("1000-60000",)),)))) == 16


def test_editors() -> None:
    assert ide_link("vscode", "c", "/home/a b") == "vscode://vscode-remote/ssh-remote+c/home/a%20b"
    assert ide_link("zed", "c-worker0", "/x") == "zed://ssh/c-worker0/x"
    assert {ide_link(ide, "c", "/x").split(":")[0] for ide in LINKS} == {"vscode", "cursor", "windsurf", "zed"}
    assert ide_link("", "c", "/x") == ""
