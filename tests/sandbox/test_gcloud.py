"""The real gcloud, where it is installed, drives the sandbox: nodes, queued resources, ssh and scp to real sshds, storage."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podway.sandbox.hosts import why_no_hosts
from podway.sandbox.hosts.netns import why_no_namespaces
from podway.sandbox.running import Running, running_sandbox
from tests.sandbox.clients import session_of

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed (where it is, this runs)"),
    pytest.mark.skipif(
        bool(why_no_hosts() or why_no_namespaces()), reason="gcloud wants port 22: namespaces need root"
    ),
]
Gcloud = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_sandbox(tmp_path_factory.mktemp("sandbox"), speed=1000) as running:
        yield running


@pytest.fixture(scope="module")
def gcloud(sandbox: Running, tmp_path_factory: pytest.TempPathFactory) -> Gcloud:
    place = tmp_path_factory.mktemp("home")
    environment = {**os.environ, **sandbox.environment(place), "HOME": str(place)}  # its keys must not go into ours
    environment.pop("SSH_AUTH_SOCK", None)
    # gcloud makes this key itself, but not safely when it logs in to two nodes at once.
    key = place / ".ssh" / "google_compute_engine"
    key.parent.mkdir(mode=0o700)
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", str(key)], check=True)

    def run(*arguments: str, rc: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(["gcloud", *arguments], env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == rc, done.stderr
        return done

    return run


def shown(gcloud: Gcloud, *arguments: str) -> object:
    return json.loads(gcloud(*arguments, "--format=json").stdout)


def test_tpu_vm(gcloud: Gcloud, tmp_path: Path) -> None:
    vm = ("compute", "tpus", "tpu-vm")
    gcloud(*vm, "create", "n", "--accelerator-type=v6e-16", "--version=v2-alpha-tpuv6e", "--spot", "--labels=a=b")
    (listed,) = shown(gcloud, *vm, "list", "--zone=-")  # type: ignore[misc]
    assert listed["state"] == "READY"
    described = shown(gcloud, *vm, "describe", "n")
    assert described["labels"] == {"a": "b"}  # type: ignore[index]
    names = gcloud(*vm, "ssh", "n", "--worker=all", "--command=hostname").stdout.split()
    assert sorted(name.rpartition("-")[2] for name in names) == ["0", "1", "2", "3"]
    inside = gcloud(*vm, "ssh", "n", "--worker=1,3", "--internal-ip", "--command=hostname -I").stdout
    assert inside.count("10.213.") == 2
    (tmp_path / "up").write_text("hello")
    gcloud(*vm, "scp", str(tmp_path / "up"), "n:file", "--worker=all")
    gcloud(*vm, "scp", "n:file", str(tmp_path / "down"), "--worker=2")
    assert (tmp_path / "down").read_text() == "hello"
    gcloud(*vm, "ssh", "n", "--worker=2", "--command=exit 3", rc=3)
    gcloud(*vm, "update", "n", "--update-labels=c=d")
    assert shown(gcloud, *vm, "describe", "n")["labels"] == {"a": "b", "c": "d"}  # type: ignore[index]
    assert "pod slice" in gcloud(*vm, "stop", "n", rc=1).stderr
    gcloud(*vm, "delete", "n")
    assert "not found" in gcloud(*vm, "describe", "n", rc=1).stderr


@pytest.mark.long
def test_queued_resources(gcloud: Gcloud) -> None:
    queued, zone = ("compute", "tpus", "queued-resources"), "--zone=us-west4-a"
    wish = ("--accelerator-type=v5litepod-16", "--runtime-version=v2-alpha-tpuv5-lite", zone)
    gcloud(*queued, "create", "q", "--node-count=2", "--node-prefix=s", "--spot", *wish)
    gcloud(*queued, "create", "one", "--node-id=single", "--valid-until-duration=6h", *wish)
    while {one["state"]["state"] for one in shown(gcloud, *queued, "list", zone)} != {"ACTIVE"}:  # type: ignore[attr-defined]
        pass  # each look takes a second; the test's own time limit ends it
    described = shown(gcloud, *queued, "describe", "q", zone)
    assert [one["nodeId"] for one in described["tpu"]["nodeSpec"]] == ["s-0", "s-1"]  # type: ignore[index]
    ssh = ("alpha", *queued, "ssh", "q", zone, "--node=all", "--worker=all", "--command=hostname")
    assert len({word for word in gcloud(*ssh).stdout.split() if word.startswith("t1v-n-")}) == 8
    assert "force" in gcloud(*queued, "delete", "q", zone, rc=1).stderr
    gcloud(*queued, "delete", "q", zone, "--force")
    gcloud(*queued, "delete", "one", zone, "--force")
    assert shown(gcloud, *queued, "list", zone) == []


@pytest.mark.soak
def test_quotas(gcloud: Gcloud, sandbox: Running) -> None:
    """`alpha services quota list` is what people read their TPU quota with."""
    sandbox.command("POST", "quota", {"zone": "us-east5-b", "limit": 8})
    try:
        project = ("--service=tpu.googleapis.com", f"--consumer=projects/{sandbox.project}")
        found = shown(gcloud, "alpha", "services", "quota", "list", *project)
    finally:
        sandbox.command("POST", "quota", {"zone": "us-east5-b", "limit": None})
    (one,) = [metric for metric in found if metric["metric"] == "tpu.googleapis.com/tpu-v6e"]  # type: ignore[attr-defined]
    buckets = one["consumerQuotaLimits"][0]["quotaBuckets"]
    assert {(bucket.get("dimensions", {}).get("zone"), bucket["effectiveLimit"]) for bucket in buckets} == {
        (None, "-1"),
        ("us-east5-b", "8"),
    }


@pytest.mark.soak
def test_alpha_reservations_and_maintenance(gcloud: Gcloud, sandbox: Running) -> None:
    alpha = ("alpha", "compute", "tpus")
    sandbox.command("POST", "reservations", {"zone": "us-east5-b", "name": "mine", "generation": "v6e", "chips": 8})
    assert len(shown(gcloud, *alpha, "reservations", "list", "--zone=us-east5-b")) == 1  # type: ignore[arg-type]
    wish = ("--accelerator-type=v6e-8", "--version=v2-alpha-tpuv6e", "--zone=us-east5-b")
    gcloud(*alpha, "tpu-vm", "create", "r", "--reservation=mine", "--provisioning-model=RESERVATION_BOUND", *wish)
    gcloud(*alpha, "tpu-vm", "simulate-maintenance-event", "r", "--workers=0", "--zone=us-east5-b")
    gcloud(*alpha, "tpu-vm", "stop", "r", "--zone=us-east5-b")
    gcloud(*alpha, "tpu-vm", "start", "r", "--zone=us-east5-b")
    gcloud(*alpha, "tpu-vm", "delete", "r", "--zone=us-east5-b")


@pytest.mark.soak
def test_disks_come_and_go(gcloud: Gcloud, sandbox: Running) -> None:
    if subprocess.run(["losetup", "-f"], capture_output=True).returncode:
        pytest.skip("no loop device can be made here")
    disks = f"{sandbox.rest}/compute/v1/projects/sandbox/zones/us-east5-b/disks"
    session_of(sandbox).post(disks, json={"name": "data", "sizeGb": "20"}).raise_for_status()
    vm, zone = ("alpha", "compute", "tpus", "tpu-vm"), "--zone=us-east5-b"
    gcloud(*vm, "create", "d", "--accelerator-type=v6e-8", "--version=v2-alpha-tpuv6e", zone)
    gcloud(*vm, "attach-disk", "d", "--disk=data", "--mode=read-write", zone)
    look = (*vm, "ssh", "d", zone, "--command=lsblk -bdno SIZE")
    assert gcloud(*look).stdout.split() == [str(20 << 30)]
    gcloud(*vm, "detach-disk", "d", "--disk=data", zone)
    assert gcloud(*look).stdout == ""
    gcloud(*vm, "delete", "d", zone)


@pytest.mark.soak
def test_lists_and_legacy_nodes(gcloud: Gcloud, sandbox: Running) -> None:
    tpus = ("compute", "tpus")
    assert "v6e-16" in gcloud(*tpus, "tpu-vm", "accelerator-types", "list").stdout
    assert "v2-alpha-tpuv6e" in gcloud(*tpus, "tpu-vm", "versions", "list").stdout
    assert "us-east5-b" in gcloud(*tpus, "locations", "list").stdout
    old = ("--zone=us-central1-a",)
    gcloud(*tpus, "create", "old", "--accelerator-type=v2-8", "--version=2.12.0", *old)
    assert "old" in gcloud(*tpus, "list", *old).stdout
    gcloud(*tpus, "execution-groups", "list", *old)
    gcloud(*tpus, "delete", "old", *old)
    sandbox.command("POST", "stock", {"zone": "us-east5-b", "chips": 0})
    wish = ("--accelerator-type=v6e-8", "--version=v2-alpha-tpuv6e")
    assert "no more capacity" in gcloud(*tpus, "tpu-vm", "create", "none", *wish, rc=1).stderr
    sandbox.command("POST", "stock", {"zone": "us-east5-b", "chips": None})


@pytest.mark.long
def test_storage(gcloud: Gcloud, tmp_path: Path) -> None:
    gcloud("storage", "buckets", "create", "gs://a-bucket", "--location=us-east5")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "small").write_text("hello")
    (tmp_path / "here" / "big").write_bytes(os.urandom(9 << 20))  # above 8 MiB gcloud goes piece by piece
    gcloud("storage", "cp", "-r", str(tmp_path / "here"), "gs://a-bucket/")
    assert "gs://a-bucket/here/small" in gcloud("storage", "ls", "gs://a-bucket/**").stdout
    gcloud("storage", "cp", "gs://a-bucket/here/*", str(tmp_path))
    assert (tmp_path / "big").read_bytes() == (tmp_path / "here" / "big").read_bytes()
    gcloud("storage", "rm", "-r", "gs://a-bucket")
