"""The `resources` section of a SkyPilot task file.

1. The alternatives: the section itself, or each item of `any_of` or `ordered` over it.
2. Each alternative may name several accelerators, and an image for each of several regions: one `Resources` for each.
3. An alternative that another tool could serve (a GPU, another cloud) is noted when others remain, else it is the error.

`--tpus`, `--use-spot` and `--infra` are put in here, where the file's own words stand, so that a file written for GPUs
runs with `--tpus v6e-8`.
"""

import itertools

from podway.catalog.names import GKE_LABELS
from podway.catalog.slices import find_slice
from podway.errors import UserError
from podway.task import places
from podway.task.accelerators import SliceOptions, accelerator, check_cpu_machine
from podway.task.environment import Overrides
from podway.task.fields import Field, FlagField, Layers, NotHere
from podway.task.images import read_image
from podway.task.task import Accelerator, Autostop, Placement, Recovery, Resources, Volume
from podway.task.values import at_least, gigabytes, idle_minutes, ports
from podway.task.yamlfile import Mapping

_DEFAULT_IDLE_MINUTES = 5  # SkyPilot's, for `autostop: true`


def read_resources(section: Field | None, overrides: Overrides, notes: list[str]) -> tuple[tuple[Resources, ...], bool]:
    """(alternatives, whether their order counts)."""
    if section is None:
        section = Field("", Mapping(line=1, column=1, entries={}), "resources")
    layers, in_order = _alternatives(section)
    found: list[Resources] = []
    refused: list[NotHere] = []
    for layer in layers:
        names, listed = _accelerator_names(layer, overrides)
        in_order = in_order or listed
        for at, name in names:
            try:
                found += _resources(layer, at, name, overrides, notes)
            except NotHere as error:
                refused.append(error)
    if not found:
        raise refused[0]
    notes += [error.note for error in refused]
    return tuple(_unique(found)), in_order and len(found) > 1


def _alternatives(section: Field) -> tuple[list[Layers], bool]:
    any_of, ordered = section.get("any_of"), section.get("ordered")
    if any_of and ordered:
        raise ordered.error("any_of and ordered are given together", "keep one of them")
    several = any_of or ordered
    if several is None:
        return [Layers(section)], False
    if not several.items():
        raise several.error("the list of alternatives is empty", "list at least one, or remove the key")
    return [Layers(item, section) for item in several.items()], ordered is not None


def _accelerator_names(layer: Layers, overrides: Overrides) -> tuple[list[tuple[Field, str | None]], bool]:
    """The accelerators an alternative names, where each stands, and whether their order counts."""
    if overrides.tpus is not None:
        flag = FlagField("--tpus", overrides.tpus)
        if overrides.tpus.strip().lower() in ("none", "cpu"):
            return [(flag, None)], False
        words = [word.strip() for word in overrides.tpus.split(",")]
        return [(flag, word) for word in words], False
    field = _accelerators(layer)
    if field is None:
        return [(layer.inner, None)], False
    if field.is_mapping:
        named = [(value, _counted(name, value)) for name, value in field.entries().items()]
    elif field.is_list:
        named = [(item, item.words()) for item in field.items()]
    else:
        named = [(field, field.words())]
    if not named:
        raise field.error("no accelerator is named", "name a slice such as tpu-v6e-8, or remove the key")
    return [(at, text) for at, text in named], field.is_list


def _accelerators(layer: Layers) -> Field | None:
    """`gpus` is another name of `accelerators`."""
    field, alias = layer.get("accelerators"), layer.get("gpus")
    if field and alias:
        raise alias.error("accelerators is given too", "keep accelerators; gpus is another name of it")
    return field or alias


def _counted(name: str, count: Field) -> str:
    if count.is_null:
        return name
    number = count.number()
    if number != int(number) or number < 1:
        raise count.error(f"{number:g} of a TPU is not possible", "write 1: a slice is taken whole")
    return f"{name}:{int(number)}"


def _resources(layer: Layers, at: Field, name: str | None, overrides: Overrides, notes: list[str]) -> list[Resources]:
    slice_wanted = None if name is None else accelerator(at, name, _slice_options(layer, name, overrides, notes))
    _note_label(at, name, slice_wanted, notes)
    where = _placement(layer, overrides)
    spot = overrides.use_spot if overrides.use_spot is not None else _flag(layer, "use_spot", False)
    _check_tier(layer, slice_wanted, spot)
    cost, kind, opened, labels = (layer.get(key) for key in ("max_hourly_cost", "instance_type", "ports", "labels"))
    priority = layer.get("priority_class")
    return [
        Resources(
            accelerator=slice_wanted,
            placement=placement,
            spot="yes" if spot else "no",
            max_hourly_cost=cost.number() if cost else None,
            instance_type=_instance_type(kind, slice_wanted, overrides, notes) if kind else None,
            cpus=_host_size(layer, "cpus", "", slice_wanted, notes),
            memory=_host_size(layer, "memory", "g", slice_wanted, notes),
            disk_gb=_disk(layer),
            image=image,
            ports=ports(opened) if opened else (),
            labels={key: value.text() for key, value in labels.entries().items()} if labels else {},
            priority_class=priority.words() if priority else None,
        )
        for placement, image in _images(layer, where)
    ]


def _note_label(at: Field, name: str | None, wanted: Accelerator | None, notes: list[str]) -> None:
    """GKE has two labels for some machines, and the nodes of a slice carry the one of the catalog."""
    label = (name or "").partition(":")[0].strip().lower()
    if wanted is None or label not in GKE_LABELS:
        return
    used = find_slice(wanted.type, wanted.topology).gke_accelerator
    if used != label:
        _note(
            notes,
            f"{at.path}: read as {wanted.type}, whose nodes GKE labels {used}; nodes labelled {label} are not used",
        )


def _slice_options(layer: Layers, name: str, overrides: Overrides, notes: list[str]) -> SliceOptions:
    args = layer.get("accelerator_args")
    if args is None:
        return SliceOptions()
    version, topology, tpu_vm = (args.get(key) for key in ("runtime_version", "topology", "tpu_vm"))
    if overrides.tpus is not None and not _same_generation(layer, name):
        for dropped in filter(None, (version, topology, tpu_vm)):
            _note(notes, f"{dropped.path}: not used, since --tpus names another TPU than the file")
        version = topology = tpu_vm = None
    queued = args.get("gcp_queued_resource")
    tpu_name, reservation, best_effort = (args.get(key) for key in ("tpu_name", "reservation", "best_effort"))
    is_vm = tpu_vm.flag() if tpu_vm else True
    if tpu_name and is_vm:
        _note(notes, f"{tpu_name.path}: it names a TPU Node; a TPU VM is named after its cluster")
    return SliceOptions(
        topology=topology.words() if topology else None,
        runtime_version=version.words() if version else None,
        tpu_vm=is_vm,
        tpu_name=tpu_name.words() if tpu_name and not is_vm else None,
        queued=queued.flag() if queued else None,
        reservation=reservation.words() if reservation else None,
        best_effort=best_effort.flag() if best_effort else False,
    )


def _check_tier(layer: Layers, wanted: Accelerator | None, spot: bool) -> None:
    """Capacity is of one kind: on demand, spot, reserved or best effort."""
    tiers = {
        "use_spot": spot,
        "a reservation": bool(wanted and wanted.reservation),
        "best_effort": bool(wanted and wanted.best_effort),
    }
    asked = [tier for tier, is_asked in tiers.items() if is_asked]
    if len(asked) > 1:
        raise layer.inner.error(f"{' and '.join(asked)} are different kinds of capacity", "keep one of them")
    if wanted and wanted.best_effort and wanted.queued is False:
        raise layer.inner.error(
            "best-effort capacity comes as a queued resource only", "leave gcp_queued_resource: false out"
        )


def _same_generation(layer: Layers, name: str) -> bool:
    """Whether the slice a flag names is of the generation the file was written for."""
    own = _accelerators(layer)
    if own is None or own.is_mapping or own.is_list:
        return False
    try:
        return find_slice(own.text()).generation == find_slice(name).generation
    except UserError:
        return False


def _placement(layer: Layers, overrides: Overrides) -> Placement:
    if overrides.infra is not None:
        return places.from_infra(FlagField("--infra", overrides.infra))
    found = Placement()
    for field in reversed(layer.fields):
        found = places.over(found, _own_placement(field))
    return found


def _own_placement(field: Field) -> Placement:
    infra = field.get("infra")
    cloud, region, zone = field.get("cloud"), field.get("region"), field.get("zone")
    if infra:
        for other in filter(None, (cloud, region, zone)):
            raise other.error("infra is given too", "say it all in infra: cloud/region/zone")
        return places.from_infra(infra)
    where = places.provider(cloud, cloud.text()) if cloud else None
    return places.place(zone or field, where, region.words() if region else None, zone.words() if zone else None)


def _images(layer: Layers, where: Placement) -> list[tuple[Placement, str | None]]:
    """The placement and image of each region that the file has an image for."""
    field = layer.get("image_id")
    if field is None:
        return [(where, None)]
    if not field.is_mapping:
        return [(where, read_image(field, container=False))]
    by_region = {region: read_image(image, container=False) for region, image in field.entries().items()}
    if not by_region:
        raise field.error("no image is named", "name an image, or remove the key")
    if where.region is None:
        return [(places.over(where, Placement(region=region)), image) for region, image in by_region.items()]
    if where.region not in by_region:
        raise field.error(f"no image is given for the region {where.region}", f"add a line for {where.region}")
    return [(where, by_region[where.region])]


def _instance_type(field: Field, wanted: Accelerator | None, overrides: Overrides, notes: list[str]) -> str | None:
    kind = field.words()
    if wanted is None:
        check_cpu_machine(field, kind)
        return kind
    if overrides.tpus is not None and kind.upper() != "TPU-VM":
        _note(notes, f"{field.path}: {kind} is not used, since --tpus names the machines")
        return None
    if wanted and wanted.tpu_vm and kind.upper() != "TPU-VM" and not kind.startswith("ct"):
        raise field.error(
            f"{kind} is not the host of a TPU VM", "remove instance_type; for a legacy TPU Node set tpu_vm: false"
        )
    if wanted and not wanted.tpu_vm and not kind.startswith("n1-"):
        raise field.error(f"{kind} cannot host a TPU Node", "use an n1 machine, such as n1-highmem-8")
    return kind


def _host_size(layer: Layers, key: str, unit: str, wanted: Accelerator | None, notes: list[str]) -> str | None:
    field = layer.get(key)
    if field is None:
        return None
    if wanted and wanted.tpu_vm:
        _note(notes, f"{field.path}: the hosts of a TPU slice come in one size")
    return at_least(field, unit)


def _disk(layer: Layers) -> int | None:
    size, old = layer.get("disk_size"), layer.get("ephemeral_storage")
    if size and old:
        raise old.error("disk_size is given too", "keep disk_size; ephemeral_storage is its old name")
    field = size or old
    return gigabytes(field) if field else None


def _flag(layer: Layers, key: str, default: bool) -> bool:
    field = layer.get(key)
    return field.flag() if field else default


def _note(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)


def _unique(found: list[Resources]) -> list[Resources]:
    return [one for i, one in enumerate(found) if one not in found[:i]]


def first(section: Field | None, *keys: str) -> Field | None:
    """The first value of some keys, in the section or in its alternatives: for what concerns the task as a whole."""
    if section is None:
        return None
    layers, _ = _alternatives(section)
    found = (layer.get(key) for layer, key in itertools.product(layers, keys))
    return next((field for field in found if field is not None), None)


def read_autostop(field: Field | None) -> Autostop | None:
    if field is None:
        return None
    if field.is_mapping:
        idle, down, wait_for = field.get("idle_minutes"), field.get("down"), field.get("wait_for")
        waits = wait_for.text().lower() if wait_for else "jobs_and_ssh"
        return Autostop(
            idle_minutes=float(idle.integer()) if idle else _DEFAULT_IDLE_MINUTES,
            down=down.flag() if down else False,
            wait_for="jobs" if waits == "jobs" else "none" if waits == "none" else "jobs_and_ssh",
        )
    if field.is_flag:
        return Autostop(idle_minutes=_DEFAULT_IDLE_MINUTES) if field.flag() else None
    return Autostop(idle_minutes=idle_minutes(field))


def read_recovery(field: Field | None) -> Recovery | None:
    if field is None:
        return None
    strategy = field.get("strategy") if field.is_mapping else field
    word = strategy.text().lower() if strategy else "eager_next_region"
    if word == "none":
        return None
    restarts, codes = field.get("max_restarts_on_errors"), field.get("recover_on_exit_codes")
    limit = restarts.integer() if restarts else 0
    return Recovery(
        events=("no-capacity", "interruption", "error") if limit else ("no-capacity", "interruption"),
        strategy="failover" if word == "failover" else "next-region",
        max_restarts_on_errors=limit,
        exit_codes=tuple(one.integer() for one in (codes.items() if codes.is_list else [codes])) if codes else (),
    )


def read_disks(field: Field | None) -> tuple[Volume, ...]:
    """`resources.volumes`: existing network disks, or a directory of the host's own disk."""
    found = []
    for one in field.items() if field else []:
        path, name, kind = one.get("path"), one.get("name"), one.get("storage_type")
        assert path is not None  # the shape requires it
        size, mode = one.get("disk_size"), one.get("attach_mode")
        of_host = kind is not None and kind.text().lower() == "instance"
        if name is None and not of_host:
            raise one.error("a network disk needs a name", "name an existing disk, or set storage_type: instance")
        found.append(
            Volume(
                path=path.words(),
                name=name.words() if name and not of_host else None,
                instance_path=path.words() if of_host else None,
                size_gb=gigabytes(size) if size else None,
                read_only=mode is not None and mode.text().lower() == "read_only",
            )
        )
    return tuple(found)
