"""What is sent to Google Cloud: golden for each mode and for the seeds' task files, and every body read by the official messages.

After a wanted change run with PODWAY_REWRITE_GOLDEN=1, and read the difference.
"""

import os
from pathlib import Path

import msgspec
import pytest
from google.cloud import tpu_v1, tpu_v2, tpu_v2alpha1
from hypothesis import given
from hypothesis import strategies as st

from podway.catalog.slices import all_slices, find_slice
from podway.control.choosing import order_of
from podway.errors import UserError
from podway.order import Order, OrderVolume
from podway.providers import Offer, Request
from podway.providers.gcp.render import Mark, RenderContext, ident, is_queued, read_mark, render
from podway.providers.gcp.settings import Settings
from podway.providers.gcp.volumes import usual_type, volume_step
from podway.task.environment import Overrides
from podway.task.read import read_task
from podway.task.task import Placement
from podway.task.volumes import VolumeSpec

GOLDEN = Path(__file__).parent.parent / "golden" / "gcp"
SEEDS = Path(__file__).parent.parent.parent / "examples" / "seeds"
CONTEXT = RenderContext(
    project="my-project", owner="ab12cd34", public_key="ssh-ed25519 AAAAexample podway", settings=Settings(zones=())
)


def order(
    tpu: str | None, slices: int = 1, zone: str = "us-east5-b", topology: str | None = None, **more: object
) -> Order:
    if tpu is None:
        return Order(accelerator_type=None, provider="gcp", slices=slices, zone=zone, **more)  # type: ignore[arg-type]
    found = find_slice(tpu, topology)
    return Order(
        accelerator_type=found.accelerator_type,
        topology=found.topology_text,
        slices=slices,
        provider="gcp",
        zone=zone,
        hosts_per_slice=found.hosts,
        chips_per_host=found.chips_per_host,
        runtime_version=more.pop("runtime_version", None) or found.generation_facts.default_runtime,  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )


def volume(name: str, **more: object) -> OrderVolume:
    zone = "us-east5-b" if more.get("disk_type") else "us-west4-a"
    disk = f"projects/my-project/zones/{zone}/disks/volume-{name}"
    return OrderVolume(name=name, disk=disk, size_gb=200, **{"blank": True, **more})  # type: ignore[arg-type]


MODES = {
    "on-demand-host": order("v6e-8"),
    "on-demand-pod": order("v5p-32", zone="us-east5-a"),
    "spot-host": order("v5litepod-4", zone="us-west4-a", spot=True),
    "spot-pod-two-zones-six-hours": order(
        "v6e-16", spot=True, zones=("us-east5-b", "us-east1-d"), valid_until_s=6 * 3600.0
    ),
    "multislice": order("v5litepod-16", 2, zone="us-west4-a"),
    "multislice-best-effort": order("v4-16", 2, zone="us-central2-b", best_effort=True),
    "reservation": order("v5p-128", zone="us-east5-a", reservation="team"),
    "topology": order("v5p-256", zone="us-east5-a", topology="4x4x8"),
    "topology-not-the-usual": order("v4-256", zone="us-central2-b", topology="4x4x8"),
    "at-once-though-a-pod": order("v6e-16", queued=False, spot=True),
    "two-old-slices": order("v3-8", 2, zone="us-central1-a"),
    "data-disk-and-ports": order("v6e-8", disk_gb=300, ports=("8080", "9000-9010"), labels={"team": "nlp"}),
    "network": order("v5litepod-8", zone="us-west4-a", network="lab", subnetwork="tpus", tags=("web",)),
    "tpu-node": order(
        "v2-8", zone="us-central1-b", tpu_vm=False, runtime_version="2.12.0", instance_type="n1-highmem-8"
    ),
    "tpu-node-of-a-name": order("v3-8", zone="us-central1-a", tpu_vm=False, tpu_name="my-node", spot=True),
    "volume-and-data-disk": order("v6e-8", disk_gb=300, volumes=(volume("data", disk_type="hyperdisk-balanced"),)),
    "volume-of-a-spot-host": order("v5litepod-4", zone="us-west4-a", spot=True, volumes=(volume("old", blank=False),)),
    "volume-for-each-node": order(
        "v5litepod-8", 2, zone="us-west4-a", volumes=(volume("data-0", slice=0), volume("data-1", slice=1))
    ),
    "volume-of-a-cpu-host": order(None, zone="us-west4-a", volumes=(volume("data"),)),
    "cpu-hosts": order(None, 2, zone="us-central1-a", spot=True),
}


@pytest.mark.parametrize("mode", MODES)
def test_requests_are_golden(mode: str) -> None:
    rendered = render("Demo.1", MODES[mode], CONTEXT)
    assert rendered == render("Demo.1", MODES[mode], CONTEXT)
    _golden(rendered, GOLDEN / "modes" / f"{mode}.json")
    _accepted(rendered)


@pytest.mark.parametrize("file", sorted(str(path.relative_to(SEEDS)) for path in SEEDS.rglob("*.y*ml")))
def test_requests_of_the_seeds_are_golden(file: str) -> None:
    """Their own task files, each in a zone that has what they ask for."""
    given_env = tuple(f"{name}=x" for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))
    task = read_task(SEEDS / file, overrides=Overrides(env=given_env))
    resources = task.resources[0]
    assert resources.accelerator is not None
    found = find_slice(resources.accelerator.type, resources.accelerator.topology)
    zone = {"v2": "us-central1-b", "v6e": "us-east5-b", "v5e": "us-west4-a"}[found.generation]
    offer = Offer(
        provider="gcp",
        accelerator_type=found.accelerator_type,
        topology=found.topology_text,
        slices=task.slices,
        zone=zone,
    )
    rendered = render("seed", order_of(offer, resources), CONTEXT)
    _golden(rendered, GOLDEN / "seeds" / f"{file.replace('/', '-').lstrip('.')}.json")
    _accepted(rendered)


def _golden(rendered: Request, path: Path) -> None:
    text = msgspec.json.format(msgspec.json.encode(rendered), indent=2).decode() + "\n"
    if os.environ.get("PODWAY_REWRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def _accepted(rendered: Request) -> None:
    """The client's own messages know every field of every body, and lose none."""
    kinds = {
        "create-node": tpu_v2.Node,
        "create-queued-resource": tpu_v2.QueuedResource,
        "create-queued-resource-v2alpha1": tpu_v2alpha1.QueuedResource,
        "create-tpu-node": tpu_v1.Node,
    }
    for step in rendered.steps:
        if step.verb in kinds:
            message = kinds[step.verb].from_json(msgspec.json.encode(step.body).decode())
            again = kinds[step.verb].to_dict(
                message,
                preserving_proto_field_name=False,
                use_integers_for_enums=False,
                always_print_fields_with_no_presence=False,
            )
            assert _plain(again) == _plain(step.body)


def _plain(value: object) -> object:
    """Without what a message leaves out because it is the default."""
    if isinstance(value, dict):
        kept = {key: _plain(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item not in (False, "", 0)}
    return [_plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (order("v6e-16", disk_gb=300), "disk_size 300 is not possible on 4 hosts of v6e-16"),
        (order("v6e-8", labels={"Team": "x"}), "label Team=x"),
        (order("v6e-8", ports=("http",)), "'http' is not a port"),
        (order("v2-32", tpu_vm=False, zone="us-central1-a"), "legacy TPU Nodes"),
        (order("v3-8", 2, queued=True, zone="us-central1-a"), "multislice begins with v4"),
        (order("v6e-8", zones=("us-east5-b", "us-east1-d"), queued=False), "several zones"),
        (order("v6e-8", zone=""), "names no zone"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_zone_would_do_is_refused_before_anything_is_sent(wrong: Order, said: str) -> None:
    with pytest.raises(UserError) as caught:
        render("demo", wrong, CONTEXT)
    assert said in caught.value.what
    assert caught.value.hint


def test_a_host_on_demand_is_made_at_once_and_what_needs_capacity_is_queued() -> None:
    assert not is_queued(order("v6e-8"))
    assert not is_queued(order(None))
    assert not is_queued(order("v2-8", tpu_vm=False))
    assert is_queued(order("v6e-16"))
    assert is_queued(order("v6e-8", spot=True))
    assert is_queued(order("v6e-8", 2))
    assert is_queued(order("v6e-8", zones=("us-east5-b", "us-east1-d")))
    assert is_queued(order("v6e-8", valid_until_s=60.0))


NAMES = st.from_regex(r"\A[A-Za-z]([A-Za-z0-9._-]{0,60}[A-Za-z0-9])?\Z")
OWNERS = st.from_regex(r"\A[a-z0-9][a-z0-9_-]{0,30}\Z")


@given(NAMES, OWNERS, NAMES, OWNERS)
def test_names_are_legal_and_never_shared(name: str, owner: str, other: str, another: str) -> None:
    made = ident(owner, name)
    assert len(made) <= 55  # leaves room for -10000
    assert made[0].isalpha()
    assert made[-1] != "-"
    assert set(made) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert (made == ident(another, other)) == ((owner, name) == (another, other))


@given(NAMES, OWNERS, st.integers(1, 999_999))
def test_a_mark_is_read_as_it_was_written(name: str, owner: str, parts: int) -> None:
    mark = Mark(cluster=name, owner=owner, parts=parts)
    assert read_mark(str(mark)) == mark


@given(st.text(max_size=80))
def test_what_is_no_mark_is_none(text: str) -> None:
    found = read_mark(text)
    assert found is None or str(found) == text


@given(st.sampled_from(all_slices()), st.booleans(), st.integers(1, 3))
def test_every_slice_of_the_catalog_is_rendered_as_the_api_spells_it(tpu, spot: bool, slices: int) -> None:  # type: ignore[no-untyped-def]
    wanted = order(tpu.accelerator_type, slices, spot=spot)
    if slices > 1 and spot and tpu.generation_facts.dcn_bandwidth_per_host is None:
        wanted = msgspec.structs.replace(wanted, queued=False)
    rendered = render("demo", wanted, CONTEXT)
    _accepted(rendered)
    nodes = [step.body for step in rendered.steps if step.verb == "create-node"]
    nodes += [step.body["tpu"]["nodeSpec"][0]["node"] for step in rendered.steps if "queued" in step.verb]
    assert nodes
    for node in nodes:
        assert node["acceleratorType"] == tpu.accelerator_type
        assert node["runtimeVersion"] == tpu.generation_facts.default_runtime


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (order("v6e-16", volumes=(volume("d"),)), "hosts cannot all write to one disk"),
        (order("v5litepod-8", 2, volumes=(volume("d"),)), "a disk is attached to one of them"),
        (order("v6e-8", volumes=(volume("d", disk_type="pd-balanced"),)), "which v6e does not take"),
        (order("v5p-8", volumes=(volume("d", disk_type="hyperdisk-balanced"),)), "which v5p does not take"),
        (order("v2-8", tpu_vm=False, volumes=(volume("d"),)), "a legacy TPU Node has no disks"),
    ],
)
def test_volumes_that_cannot_be_attached_are_refused(asked: Order, why: str) -> None:
    with pytest.raises(UserError, match=why):
        render("demo", asked, CONTEXT)


def test_the_disk_of_a_volume_is_golden() -> None:
    spec = VolumeSpec(name="My.Data", placement=Placement(provider="gcp", zone="us-west4-a"), size_gb=200)
    step = volume_step(spec, "us-west4-a", "my-project", "ab12cd34")
    _golden(Request(provider="gcp", name="volume", steps=(step,)), GOLDEN / "volume.json")
    assert read_mark(str(step.body["description"])) is None, "no cluster owns it"


def test_a_zone_with_new_tpus_alone_has_disks_that_they_take() -> None:
    assert usual_type("us-east4-a") == "hyperdisk-balanced"
    assert usual_type("us-west4-a") == "pd-balanced"
