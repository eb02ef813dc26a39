"""The ssh provider on real machines: what is done there, what is said when it cannot be, and that nothing of it stays."""

import ast
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from podway.errors import ProviderError, UserError
from podway.hosts.blobs import BlobStore
from podway.hosts.link import AgentLink
from podway.hosts.ssh import remote
from podway.hosts.sync import sync
from podway.hosts.tree import scan
from podway.order import Order
from podway.providers import refuse_stop, stoppable
from podway.providers.ssh.provider import SshProvider
from podway.sandbox.hosts import make_hosts, make_key, pool_text, why_no_hosts
from podway.sandbox.hosts.netns import NetnsHosts, why_no_namespaces
from podway.server.api import ShellReply
from podway.server.shell import checked_login, shell_command
from tests.conftest import wait_until

PAIR = Order(accelerator_type="v4-16", topology="2x2x2", provider="ssh", hosts_per_slice=2, chips_per_host=4)


@pytest.fixture(scope="module")
def made() -> Iterator[NetnsHosts]:
    why_not = why_no_hosts() or why_no_namespaces()
    if why_not:
        pytest.skip(why_not)
    with make_hosts(4, separate=True) as hosts:
        assert isinstance(hosts, NetnsHosts)
        yield hosts


@pytest.fixture
def lab(made: NetnsHosts, tmp_path: Path) -> Iterator[NetnsHosts]:
    """The machines, with a check that a test leaves them as it found them."""
    yield made
    for index in range(4):
        assert made.processes(index) == []
        assert made.run(index, "ls -A /root /tmp").split() == ["/root:", "/tmp:"]


def provider_of(root: Path, text: str) -> SshProvider:
    (root / "ssh").mkdir(parents=True, exist_ok=True)
    (root / "ssh" / "lab.yaml").write_text(text)
    return SshProvider(root)


def refused(provider: SshProvider, name: str = "a") -> UserError:
    """What is said when the cluster cannot be made; all that was begun is then removed."""

    async def run() -> UserError:
        with pytest.raises(UserError) as caught:
            await provider.submit(provider.render(name, PAIR))
        await provider.destroy(name)
        assert (await provider.observe(name)).condition == "absent"
        return caught.value

    error = asyncio.run(run())
    assert "\n" not in error.what and error.hint
    return error


def test_agent_is_copied_once_and_started_again(lab: NetnsHosts, tmp_path: Path) -> None:
    provider = provider_of(tmp_path, pool_text(lab, "v4-16"))

    async def run() -> None:
        await provider.submit(provider.render("a", PAIR))
        host = (await provider.observe("a")).hosts[1]
        agent = "/root/.podway/agent-*.pyz"
        before = lab.run(1, f"stat -c '%i %n' {agent}")
        lab.run(1, "pkill -KILL -x podway-agent; rm -f /tmp/podway-lease-*")  # as after a power cut with /tmp in memory
        await provider.ensure_agent(host)
        link = AgentLink(provider.connect(host))
        assert (await link.call("hello")).fields["home"] == "/root"
        link.close()
        assert lab.run(1, f"stat -c '%i %n' {agent}") == before
        assert "podway-lease" in lab.run(1, "ls /tmp")
        await provider.destroy("a")

    asyncio.run(run())


def test_two_people_do_not_share_machines_unnoticed(lab: NetnsHosts, tmp_path: Path) -> None:
    """The second gets the other slice; the third is told who has which."""
    people = [provider_of(tmp_path / name, pool_text(lab, "v4-16")) for name in ("ada", "bob", "eve")]

    async def run() -> None:
        for provider in people[:2]:
            await provider.submit(provider.render("a", PAIR))
        taken = [{host.address for host in (await provider.observe("a")).hosts} for provider in people[:2]]
        assert not taken[0] & taken[1]
        with pytest.raises(UserError, match=r"10\.213\.\d+\.10 is taken by \S+@\S+ for cluster a since 20") as caught:
            await people[2].submit(people[2].render("c", PAIR))
        assert "given back" in caught.value.hint
        for provider in people:
            await provider.destroy("a")
            await provider.destroy("c")

    asyncio.run(run())


def test_a_lease_lost_to_another_ends_the_cluster(lab: NetnsHosts, tmp_path: Path) -> None:
    provider = provider_of(tmp_path, pool_text(lab, "v4-16"))

    async def run() -> None:
        await provider.submit(provider.render("a", PAIR))
        theirs = json.dumps({"owner": "x", "cluster": "b", "who": "eve@pc"})
        lab.run(0, f"for f in /tmp/podway-lease-*; do echo '{theirs}' > $f; done")
        seen = await provider.observe("a")
        assert seen.condition == "failed" and "taken by eve@pc for cluster b" in seen.reason
        await provider.destroy("a")
        assert "eve" in lab.run(0, "cat /tmp/podway-lease-*; rm /tmp/podway-lease-*")  # theirs is not ours to remove
        files = lab.run(0, "ls -A /root/.podway; rm -r /root/.podway /root/sky_workdir")
        assert files  # nor what may be theirs by now

    asyncio.run(run())
    assert lab.processes(0) == []


def _wrong_key(lab: NetnsHosts, tmp_path: Path) -> str:
    return pool_text(lab, "v4-16").replace(str(lab.key), str(make_key(tmp_path / "other")))


def _no_key(lab: NetnsHosts, tmp_path: Path) -> str:
    return pool_text(lab, "v4-16").replace(str(lab.key), str(tmp_path / "nokey"))


def _public_key(lab: NetnsHosts, tmp_path: Path) -> str:
    return pool_text(lab, "v4-16").replace(str(lab.key), f"{lab.key}.pub")


def _unknown_host(lab: NetnsHosts, tmp_path: Path) -> str:
    return pool_text(lab, "v4-16").replace(lab.hosts[1].address + ",", "no-such-host.invalid,")


def _nobody_listens(lab: NetnsHosts, tmp_path: Path) -> str:
    return pool_text(lab, "v4-16").replace("port: 22,", "port: 23,")


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        (_wrong_key, r"^root@10\.213\.\d+\.10 refused the login with .*/other$", "identity_file"),
        (_no_key, r"^the key .*nokey for 10\.213\.\d+\.10 cannot be read: No such file", "identity_file"),
        (_public_key, r"key\.pub is not a private key", "not its .pub"),
        (_unknown_host, r"^no machine is called no-such-host\.invalid", "address"),
        (_nobody_listens, r"10:23 cannot be reached: Connection refused$", "see that it is up"),
    ],
)
def test_a_machine_that_lets_nobody_in_is_one_clear_line(
    lab: NetnsHosts, tmp_path: Path, text: Callable[[NetnsHosts, Path], str], says: str, hint: str
) -> None:
    # Only the first slice, so that the second is no way out.
    lines = text(lab, tmp_path).splitlines()
    error = refused(provider_of(tmp_path, "\n".join(lines[:-3])))
    assert re.search(says, error.what), error.what
    assert hint in error.hint


FAULTS = {
    "python3 missing": (
        "for p in /usr/bin/python3 /usr/local/bin/python3; do [ ! -e $p ] || mv $p $p.away; done",
        "for p in /usr/bin/python3 /usr/local/bin/python3; do [ ! -e $p.away ] || mv $p.away $p; done",
        "has no python3 that runs",
        "install Python 3.8",
    ),
    "disk full": (
        "head -c 200m /dev/zero > /root/filler 2>/dev/null; true",
        "rm /root/filler",
        "is full: No space left on device",
        "free some space",
    ),
    "home not writable": (
        "mount -t tmpfs -o ro tmpfs /root",
        "umount /root",
        "Read-only file system (/root/.podway)",
        "another `home`",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_machine_that_cannot_work_is_one_clear_line(lab: NetnsHosts, tmp_path: Path, kind: str) -> None:
    break_it, mend_it, says, hint = FAULTS[kind]
    provider = provider_of(tmp_path, "\n".join(pool_text(lab, "v4-16").splitlines()[:-3]))
    lab.run(1, break_it)
    try:

        async def run() -> UserError:
            with pytest.raises(UserError) as caught:
                await provider.submit(provider.render("a", PAIR))
            await provider.destroy("a")  # nothing of it is held up by what is broken
            return caught.value

        error = asyncio.run(run())
    finally:
        lab.run(1, mend_it)
    assert f"{lab.hosts[1].address}" in error.what and says in error.what, error.what
    assert hint in error.hint
    assert asyncio.run(provider.observe("a")).condition == "absent"


def test_a_broken_slice_is_passed_over(lab: NetnsHosts, tmp_path: Path) -> None:
    provider = provider_of(tmp_path, pool_text(lab, "v4-16"))
    lab.kill_sshd(1)
    try:

        async def run() -> None:
            await provider.submit(provider.render("a", PAIR))
            hosts = (await provider.observe("a")).hosts
            assert [host.address for host in hosts] == [lab.hosts[2].address, lab.hosts[3].address]
            await provider.destroy("a")

        asyncio.run(run())
    finally:
        lab.start_sshd(1)


def test_a_changed_host_key_is_refused(lab: NetnsHosts, tmp_path: Path) -> None:
    provider = provider_of(tmp_path, "\n".join(pool_text(lab, "v4-16").splitlines()[:-3]))
    address = lab.hosts[0].address
    other = (make_key(tmp_path / "impostor").with_suffix(".pub")).read_text().rsplit(" ", 1)[0]
    (tmp_path / "ssh" / "known_hosts").write_text(f"elsewhere {other}\n{address} {other}\n")
    error = refused(provider)
    assert (
        error.what.startswith(f"the host key of {address} has changed: SHA256:")
        and "now it shows SHA256:" in error.what
    )
    assert "remove line 2 of" in error.hint
    # A pinned key of a kind the machine no longer has is a change too.
    rsa = tmp_path / "rsa"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", rsa], check=True)
    (tmp_path / "ssh" / "known_hosts").write_text(f"{address} {Path(f'{rsa}.pub').read_text()}")
    assert "now it shows SHA256:" in refused(provider).what


def test_a_shared_home_is_noticed(tmp_path: Path) -> None:
    why_not = why_no_hosts()
    if why_not:
        pytest.skip(why_not)
    with make_hosts(2, separate=False) as hosts:
        text = pool_text(hosts, "v4-16").replace("accelerator", f"home: {hosts.hosts[0].home}, accelerator")
        error = refused(provider_of(tmp_path, text))
        assert "same home directory" in error.what and "`home`" in error.hint
        assert list(Path(hosts.hosts[0].home).iterdir()) == []


def test_hosts_without_root_do_as_well(tmp_path: Path) -> None:
    """The fallback: sshds on loopback addresses, each with a home of its own; one too long for a socket's path, so relayed."""
    why_not = why_no_hosts()
    if why_not:
        pytest.skip(why_not)
    with make_hosts(2, separate=False) as hosts:
        deep = "x" * 90
        text = pool_text(hosts, "v4-16").replace("accelerator", f"home: ~/{deep}, accelerator", 1)
        provider = provider_of(tmp_path, text)

        async def run() -> None:
            await provider.submit(provider.render("a", PAIR))
            first, second = (await provider.observe("a")).hosts
            assert (first.home, second.home) == (f"{hosts.hosts[0].home}/{deep}", hosts.hosts[1].home)
            for host in (first, second):
                assert host.address.startswith("127.")
                assert await output_of(provider, host, "echo $HOME; pwd") == f"{host.home}\n{host.home}\n"
            await provider.destroy("a")

        asyncio.run(run())
        for host in hosts.hosts:
            assert list(Path(host.home).iterdir()) == []


async def output_of(provider: SshProvider, host: Any, script: str) -> str:
    """What a job prints."""
    link = AgentLink(provider.connect(host))
    try:
        await link.call("start", job="j", phase="run", script=script, cwd="~")
        deadline = time.monotonic() + 20
        while (await link.call("status", job="j", phase="run", wait=5.0)).fields["state"] == "running":
            assert time.monotonic() < deadline
        return (await link.call("follow", job="j", phase="run", offset=0)).body.decode()
    finally:
        link.close()


def test_through_a_jump_host_that_forwards_no_sockets(lab: NetnsHosts, tmp_path: Path) -> None:
    """Machine 0 is the way in; machine 1 forwards no sockets and greets every login with noise."""
    lines = pool_text(lab, "v4-16").splitlines()
    text = "\n".join([lines[0], lines[1], f"jump: root@{lab.hosts[0].address}", "hosts:", *lines[4:6]])
    provider = provider_of(tmp_path, text)
    lab.run(1, "cp /run/pw/sshd_config /tmp/kept; echo AllowStreamLocalForwarding no >> /run/pw/sshd_config")
    lab.run(1, "echo 'echo welcome; echo PODWAY welcomes you >&2' > /root/.bashrc")
    lab.kill_sshd(1)
    lab.start_sshd(1)
    try:

        async def run() -> None:
            await provider.submit(provider.render("a", PAIR))
            host = (await provider.observe("a")).hosts[0]
            came_from = (await output_of(provider, host, "echo fine; exit 3")).strip()
            assert came_from == "fine"
            how = provider.shell(host, {"GREETING": "it's me"})
            reply = ShellReply(home=how.home, env=how.env, endpoint=how.endpoint, known_hosts=list(how.known_hosts))
            say = 'echo "$GREETING at $(hostname)"; exit 7'
            argv = shell_command(checked_login(reply, cluster="a", own_server=True), say, cluster="a").argv
            process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
            out, _ = await process.communicate()
            assert out.decode().splitlines()[-1] == "it's me at h1" and process.returncode == 7
            await provider.destroy("a")

        asyncio.run(run())
    finally:
        lab.run(1, "mv /tmp/kept /run/pw/sshd_config; rm -f /root/.bashrc")
        lab.kill_sshd(1)
        lab.start_sshd(1)


def test_a_tree_is_sent_once_and_passed_on(lab: NetnsHosts, tmp_path: Path) -> None:
    """Four machines; one upload; what a job changed or added outside the workdir is left when all else goes."""
    provider = provider_of(tmp_path, pool_text(lab, "v6e-16"))
    order = Order(accelerator_type="v6e-16", topology="4x4", provider="ssh", hosts_per_slice=4, chips_per_host=4)
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "big").write_bytes(bytes(range(256)) * 4096)
    (source / "sub" / "mine").write_text("before")
    lab.run(2, "mkdir /root/.podway; echo keep > /root/.podway/podway.db")  # somebody's own Podway lives there too

    async def run() -> None:
        await provider.submit(provider.render("a", order))
        hosts = (await provider.observe("a")).hosts
        links = [AgentLink(provider.connect(host), address=host.address) for host in hosts]
        blobs = BlobStore(tmp_path / "blobs")
        manifest = scan_into(source, blobs)
        report = await sync(links, manifest, "~/data", blobs)
        assert 1 << 20 <= report.server_bytes < 1.2 * (1 << 20) and report.peer_bytes >= 3 << 20
        for link in links:
            link.close()
        lab.run(3, "echo after > /root/data/sub/mine; echo new > /root/data/result")
        await provider.destroy("a")

    asyncio.run(run())
    assert lab.run(3, "cd /root; find . -type f | sort; rm -r data").split() == ["./data/result", "./data/sub/mine"]
    assert lab.run(2, "cd /root; find . -type f; rm -r .podway").split() == ["./.podway/podway.db"]


def scan_into(source: Path, blobs: BlobStore) -> Any:
    """The manifest of a directory, its contents put among the blobs."""
    tree = scan(source)
    for path in source.rglob("*"):
        if path.is_file():
            blobs.put(path.read_bytes())
    return tree.manifest


def test_a_machine_out_of_reach_holds_up_the_end_until_it_is_let_go(lab: NetnsHosts, tmp_path: Path) -> None:
    text = pool_text(lab, "v4-16")
    provider = provider_of(tmp_path, text)

    async def run() -> None:
        await provider.submit(provider.render("a", PAIR))
        lab.kill_sshd(1)
        await asyncio.sleep(0)
        with pytest.raises(ProviderError, match=r"\.11 (cannot be reached|broke): .*gone for good, remove it from"):
            await provider.destroy("a")
        assert (await provider.observe("a")).condition != "absent"  # it is not forgotten
        kept = "\n".join(line for line in text.splitlines() if lab.hosts[1].address not in line)
        (tmp_path / "ssh" / "lab.yaml").write_text(kept.replace("accelerator: v4-16", "accelerator: v4-8"))
        await provider.destroy("a")
        assert (await provider.observe("a")).condition == "absent"

    try:
        asyncio.run(run())
    finally:
        lab.start_sshd(1)
    # What runs there was left to its owner; a person with the line in place again takes it down, or takes the machine.
    assert any("agent" in line for line in lab.processes(1))
    lab.run(1, "rm -f /tmp/podway-lease-*; pkill -KILL -x podway-agent; true")
    wait_until(lambda: lab.processes(1) == [], what="the end of the agent")
    again = provider_of(tmp_path / "other", text)
    asyncio.run(again.submit(again.render("b", PAIR)))  # files an earlier cluster left are no obstacle, and go
    asyncio.run(again.destroy("b"))


def test_stop_is_refused_with_the_reason(tmp_path: Path) -> None:
    provider = provider_of(tmp_path, "hosts: [a]\n")
    assert "machines of your own" in (refuse_stop(provider, PAIR) or "")
    with pytest.raises(UserError, match="does not switch off"):
        stoppable(provider)


def test_pools_too_small_are_refused_before_anything_is_done(tmp_path: Path) -> None:
    provider = provider_of(tmp_path, "hosts: [a, b]\n")
    with pytest.raises(UserError, match="pool lab has 0 x v4-16, and 1 are asked for"):
        provider.render("a", PAIR)


DRIVER = """
import asyncio, sys
from pathlib import Path
from podway.providers import refuse_stop, stoppable
from podway.providers.ssh.provider import SshProvider
from tests.providers.test_ssh_machines import PAIR
provider = SshProvider(Path(sys.argv[1]))
print("begun", flush=True)
asyncio.run(getattr(provider, sys.argv[2])(provider.render("a", PAIR) if sys.argv[2] == "submit" else "a"))
"""


@pytest.mark.parametrize("after_s", [0.1, 0.35])
def test_a_server_killed_at_any_moment_leaves_nothing_unknown(lab: NetnsHosts, tmp_path: Path, after_s: float) -> None:
    """Killed while it creates, and while it deletes; the next one finishes either."""
    provider = provider_of(tmp_path, pool_text(lab, "v4-16"))

    def killed(verb: str) -> None:
        child = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(tmp_path), verb], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert child.stdout is not None and child.stdout.readline() == b"begun\n"
        try:
            child.wait(after_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(10)
        child.stdout.close()

    killed("submit")
    asyncio.run(provider.submit(provider.render("a", PAIR)))
    assert len(asyncio.run(provider.observe("a")).hosts) == 2
    killed("destroy")
    asyncio.run(provider.destroy("a"))
    killed("submit")
    asyncio.run(provider.destroy("a"))
    assert asyncio.run(provider.observe("a")).condition == "absent"


def test_what_runs_on_machines_is_python_3_8() -> None:
    ast.parse(remote.program(), feature_version=(3, 8))


def test_without_asyncssh_the_hint_is_how_to_get_it(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['asyncssh'] = None\n"
        "from pathlib import Path; from podway.errors import UserError; from podway.providers import open_provider\n"
        "try: open_provider('ssh', Path('.'))\n"
        "except UserError as error: print(error)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "provider ssh needs asyncssh" in shown.stdout and "podway[ssh]" in shown.stdout, shown.stderr
