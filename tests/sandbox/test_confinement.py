"""What a host cannot do, whoever is logged in to it: read this machine's files, see or signal its processes, undo its walls."""

import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.cloud import tpu_v2

from podway.sandbox.hosts import why_no_hosts, why_no_namespaces
from podway.sandbox.running import running_sandbox
from tests.conftest import wait_until
from tests.sandbox.test_hosts import Lab

pytestmark = pytest.mark.skipif(
    bool(why_no_hosts() or why_no_namespaces()), reason=str(why_no_hosts() or why_no_namespaces())
)
USERS = ("root", "ann")
SECRET = "what only this machine may know"


class Machine:
    """A host of a sandbox, and something of this machine that it must not reach."""

    def __init__(self, lab: Lab, node: tpu_v2.Node, outside: Path, shared: Path) -> None:
        self.lab, self.node, self.outside, self.shared = lab, node, outside, shared
        self.address = node.network_endpoints[0].ip_address

    def run(self, command: str, user: str = "root") -> subprocess.CompletedProcess[str]:
        return self.lab.ssh(self.address, command, user)

    def update(self, metadata: dict[str, str]) -> None:
        changed = tpu_v2.Node(name=self.node.name, metadata=metadata)
        self.lab.client.update_node(node=changed, update_mask={"paths": ["metadata"]}).result(timeout=60)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    place = tmp_path_factory.mktemp("machine")
    outside, shared = place / "outside", place / "shared"
    for folder in (outside, shared):
        folder.mkdir()
        folder.chmod(0o755)
    for name, mode in (("everybodys", 0o644), ("mine", 0o600)):
        (outside / name).write_text(SECRET)
        (outside / name).chmod(mode)
    (shared / "data").write_text("shared")
    with running_sandbox(place / "state", speed=1000, options=("--share", str(shared))) as sandbox:
        lab = Lab(sandbox, place)
        yield Machine(lab, lab.create("confined"), outside, shared)


@pytest.mark.parametrize("user", USERS)
def test_files_of_this_machine_cannot_be_read(machine: Machine, user: str) -> None:
    for file in machine.outside.iterdir():
        tries = [
            f"cat {file}",
            f"cat /proc/1/root{file}",
            f"ln -sf {file} /tmp/link-{user}; cat /tmp/link-{user}",
            "for root in /proc/[0-9]*/root; do cat $root" + f"{file}; done",
            "for fd in /proc/[0-9]*/fd/*; do cat $fd/../../../.." + f"{file}; done 2>/dev/null </dev/null",
        ]
        for command in tries:
            assert SECRET not in machine.run(command, user).stdout, command
    found = machine.run(f"find / -xdev -name {machine.outside.name} 2>/dev/null; ls / /home", user).stdout.split()
    assert not [word for word in found if word.endswith("outside")]
    own = {"bin", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "media", "mnt", "opt", "proc", "root", "run"}
    own |= {"sbin", "srv", "sys", "tmp", "usr", "var", machine.shared.parts[1], "ann"}
    assert {word for word in found if word not in ("/:", "/home:")} <= own
    assert os.uname().nodename != machine.run("hostname", user).stdout.strip()


def test_accounts_passwords_and_keys_of_this_machine_are_not_there(machine: Machine) -> None:
    shadow = machine.run("cat /etc/shadow").stdout
    assert shadow and all(line.split(":")[1] == "*" for line in shadow.splitlines())
    people = [
        line.split(":")[0]
        for line in machine.run("cat /etc/passwd").stdout.splitlines()
        if int(line.split(":")[2]) >= 1000
    ]
    assert set(people) <= {"nobody", "ann"}
    assert machine.run("ls /etc/ssh/*key* /etc/ssl/private /root/.ssh /etc/pip.conf").stdout == ""


def test_processes_of_this_machine_cannot_be_seen_or_signalled(machine: Machine) -> None:
    length = "987" + str(uuid.uuid4().int % 1000)
    process = subprocess.Popen(["sleep", length])
    try:
        for user in USERS:
            assert length not in machine.run("ps -eo args; cat /proc/[0-9]*/cmdline | tr '\\0' ' '", user).stdout
        machine.run(f"kill -9 {process.pid}; kill -9 {os.getpid()}")
        # All that it can see, its own sessions left out; then the whole of what it may signal.
        machine.run("for pid in $(ls /proc | grep -x '[0-9]*'); do [ $pid -le 1 ] || kill -9 $pid; done")
        machine.run("kill -9 -1")
        assert process.poll() is None
        wait_until(lambda: machine.run("true").returncode == 0, 30, "the host's sshd, which it has killed")
    finally:
        process.kill()
        process.wait(10)


FORBIDDEN = {
    "a disk of this machine": "mknod /tmp/disk b 8 0 || mknod /dev/disk b 8 0",
    "its memory": "mknod /tmp/mem c 1 1",
    "its devices": "mount -t devtmpfs devtmpfs /mnt",
    "its processes": "mount -t proc proc /mnt",
    "its kernel's files": "mount -t sysfs sysfs /mnt",
    "its control groups": "mount -t cgroup2 cgroup2 /mnt || mount -t cgroup -o memory cgroup /mnt",
    "its settings": "echo 1 > /proc/sys/kernel/panic || echo '|/tmp/x' > /proc/sys/kernel/core_pattern",
    "its settings, uncovered": "umount /proc/sys || umount -l /proc/sys || mount -o remount,rw /proc/sys",
    "its kernel's switches": "mount -o remount,rw /sys || echo x > /sys/kernel/uevent_helper",
    "its reset button": "echo b > /proc/sysrq-trigger && test ! -c /proc/sysrq-trigger",
    "its memory's image": "test -r /proc/kcore && test ! -c /proc/kcore && head -c 1 /proc/kcore | grep -q .",
    "its log": "dmesg | grep -q .",
    "a namespace more": "unshare --user true || unshare --mount true || unshare --cgroup true",
    "another namespace": "nsenter --target 1 --mount true || nsenter --target 1 --net true",
    "another root": "python3 -c 'import os; os.chroot(\"/proc/1/root\")' && test -d /proc/1/root/outside",
    "its network": "ip link add x type dummy || ip route add default via 10.213.0.1",
    "its clock": "date -s 2001-01-01",
    "its name": "hostname other && test $(hostname) = other",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_root_of_a_host_cannot_reach(machine: Machine, what: str) -> None:
    done = machine.run(f"( {FORBIDDEN[what]} ) 2>&1")
    assert done.returncode != 0, f"{what}: {done.stdout}"


def test_what_it_writes_stays_in_its_own_layer(machine: Machine) -> None:
    name = f"podway-{uuid.uuid4().hex}"
    for folder in ("usr/bin", "usr/lib", "etc", "var/lib", "opt"):
        assert machine.run(f"echo x > /{folder}/{name} && cat /{folder}/{name}").stdout == "x\n"
        assert not (Path("/") / folder / name).exists()
    other = machine.lab.create("other")
    address = other.network_endpoints[0].ip_address
    assert machine.lab.ssh(address, f"ls /usr/bin/{name}").returncode != 0
    machine.lab.client.delete_node(name=other.name).result(timeout=60)


def test_a_shared_directory_can_be_read_and_not_written(machine: Machine) -> None:
    assert machine.run(f"cat {machine.shared}/data", "ann").stdout == "shared"
    refused = f"echo x > {machine.shared}/data || touch {machine.shared}/new || mount -o remount,rw {machine.shared}"
    assert machine.run(refused).returncode != 0
    assert [path.name for path in machine.shared.iterdir()] == ["data"]


def test_links_in_the_way_of_the_guest_agent_lead_nowhere_else(machine: Machine) -> None:
    """Root of a host replaces files that the sandbox is about to write by links to this machine's."""
    victim = machine.outside / "mine"
    for file in ("/etc/passwd", "/etc/shadow", "/etc/group", "/run/pw/keys/zoe", "/run/pw/startup-script"):
        # In one session: without its accounts the host lets nobody in until they are back.
        links = (
            f"cp {file} /tmp/kept; ln -sf {victim} {file}; echo linked; read word; rm -f {file}; cp /tmp/kept {file}"
        )
        with subprocess.Popen(
            machine.lab.command(machine.address, links), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as session:
            assert session.stdout is not None and session.stdout.readline() == "linked\n"
            # Without /etc/passwd the change fails, and is tried no further; it must fail on the host alone.
            machine.update(
                {"ssh-keys": f"ann:{machine.lab.public}\nroot:{machine.lab.public}\nzoe:{machine.lab.public}"}
            )
            session.communicate("go on\n", timeout=30)
        assert victim.read_text() == SECRET, file
    assert machine.run("true").returncode == 0


def test_a_shell_that_a_host_replaced_gets_no_more_rights(machine: Machine) -> None:
    """The sandbox starts programs of the host's own: at boot, and to carry out commands. They must be confined as well."""
    outside = os.stat("/proc/self/ns/user").st_ino  # noqa: PTH116 - the namespace behind the link
    script = f"""#!/bin/bash
readlink /proc/self/ns/user >> /var/tmp/seen
cat {machine.outside}/mine >> /var/tmp/read 2>/dev/null
exec /bin/bash "$@"
"""
    put = "cat > /usr/bin/evil; chmod 755 /usr/bin/evil; ln -sf evil /usr/bin/sh"
    subprocess.run(machine.lab.command(machine.address, put), input=script, text=True, check=True, timeout=60)
    machine.lab.sandbox.command("POST", "hosts", {"node": "confined", "action": "kill-sshd"})
    machine.lab.sandbox.command("POST", "hosts", {"node": "confined", "action": "start-sshd"})
    machine.lab.sandbox.command("POST", "maintenance", {"node": "confined"})
    ready = tpu_v2.Node.State.READY
    wait_until(lambda: machine.lab.client.get_node(name=machine.node.name).state == ready, 60, "the reboot")
    seen = machine.run("cat /var/tmp/seen").stdout.split()
    machine.run("ln -sf dash /usr/bin/sh")
    assert len(seen) >= 3 and f"user:[{outside}]" not in seen
    assert machine.run("cat /var/tmp/read").stdout == ""
