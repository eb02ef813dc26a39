"""The machines behind the sandbox's nodes: who may log in, what they are told, what is left when they stop, reboot or go."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.api_core import exceptions
from google.cloud import tpu_v2

from podway.sandbox.hosts import make_key, netns, why_no_hosts
from podway.sandbox.hosts.netns import PLACE, why_no_namespaces
from podway.sandbox.running import Running, running_sandbox
from tests.conftest import wait_until
from tests.sandbox.clients import over_grpc, session_of

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=str(why_no_hosts()))
needs_root = pytest.mark.skipif(bool(why_no_namespaces()), reason=str(why_no_namespaces()))
PARENT = "projects/sandbox/locations/us-east5-b"


@needs_root
def test_a_bridge_whose_maker_was_killed_at_the_wrong_moment_is_removed() -> None:
    """Between making it and writing down whose it is, or between removing that and the bridge itself."""
    PLACE.mkdir(mode=0o755, exist_ok=True)
    with subprocess.Popen(["sleep", "1000"]) as maker:
        dead, living = f"pwb{os.getpid()}1"[:15], f"pwb{os.getpid()}2"[:15]
        try:
            for bridge, pid in ((dead, maker.pid), (living, os.getpid())):
                words = ["ip", "link", "add", bridge, "address", netns._address_of(pid), "type", "bridge"]
                subprocess.run(words, check=True)
            netns._remove_orphans()
            assert Path(f"/sys/class/net/{dead}").exists()
            maker.kill()
            maker.wait()
            netns._remove_orphans()
            assert not Path(f"/sys/class/net/{dead}").exists()
            assert Path(f"/sys/class/net/{living}").exists()
        finally:
            maker.kill()
            for bridge in (dead, living):
                subprocess.run(["ip", "link", "del", bridge], capture_output=True)


class Lab:
    """A sandbox with machines, a client of it and a key."""

    def __init__(self, sandbox: Running, place: Path) -> None:
        self.sandbox, self.key = sandbox, make_key(place / "key")
        self.client = over_grpc(tpu_v2, sandbox)
        self.session = session_of(sandbox)

    @property
    def public(self) -> str:
        return Path(f"{self.key}.pub").read_text().strip()

    def create(self, id: str, accelerator: str = "v6e-1", **more: Any) -> tpu_v2.Node:
        metadata = {"ssh-keys": f"ann:{self.public}\nroot:{self.public}", **more.pop("metadata", {})}
        wish = tpu_v2.Node(accelerator_type=accelerator, runtime_version="v2-alpha-tpuv6e", metadata=metadata, **more)
        return self.client.create_node(parent=PARENT, node_id=id, node=wish).result(timeout=60)

    def port(self, name: str, worker: int = 0) -> int:
        """The port of a worker's sshd, where that is not 22."""
        found = self.client.get_guest_attributes(tpu_v2.GetGuestAttributesRequest(name=name)).guest_attributes
        items = found[worker].query_value.items
        return next((int(item.value) for item in items if item.key == "ssh-port"), 22)

    def command(self, address: str, command: str, user: str = "root", port: int = 22) -> list[str]:
        options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectTimeout=5"]
        flags = [word for option in (*options, "BatchMode=yes") for word in ("-o", option)]
        target = ["-i", str(self.key), "-p", str(port), f"{user}@{address}", command]
        return ["ssh", *flags, *target]

    def ssh(self, address: str, command: str, user: str = "root", port: int = 22) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(address, command, user, port),
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    place = tmp_path_factory.mktemp("lab")
    with running_sandbox(place / "state", speed=1000) as sandbox:
        yield Lab(sandbox, place)


@needs_root
def test_keys_of_the_metadata_let_people_in(lab: Lab) -> None:
    node = lab.create("keys", "v6e-16", network_config={"enable_external_ips": True})
    host = node.network_endpoints[2]
    assert lab.ssh(host.ip_address, "whoami; pwd", "ann").stdout.split() == ["ann", "/home/ann"]
    if shutil.which("sudo"):
        assert lab.ssh(host.ip_address, "sudo -n whoami", "ann").stdout.strip() == "root"
    assert lab.ssh(host.access_config.external_ip, "hostname").stdout.strip().endswith("-w-2")
    assert lab.ssh(host.ip_address, "true", "bob").returncode == 255
    # The key that the API tells is the one that sshd shows.
    asked = tpu_v2.GetGuestAttributesRequest(name=node.name, worker_ids=["2"], query_path="hostkeys/")
    (told,) = lab.client.get_guest_attributes(asked).guest_attributes[0].query_value.items
    scanned = subprocess.run(
        ["ssh-keyscan", "-t", "ed25519", host.ip_address], capture_output=True, text=True, timeout=30
    )
    assert told.value in scanned.stdout
    # Hosts reach each other.
    other = node.network_endpoints[3].ip_address
    assert lab.ssh(host.ip_address, f"bash -c 'head -c 7 </dev/tcp/{other}/22'").stdout == "SSH-2.0"
    changed = tpu_v2.Node(name=node.name, metadata={"ssh-keys": f"bob:{lab.public}"})
    lab.client.update_node(node=changed, update_mask={"paths": ["metadata"]}).result(timeout=30)
    assert lab.ssh(host.ip_address, "whoami", "bob").stdout.strip() == "bob"
    assert lab.ssh(host.ip_address, "true", "ann").returncode == 255
    lab.client.delete_node(name=node.name).result(timeout=30)


@needs_root
def test_a_machine_knows_who_it_is(lab: Lab) -> None:
    script = {"startup-script": "#!/bin/sh\nid -u > /var/tmp/started", "colour": "green"}
    node = lab.create("who", metadata=script)
    address = node.network_endpoints[0].ip_address
    server = "http://metadata.google.internal/computeMetadata/v1"

    def ask(path: str) -> str:
        return lab.ssh(address, f"curl -s -H 'Metadata-Flavor: Google' '{server}/{path}'").stdout

    assert ask("instance/attributes/colour") == "green"
    assert ask("instance/attributes/accelerator-type") == "v6e-1"
    assert "WORKER_ID: '0'" in ask("instance/attributes/tpu-env")
    assert '"access_token"' in ask("instance/service-accounts/default/token")
    assert ask("project/project-id") == "sandbox"
    assert "not found" in ask("instance/nonsense")
    assert "Missing" in lab.ssh(address, f"curl -s {server}/instance/name").stdout
    wait_until(lambda: lab.ssh(address, "cat /var/tmp/started").stdout.strip() == "0")
    token = json.loads(ask("instance/service-accounts/default/token"))["access_token"]
    mine = f"curl -s -H 'Authorization: Bearer {token}' {lab.sandbox.rest}"
    assert node.name in lab.ssh(address, f"{mine}/v2/{PARENT}/nodes").stdout
    assert "Hosts may not command" in lab.ssh(address, f"{mine}/sandbox").stdout
    assert "missing required authentication" in lab.ssh(address, f"curl -s {lab.sandbox.rest}/v2/{PARENT}/nodes").stdout
    lab.client.delete_node(name=node.name).result(timeout=30)


@needs_root
def test_what_stays_over_stop_start_and_maintenance(lab: Lab) -> None:
    node = lab.create("stay")
    address = node.network_endpoints[0].ip_address
    lab.ssh(address, "echo kept > ~/file; echo gone > /tmp/file; nohup sleep 1000 >/dev/null 2>&1 &")
    lab.client.stop_node(tpu_v2.StopNodeRequest(name=node.name)).result(timeout=30)
    assert lab.ssh(address, "true").returncode == 255
    lab.client.start_node(tpu_v2.StartNodeRequest(name=node.name)).result(timeout=30)
    assert lab.ssh(address, "cat ~/file /tmp/file; pgrep sleep").stdout == "kept\n"
    lab.sandbox.command("POST", "maintenance", {"node": "stay"})
    wait_until(lambda: lab.client.get_node(name=node.name).state == tpu_v2.Node.State.READY)
    assert lab.ssh(address, "cat ~/file").stdout == "kept\n"
    lab.client.delete_node(name=node.name).result(timeout=30)


@needs_root
def test_a_data_disk_is_seen_by_its_own_machine_alone(lab: Lab) -> None:
    if subprocess.run(["losetup", "-f"], capture_output=True).returncode:
        pytest.skip("no loop device can be made here")
    zone = f"{lab.sandbox.rest}/compute/v1/projects/sandbox/zones/us-east5-b"
    lab.session.post(f"{zone}/disks", json={"name": "data", "sizeGb": "30"}).raise_for_status()
    disk = {"source_disk": "projects/sandbox/zones/us-east5-b/disks/data", "mode": "READ_WRITE"}
    with pytest.raises(exceptions.BadRequest, match="pod slice"):
        lab.create("pod", "v6e-16", data_disks=[disk])
    node, other = lab.create("disk", data_disks=[disk]), lab.create("diskless")
    with_disk, without = (one.network_endpoints[0].ip_address for one in (node, other))
    size = lab.ssh(with_disk, "lsblk -bdno SIZE").stdout.strip()
    assert size == str(30 << 30)
    assert lab.ssh(without, "lsblk -bdno SIZE").stdout == ""
    script = "d=/dev/$(lsblk -dno NAME); mkfs.ext4 -q $d && mount $d /mnt && echo kept > /mnt/file && umount /mnt"
    assert lab.ssh(with_disk, script).returncode == 0
    lab.client.delete_node(name=node.name).result(timeout=30)
    again = lab.create("again", data_disks=[disk])
    address = again.network_endpoints[0].ip_address
    assert lab.ssh(address, "mount /dev/$(lsblk -dno NAME) /mnt && cat /mnt/file").stdout == "kept\n"
    for one in (again, other):
        lab.client.delete_node(name=one.name).result(timeout=30)
    lab.session.delete(f"{zone}/disks/data").raise_for_status()
    images = subprocess.run(["losetup", "-a"], capture_output=True, text=True).stdout
    wait_until(lambda: str(lab.key.parent) not in images or not list(lab.key.parent.rglob("*.img")))


@needs_root
def test_a_vm_of_compute_engine_is_a_machine_too(lab: Lab) -> None:
    """The host of a legacy TPU Node."""
    session, zone = lab.session, f"{lab.sandbox.rest}/compute/v1/projects/sandbox/zones/us-central1-a"
    body = {
        "name": "host",
        "machineType": "zones/us-central1-a/machineTypes/n1-standard-8",
        "disks": [{"boot": True, "autoDelete": True, "initializeParams": {"diskSizeGb": "50"}}],
        "networkInterfaces": [{"accessConfigs": [{"type": "ONE_TO_ONE_NAT"}]}],
        "metadata": {"items": [{"key": "ssh-keys", "value": f"root:{lab.public}"}]},
        "labels": {"podway-cluster": "c"},
    }
    begun = session.post(f"{zone}/instances", json=body).json()
    wait_until(lambda: session.get(f"{zone}/operations/{begun['name']}").json()["status"] == "DONE")
    wait_until(lambda: session.get(f"{zone}/instances/host").json()["status"] == "RUNNING")
    nic = session.get(f"{zone}/instances/host").json()["networkInterfaces"][0]
    assert lab.ssh(nic["accessConfigs"][0]["natIP"], "hostname").stdout.strip() == "host"
    listed = session.get(f"{zone}/instances", params={"filter": "labels.podway-cluster=c AND name=h*"}).json()["items"]
    assert [one["name"] for one in listed] == ["host"]
    assert not session.get(f"{zone}/instances", params={"filter": "labels.podway-cluster=d"}).json()["items"]
    refused = session.delete(f"{zone}/disks/host")
    assert refused.status_code == 400
    assert refused.json()["error"]["errors"][0]["reason"] == "resourceInUseByAnotherResource"
    session.post(f"{zone}/instances/host/stop")
    wait_until(lambda: lab.ssh(nic["networkIP"], "true").returncode == 255)
    session.post(f"{zone}/instances/host/start")
    wait_until(lambda: session.get(f"{zone}/instances/host").json()["status"] == "RUNNING")
    assert lab.ssh(nic["networkIP"], "true").returncode == 0
    # The project's own keys let in everywhere.
    project = f"{lab.sandbox.rest}/compute/v1/projects/sandbox"
    keys = [{"key": "ssh-keys", "value": f"zoe:{lab.public}"}]
    session.post(f"{project}/setCommonInstanceMetadata", json={"items": keys})
    assert session.get(project).json()["commonInstanceMetadata"]["items"] == keys
    wait_until(lambda: lab.ssh(nic["networkIP"], "whoami", "zoe").stdout == "zoe\n")
    session.post(f"{project}/setCommonInstanceMetadata", json={"items": []})
    session.delete(f"{zone}/instances/host")
    assert session.get(f"{zone}/disks/host").status_code == 404
    assert not [one for one in lab.sandbox.command("GET", "ledger")["living"] if "us-central1-a" in one["name"]]


@needs_root
def test_partition_preemption_and_a_lost_machine(lab: Lab) -> None:
    node = lab.create("spot", "v6e-16", scheduling_config={"spot": True})
    addresses = [one.ip_address for one in node.network_endpoints]
    lab.sandbox.command("POST", "partition", {"node": "spot", "workers": [1]})
    assert lab.ssh(addresses[1], "true").returncode == 255
    assert lab.ssh(addresses[0], "true").returncode == 0
    lab.sandbox.command("POST", "partition", {"node": "spot", "workers": [1], "on": False})
    assert lab.ssh(addresses[1], "true").returncode == 0
    lab.sandbox.command("POST", "hosts", {"node": "spot", "workers": [2], "action": "kill-sshd"})
    assert lab.ssh(addresses[2], "true").returncode == 255
    lab.sandbox.command("POST", "hosts", {"node": "spot", "workers": [2], "action": "start-sshd"})
    assert lab.ssh(addresses[2], "true").returncode == 0
    lab.sandbox.command("POST", "preempt", {"node": "spot"})
    assert lab.client.get_node(name=node.name).state == tpu_v2.Node.State.PREEMPTED
    wait_until(lambda: lab.ssh(addresses[0], "true").returncode == 255)
    lab.client.delete_node(name=node.name).result(timeout=30)


@needs_root
def test_nothing_is_left_behind(tmp_path: Path) -> None:
    before = set(PLACE.iterdir()) if PLACE.exists() else set()
    with running_sandbox(tmp_path, speed=1000) as sandbox:
        Lab(sandbox, tmp_path).create("left", "v6e-16")
        made = {path for path in PLACE.iterdir() if path not in before and _made_by(path) == sandbox.pid}
        assert len(made) == 1
        number = made.pop().name
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    assert not [space for space in spaces if space.startswith(f"pw{number}h")]
    assert not Path(f"/sys/class/net/pwb{number}").exists()
    assert not (PLACE / number).exists()
    assert not (tmp_path / "sandbox.json").exists()
    assert (tmp_path / "ledger.jsonl").read_text().count('"made"') == 1


def _made_by(path: Path) -> int:
    try:
        return int((path / "maker").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def test_without_root_hosts_are_sshds_on_loopback(tmp_path: Path) -> None:
    with running_sandbox(tmp_path, hosts="loopback", speed=1000) as sandbox:
        lab = Lab(sandbox, tmp_path)
        node = lab.create("loop", "v6e-16")
        port = lab.port(node.name, 1)
        address = node.network_endpoints[1].ip_address
        me = sandbox.login
        homes = lab.ssh(address, "echo $HOME", me, port).stdout
        assert homes.strip().endswith("/h1/home")
        lab.client.delete_node(name=node.name).result(timeout=30)
        until = time.monotonic() + 10
        while lab.ssh(address, "true", me, port).returncode == 0:
            assert time.monotonic() < until
