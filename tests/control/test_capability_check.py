"""What a provider does not do is refused or noted, never dropped."""

import msgspec
import pytest

from podway.control.capability_check import forecast, remarks
from podway.provider_table import row_of
from podway.task.task import (
    Accelerator,
    Bucket,
    DevEnvironment,
    FileMount,
    LocalDir,
    Placement,
    Recovery,
    Registry,
    Resources,
    ServiceSpec,
    Task,
    Volume,
    without_image,
)

NOTHING: frozenset[str] = frozenset()
NOTED = {
    "python": Task(python="3.12"),
    "disk": Task(resources=(Resources(disk_gb=300),)),
    "dev": Task(kind="dev-environment", dev=DevEnvironment(ide="vscode", inactivity_s=60)),
    "forwarding": Task(ports=("8080:80",)),
    "ports": Task(resources=(Resources(ports=("80",)),)),
}


@pytest.mark.parametrize("what", NOTED)
def test_noted_unless_honoured(what: str) -> None:
    assert len(remarks(NOTED[what], NOTHING, simulated=False).notes) == 1
    assert remarks(NOTED[what], frozenset({what}), simulated=False).notes == ()


def test_a_priority_is_noted_only_where_nothing_waits_in_a_queue() -> None:
    chips = (Resources(accelerator=Accelerator(type="v6e-8")),)

    def notes(setup: bool = True, **said) -> tuple[str, ...]:  # type: ignore[no-untyped-def]
        return remarks(Task(priority=5, **said), NOTHING, simulated=False, setup=setup).notes

    assert notes(resources=chips) == ()
    assert notes() == ("priority has no effect: the task bypasses the queue of its cluster",)
    service = ServiceSpec(port=80)
    assert "each replica has a cluster of its own" in notes(resources=chips, service=service)[0]
    assert not any("priority" in note for note in notes(setup=False, resources=chips, service=service))


def test_recovery_is_for_jobs_that_bring_their_setup() -> None:
    task = Task(recovery=Recovery())
    assert remarks(task, NOTHING, simulated=False).notes == ()
    assert len(remarks(task, NOTHING, simulated=False, setup=False).notes) == 1


def test_what_a_service_says_that_the_gateway_decides() -> None:
    plain = Task(kind="service", run="x", service=ServiceSpec(port=8000))
    assert remarks(plain, NOTHING, simulated=False).notes == ()
    (note,) = remarks(plain, NOTHING, simulated=False, setup=False).notes
    assert "plain job" in note
    other = ServiceSpec(port=8000, load_balancing="round_robin", https=True)
    assert len(remarks(Task(kind="service", service=other), NOTHING, simulated=False).notes) == 2


def test_a_bucket_is_refused_where_there_are_none() -> None:
    task = Task(file_mounts=(FileMount(target="~/data", source=Bucket(uri="gs://b")),))
    refused = remarks(task, NOTHING, simulated=True).refusal
    assert refused is not None and "gs://b" in refused.what
    assert remarks(task, frozenset({"buckets"}), simulated=False).refusal is None


SHOWS = frozenset({"instance-paths"})


def test_a_volume_is_refused_where_there_are_none_unless_it_is_optional() -> None:
    disk = Volume(path="/v", name="disk")
    refusal = remarks(Task(volumes=(disk,)), SHOWS, simulated=False).refusal
    assert refusal is not None and "disk cannot be seen at /v here: Podway has no volumes there" in refusal.what
    assert remarks(Task(volumes=(disk,)), SHOWS | {"volumes"}, simulated=False).refusal is None
    at_root = remarks(Task(volumes=(disk,)), SHOWS | {"volumes"}, simulated=True).refusal
    assert at_root is not None and "share this machine's root directory" in at_root.what
    in_home = msgspec.structs.replace(disk, path="~/v")
    assert remarks(Task(volumes=(in_home,)), SHOWS | {"volumes"}, simulated=True).refusal is None
    found = remarks(Task(volumes=(msgspec.structs.replace(disk, optional=True),)), NOTHING, simulated=False)
    assert found.refusal is None
    assert found.notes == ("the optional volume disk is left out at /v: Podway has no volumes there",)


def test_a_directory_of_the_host_is_seen_where_hosts_have_some() -> None:
    volume = Volume(path="/data", instance_path="/mnt/data")
    task = Task(volumes=(volume,))
    assert remarks(task, SHOWS, simulated=False).refusal is None
    assert remarks(task, NOTHING, simulated=False).refusal is not None
    refusal = remarks(task, SHOWS, simulated=True).refusal
    assert refusal is not None and "share this machine's root directory" in refusal.what
    in_image = msgspec.structs.replace(task, resources=(Resources(image="docker:i"),))
    assert remarks(in_image, SHOWS, simulated=True).refusal is None
    locked = Task(volumes=(msgspec.structs.replace(volume, read_only=True),))
    assert "read_only has no effect on /data" in remarks(locked, SHOWS, simulated=False).notes[0]


@pytest.mark.parametrize("source", ["/a/../../etc", "relative", "/a/./b"])
def test_a_directory_of_the_host_is_an_absolute_path(source: str) -> None:
    task = Task(volumes=(Volume(path="/data", instance_path=source),), resources=(Resources(image="docker:i"),))
    for simulated in (True, False):
        refusal = remarks(task, SHOWS, simulated=simulated).refusal
        assert refusal is not None and "is not an absolute path" in refusal.what


def test_a_simulated_host_has_no_root_of_its_own() -> None:
    task = Task(file_mounts=(FileMount(target="/data", source=LocalDir(path="/x")),))
    assert remarks(task, NOTHING, simulated=True).refusal is not None
    assert remarks(task, NOTHING, simulated=False).refusal is None


def test_a_plain_task_has_no_remarks() -> None:
    found = remarks(Task(run="true"), NOTHING, simulated=True)
    assert found.refusal is None and found.notes == ()


def test_an_image_is_refused_where_it_cannot_be_used() -> None:
    task = Task(resources=(Resources(image="docker:x/y"),))
    refused = remarks(task, NOTHING, simulated=False, no_image="nothing runs it").refusal
    assert refused is not None and refused.what == "image x/y cannot be used here: nothing runs it"
    assert "--ignore-image" in refused.hint
    assert remarks(without_image(task), NOTHING, simulated=False, no_image="nothing runs it").refusal is None
    assert remarks(Task(), NOTHING, simulated=False, no_image="nothing runs it").refusal is None
    machine = Task(resources=(Resources(image="projects/p/global/images/i", accelerator=Accelerator(type="v6e-8")),))
    (note,) = remarks(machine, NOTHING, simulated=False, no_image="nothing runs it").notes
    assert "projects/p/global/images/i has no effect" in note


def test_check_says_what_launch_says() -> None:
    task = Task(resources=(Resources(image="docker:x", placement=Placement(provider="ssh")),), python="3.12")
    assert forecast(task) == remarks(task, row_of("ssh").capabilities, simulated=False).notes


def test_what_holds_for_some_is_said_with_their_names() -> None:
    said = forecast(Task(resources=(Resources(disk_gb=100),)))
    assert said == ("on local, ssh: disk_size has no effect here: the hosts have the disks they have",)


def test_what_a_launch_refuses_is_said_before() -> None:
    task = Task(file_mounts=(FileMount(target="/data", source=LocalDir(path="/x")),))
    (line,) = forecast(task)
    assert line.startswith("on local: launch refuses it: file_mounts /data")
    gone = Task(resources=(Resources(placement=Placement(provider="nimbus")),))
    assert forecast(gone) == ("there is no provider 'nimbus' in this version: launch refuses it",)


@pytest.mark.parametrize("target", ["../x", "~/../x", "/a/../b", "~/./x"])
def test_a_program_cannot_lead_a_mount_elsewhere(target: str) -> None:
    task = Task(file_mounts=(FileMount(target=target, source=LocalDir(path="/x")),))
    assert remarks(task, NOTHING, simulated=False).refusal is not None


@pytest.mark.parametrize("provider", ["gke", "ssh"])
def test_a_login_to_a_registry_is_used_everywhere(provider: str) -> None:
    task = Task(run="x", registry=Registry(username="u", password_secret="P"))
    assert remarks(task, row_of(provider).capabilities, simulated=False).refusal is None


def test_a_priority_class_is_noted_where_hosts_are_no_pods() -> None:
    task = Task(run="x", resources=(Resources(priority_class="high"),))
    assert remarks(task, row_of("gke").capabilities, simulated=False).notes == ()
    (note,) = remarks(task, row_of("ssh").capabilities, simulated=False).notes
    assert note.startswith("priority_class has no effect here")
