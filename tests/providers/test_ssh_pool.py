"""A pool's file: what it means, and what is said about one that is wrong."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.errors import UserError
from podway.providers.ssh.pool import HOST_KEYS, POOL_KEYS, Pool, parse_pool, read_inventory, read_pool

FULL = """
user: ubuntu
identity_file: ~/.ssh/lab
accelerator: v6e-16
hosts:
  - 10.0.0.1
  - {address: 10.0.0.2, name: left}
  - {address: tpu-3.example.com, port: 2222, user: ada, home: /mnt/podway}
  - {address: "fd00::4", internal_address: 192.168.0.4, jump: "gate@bastion:2200"}
  - {address: 10.0.0.5, accelerator: v4-8}
"""


def pool(text: str) -> Pool:
    return parse_pool(text.encode(), "lab", Path("lab.yaml"))


def test_a_host_says_what_the_pool_does_not() -> None:
    found = pool(FULL)
    (big,) = found.of_kind("v6e-16", "4x4")
    first, second, third, fourth = big.machines
    assert (first.name, first.endpoint.user, first.endpoint.port, first.home) == ("10.0.0.1", "ubuntu", 22, "~")
    assert second.name == "left" and second.endpoint.identity_file == "~/.ssh/lab"
    assert (third.endpoint.user, third.endpoint.port, third.home) == ("ada", 2222, "/mnt/podway")
    assert third.name == "[tpu-3.example.com]:2222"
    assert fourth.internal_address == "192.168.0.4"
    jump = fourth.endpoint.jump
    assert jump is not None and (jump.user, jump.address, jump.port) == ("gate", "bastion", 2200)
    assert jump.identity_file == "~/.ssh/lab"
    assert len(found.of_kind("v4-8", "2x2x1")) == 1
    assert found.of_kind(None, None) == ()
    assert found.machine("left") == second and found.machine("right") is None


def test_hosts_of_a_kind_make_slices_in_their_order() -> None:
    hosts = "".join(f"\n  - 10.0.0.{i}" for i in range(8))
    slices = pool("accelerator: v6e-16\nhosts:" + hosts).slices
    assert [[m.name for m in part.machines] for part in slices] == [
        [f"10.0.0.{i}" for i in range(4)],
        [f"10.0.0.{i}" for i in range(4, 8)],
    ]
    assert len(pool("hosts:" + hosts).of_kind(None, None)) == 8  # without chips each is for itself


@pytest.mark.parametrize(
    ("text", "place", "says", "hint"),
    [
        ("hosts: [a]\nuzer: x\n", "2:7", "unknown key", "did you mean `user`"),
        ("hosts:\n  - {adress: a}\n", "2:14", "unknown key", "did you mean `address`"),
        ("hosts:\n  - {port: 22}\n", "2:5", "`address` is missing", "address:"),
        ("user: x\n", "1:1", "`hosts` is missing", "hosts:"),
        ("hosts: []\n", "1:8", "no host is listed", "hosts:"),
        ("hosts: [a]\nport: 70000\n", "2:7", "70000 is not a port", "65535"),
        ("hosts: ['-oProxyCommand=x']\n", "1:9", "is not an address", "host name"),
        ("hosts: [a, b, a]\n", "1:15", "listed twice (first at line 1)", "remove one"),
        ("hosts: [{address: a, name: x}, {address: b, name: x}]\n", "1:32", "name x is listed twice", "remove one"),
        ("accelerator: v6e-16\nhosts: [a, b, c]\n", "2:15", "3 hosts of v6e-16 make no whole slices", "list 4"),
        ("accelerator: v6e-17\nhosts: [a]\n", "1:14", "v6e-17", ""),
        ("hosts: [{address: a, home: here}]\n", "1:28", "not an absolute path", "begin it with"),
        ("hosts: [a]\njump: 'a b'\n", "2:7", "is not a jump host", "USER@"),
        ("hosts: [a]\nuser: '-x'\n", "2:7", "is not a user", "login name"),
        ("", "1:1", "the file is empty", "hosts"),
        ("hosts: [a\n", "2:1", "", ""),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, place: str, says: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        pool(text)
    assert caught.value.what.startswith(f"lab.yaml:{place}: ")
    assert says in caught.value.what and hint in caught.value.hint


def test_a_pool_is_found_by_name_or_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no pool of ssh hosts"):
        read_pool(tmp_path, None)
    (tmp_path / "lab.yaml").write_text("hosts: [a]\n")
    assert read_pool(tmp_path, None) == read_pool(tmp_path, "lab")
    (tmp_path / "other.yaml").write_text("hosts: [b]\n")
    with pytest.raises(UserError, match="2 pools"):
        read_pool(tmp_path, None)
    with pytest.raises(UserError, match="no pool 'lap'") as caught:
        read_pool(tmp_path, "lap")
    assert "lab, other" in caught.value.hint
    with pytest.raises(UserError, match="cannot be the name"):
        read_pool(tmp_path, "../lab")


KEYS = st.sampled_from([*POOL_KEYS, *HOST_KEYS, "extra", ""])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 99999)
    | st.text(max_size=12)
    | st.sampled_from(["v6e-16", "4x4", "a@b:1"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=200)
@given(st.binary(max_size=80))
def test_no_bytes_are_a_traceback(data: bytes) -> None:
    with_error(data)


@settings(max_examples=300)
@given(st.dictionaries(KEYS, VALUES, max_size=7))
def test_no_yaml_is_a_traceback(value: dict[str, object]) -> None:
    with_error(json.dumps(value).encode())


def with_error(data: bytes) -> None:
    """Either a pool or a complaint that names the file."""
    try:
        found = parse_pool(data, "lab", Path("lab.yaml"))
    except UserError as error:
        assert error.what.startswith("lab.yaml:") and "\n" not in error.what and error.hint
    else:
        assert found.slices


def test_an_inventory_is_a_pool_at_its_own_path(tmp_path: Path) -> None:
    path = tmp_path / "desk" / "machines.yaml"
    path.parent.mkdir()
    path.write_text("identity_file: keys/lab\nhosts: [a, {address: b, identity_file: /k}]\n")
    found = read_pool(tmp_path / "ssh", str(path))
    assert (found.name, found.ref, found.path) == ("machines", str(path), path)
    assert [part.machines[0].endpoint.identity_file for part in found.slices] == [f"{path.parent}/keys/lab", "/k"]
    copy = tmp_path / "copy.yaml"
    path.rename(copy)
    kept = read_inventory(copy, str(path))
    assert (kept.name, kept.ref) == ("machines", str(path))
    with pytest.raises(UserError, match=r"the inventory .*machines\.yaml: No such file") as caught:
        read_pool(tmp_path / "ssh", str(path))
    assert "where the Podway server runs" in caught.value.hint
