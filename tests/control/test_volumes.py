"""Volumes: who may create, use and delete them, and what a launch makes of the names in its task."""

import asyncio
from pathlib import Path

import pytest

from podway.control.access import Caller
from podway.control.store import open_store, sqlite_url
from podway.control.vault import SecretVault
from podway.control.verbs import Control
from podway.control.volumes import VolumeControl, check_attached
from podway.errors import ProviderError, UserError
from podway.launch import Launch
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.order import Host, Order
from podway.providers import CreatedVolume, Step, open_provider
from podway.providers.gcp.errors import GcpError
from podway.providers.gcp.hosts import volume_command
from podway.providers.gcp.resources import VolumeMount
from podway.providers.gcp.volumes import GcpVolumes
from podway.task.read import read_task_text
from podway.task.task import Accelerator, Placement, Resources, Task, Volume
from podway.task.volumes import VolumeSpec

ANN, BOB, VIEWER = Caller(user="ann"), Caller(user="bob"), Caller(user="ann", role="viewer")
V6E = (Resources(accelerator=Accelerator(type="v6e-1")),)


@pytest.fixture
def control(tmp_path: Path) -> Control:
    store = open_store(sqlite_url(tmp_path / "p.db"))
    vault = SecretVault(tmp_path / "key")
    return Control(store=store, vault=vault, provider=lambda name: open_provider(name, tmp_path), wake=lambda _: None)


def create(control: Control, name: str, caller: Caller = ANN, **more: object) -> None:
    spec = VolumeSpec(name=name, placement=Placement(provider="local"), **more)  # type: ignore[arg-type]
    asyncio.run(control.volumes.create(spec, caller))


def launch(task: Task, **more: object) -> LaunchRequest:
    return LaunchRequest(task=task, options=LaunchOptions(**more))  # type: ignore[arg-type]


def test_a_launch_finds_the_volumes_of_each_node(control: Control, tmp_path: Path) -> None:
    create(control, "data-0")
    create(control, "data-1")
    volume = Volume(path="~/data", name="data-${{ dstack.node_rank }}", sub_path="a")
    request = control.volumes.attach(launch(Task(resources=V6E, slices=2, volumes=(volume,))), ANN)
    found = request.task
    assert found.volumes[0].instance_path == f"{tmp_path}/volumes/data-${{{{ dstack.node_rank }}}}/a"
    assert found.resources[0].placement == Placement(provider="local")
    hosts = tuple(Host(rank=i, slice=i, worker=0, address="x", home="/h", id=f"h{i}") for i in range(2))
    order = Order(accelerator_type="v6e-1", provider="local", slices=2)
    job = Launch(
        job="j", number=1, cluster="c", task=found, order=order, hosts=hosts, simulated=True, user="u", submitted=0
    )
    script = Launch.script(job, "run") if found.run else job._link_prelude()
    assert f'podway_link {tmp_path}/volumes/data-"$PODWAY_SLICE_ID"/a "$HOME"/data' in script


def test_a_volume_is_its_owners(control: Control) -> None:
    create(control, "data")
    task = Task(resources=V6E, run="x", volumes=(Volume(path="~/d", name="data"),))
    with pytest.raises(UserError, match="there is no volume 'data'"):
        control.volumes.attach(launch(task), BOB)
    with pytest.raises(UserError, match="the name 'data' is taken"):
        create(control, "data", BOB)
    with pytest.raises(UserError, match="there is no volume"):
        asyncio.run(control.volumes.delete("data", BOB))
    with pytest.raises(UserError, match="may not manage"):
        asyncio.run(control.volumes.delete("data", VIEWER))
    assert control.volumes.list_for(BOB) == []
    asyncio.run(control.volumes.delete("data", Caller(user="root", role="admin")))
    assert control.volumes.list_for(ANN) == []


def test_one_that_is_used_stays(control: Control, tmp_path: Path) -> None:
    create(control, "data")
    (tmp_path / "volumes" / "data" / "kept").write_text("x")
    create(control, "data")  # the same again changes nothing
    task = Task(resources=V6E, run="x", volumes=(Volume(path="~/d", name="data"),))
    control.launch(launch(task, cluster="c", provider="local"), ANN)
    with pytest.raises(UserError, match="used by cluster c"):
        asyncio.run(control.volumes.delete("data", ANN))
    assert (tmp_path / "volumes" / "data" / "kept").read_text() == "x"
    control.cancel("c", ANN, every=True)
    with pytest.raises(UserError, match="exists, and has a size of None"):
        create(control, "data", size_gb=5)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "x" * 80, "-a"])
def test_a_name_that_is_no_directory_is_refused(control: Control, name: str) -> None:
    with pytest.raises(UserError, match="cannot be the name"):
        create(control, name)


def test_what_leads_out_of_a_volume_is_refused(control: Control) -> None:
    create(control, "data")
    task = Task(resources=V6E, run="x", volumes=(Volume(path="~/d", name="data", sub_path="../../etc"),))
    with pytest.raises(UserError, match="leads out of its volume"):
        control.launch(launch(task, cluster="c", provider="local"), ANN)
    forged = Task(resources=V6E, run="x", volumes=(Volume(path="~/d", name="data", instance_path="/etc"),))
    assert control.volumes.attach(launch(forged), ANN).task.volumes[0].instance_path != "/etc"


def test_an_interrupted_creation_is_finished_by_asking_again(tmp_path: Path) -> None:
    store = open_store(sqlite_url(tmp_path / "p.db"))
    local = open_provider("local", tmp_path)
    failures = [ProviderError("the cloud does not answer")]

    class Flaky:
        name = "local"

        async def create_volume(self, spec: VolumeSpec) -> CreatedVolume:
            if failures:
                raise failures.pop()
            return await local.create_volume(spec)  # type: ignore[attr-defined,no-any-return]

        async def delete_volume(self, spec: VolumeSpec) -> None: ...

    volumes = VolumeControl(store, lambda name: Flaky(), lambda: "as-server")  # type: ignore[arg-type,return-value]
    spec = VolumeSpec(name="data", placement=Placement(provider="local"))
    with pytest.raises(ProviderError):
        asyncio.run(volumes.create(spec, ANN))
    assert [one.state for one in volumes.list_for(ANN)] == ["creating"], "what may exist is not forgotten"
    with pytest.raises(UserError, match="is not ready"):
        volumes.attach(launch(Task(volumes=(Volume(path="~/d", name="data"),))), ANN)
    assert asyncio.run(volumes.create(spec, ANN)).state == "ready"


def test_simulated_hosts_of_a_team_have_none(tmp_path: Path) -> None:
    """They run as users of their own, and the directory would be the server's."""
    store = open_store(sqlite_url(tmp_path / "p.db"))
    volumes = VolumeControl(store, lambda name: open_provider(name, tmp_path), lambda: "isolated")
    with pytest.raises(UserError, match="the server's own files"):
        asyncio.run(volumes.create(VolumeSpec(name="data", placement=Placement(provider="local")), ANN))


def test_a_cluster_made_without_a_volume_does_not_get_it() -> None:
    task = Task(resources=(Resources(placement=Placement(provider="gcp")),), volumes=(Volume(path="/d", name="data"),))
    with pytest.raises(UserError, match="does not have the volume data"):
        check_attached(Order(accelerator_type="v6e-1", provider="gcp"), "c", task)


def test_the_first_of_several_volumes_that_exists_is_taken(control: Control) -> None:
    create(control, "second")
    text = "type: task\ncommands: [x]\nvolumes: [{name: [first, second], path: /data}]\nresources: {gpu: v6e-1}\n"
    found = control.volumes.attach(launch(read_task_text(text)), ANN).task.volumes[0]
    assert found.name == "second" and found.instance_path is not None and found.instance_path.endswith("/second")


def test_a_registered_disk_is_never_formatted() -> None:
    mount = VolumeMount(volume="d", directory="/mnt/podway-volumes/d", size_gb=10, format_if_blank=False, slice=0)
    assert "mkfs" not in volume_command(mount)
    assert "mkfs" in volume_command(
        VolumeMount(volume="d", directory="/mnt/podway-volumes/d", size_gb=10, format_if_blank=True, slice=0)
    )


def test_only_an_administrator_registers_a_disk(control: Control) -> None:
    """The server's account reaches disks of others, which a member must not come to by its login."""
    spec = VolumeSpec(name="theirs", placement=Placement(provider="gcp", zone="us-east5-b"), disk_id="somebody-s")
    with pytest.raises(UserError, match="may not register an existing disk"):
        asyncio.run(control.volumes.create(spec, ANN))
    assert control.volumes.rows.get("theirs") is None


class NoLooking:
    """A cloud that makes disks and then refuses to show them."""

    async def in_thread(self, call, *words):  # type: ignore[no-untyped-def]
        return call(*words)

    def perform(self, step: Step, request: str) -> None:
        self.made = step.target

    def disk(self, path: str) -> None:
        raise GcpError("never", "you may not read disks", "ask for it")


class AnyAccount:
    project, owner = "p", "o"

    def check(self) -> None:
        return None


def test_a_disk_that_was_made_is_not_forgotten() -> None:
    """A UserError would say that nothing was made, and its row would go."""
    cloud = NoLooking()
    spec = VolumeSpec(name="d", placement=Placement(provider="gcp", zone="us-east5-b"), size_gb=100)
    with pytest.raises(ProviderError, match="you may not read disks"):
        asyncio.run(GcpVolumes(AnyAccount(), cloud).create(spec))  # type: ignore[arg-type]
    assert cloud.made.startswith("projects/p/zones/us-east5-b/disks/")
    hostile = VolumeSpec(name="d", placement=Placement(provider="gcp", zone="x/../../y?"), size_gb=100)
    with pytest.raises(UserError, match="is not a zone"):
        asyncio.run(GcpVolumes(AnyAccount(), cloud).create(hostile))  # type: ignore[arg-type]
