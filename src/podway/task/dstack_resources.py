"""What a dstack run runs on: `resources` and the profile's places, prices and policies."""

from collections.abc import Iterable
from typing import Literal

from podway.catalog.slices import is_tpu_name
from podway.task import places
from podway.task.accelerators import SliceOptions, accelerator, check_cpu_machine
from podway.task.environment import Overrides
from podway.task.fields import Field, FlagField, Layers, NotHere
from podway.task.gpu import slices_for
from podway.task.images import read_image
from podway.task.task import Accelerator, Autostop, Placement, Recovery, Resources
from podway.task.values import Range, count_range, duration, duration_or_off, memory_range

# dstack's defaults (facts of its profile parameters).
_RETRY_S = 3600
_IDLE_S = 300
_STOP_S = 300
_LONGEST_STOP_S = 86_400  # for `stop_duration: off`
_SPOT: dict[str, Literal["no", "yes", "auto"]] = {"spot": "yes", "on-demand": "no", "auto": "auto"}
_EVENTS: tuple[Literal["no-capacity", "interruption", "error"], ...] = ("no-capacity", "interruption", "error")
_UNLIMITED_RESTARTS = 1000  # dstack limits retries by time only


def read_resources(run: Layers, overrides: Overrides, notes: list[str]) -> tuple[Resources, ...]:
    """The alternatives: each slice in each place."""
    section = run.get("resources")
    gpu = section.get("gpu") if section else None
    if overrides.tpus is not None:
        none = overrides.tpus.strip().lower() in ("none", "cpu")
        gpu = None if none else FlagField("--tpus", overrides.tpus)
    slices = _accelerators(gpu, run, notes)
    cpus, memory, disk = _host(section, slices, notes)
    price, image, tags = run.get("max_price"), run.get("image"), run.get("tags")
    return tuple(
        Resources(
            accelerator=one,
            placement=where,
            spot=_spot(run, overrides),
            max_hourly_cost=price.number() if price else None,
            instance_type=machine,
            cpus=cpus,
            memory=memory,
            disk_gb=disk,
            image=read_image(image, container=True) if image else None,
            labels={key: value.text() for key, value in tags.entries().items()} if tags else {},
        )
        for one in slices
        for machine in _machines(run, one, notes)
        for where in _places(run, overrides, notes)
    )


def _accelerators(field: Field | None, run: Layers, notes: list[str]) -> list[Accelerator | None]:
    reservation = run.get("reservation")
    options = SliceOptions(reservation=reservation.words() if reservation else None)
    names = slices_for(field, notes) if field else None
    kinds = run.get("instance_types")
    listed = [kind for kind in kinds.items() if is_tpu_name(kind.text())] if kinds else []
    if names is None and field is None and listed:
        return [accelerator(kind, kind.words(), options) for kind in listed]
    if field is None or names is None:
        return [None]
    found = [accelerator(field, name, options) for name in names]
    allowed = {accelerator(kind, kind.words()).type for kind in listed}
    kept = [one for one in found if one.type in allowed] if listed else found
    if kinds and not kept:
        raise kinds.error("none of these types is the slice that gpu asks for", "make gpu and instance_types agree")
    return list(kept)


def _machines(run: Layers, wanted: Accelerator | None, notes: list[str]) -> list[str | None]:
    """Machine types of a run without TPUs; a slice has the machines it has."""
    kinds = run.get("instance_types")
    others = [kind for kind in kinds.items() if not is_tpu_name(kind.text())] if kinds else []
    if wanted is None and others:
        for kind in others:
            check_cpu_machine(kind, kind.words())
        return [kind.words() for kind in others]
    for kind in others:
        _note(notes, f"{kind.path}: {kind.text()} is not a TPU slice")
    return [None]


def _places(run: Layers, overrides: Overrides, notes: list[str]) -> list[Placement]:
    if overrides.infra is not None:
        return [places.from_infra(FlagField("--infra", overrides.infra))]
    backends, regions, zones = run.get("backends"), run.get("regions"), run.get("availability_zones")
    providers = _providers(backends.items(), notes) if backends else [None]
    in_regions = [region.words() for region in regions.items()] if regions else []
    spots: list[Placement] = []
    for zone in zones.items() if zones else ():
        spots.append(places.place(zone, None, None, zone.words()))
        if in_regions and spots[-1].region not in (None, *in_regions):
            raise zone.error(f"{zone.text()} is not in a region that `regions` lists", "make the two agree")
    if not spots:
        spots = [Placement(region=region) for region in in_regions] or [Placement()]
    found = [Placement(provider=who, region=at.region, zone=at.zone) for who in providers for at in spots]
    return list(dict.fromkeys(found))


def _providers(backends: Iterable[Field], notes: list[str]) -> list[str | None]:
    found: list[str | None] = []
    refused: list[NotHere] = []
    for backend in backends:
        try:
            found.append(places.provider(backend, "ssh" if backend.text() == "remote" else backend.text()))
        except NotHere as error:
            refused.append(error)
    if refused and not found:
        raise refused[0]
    for other in refused:
        _note(notes, other.note)
    return found or [None]


def _host(
    section: Field | None, slices: list[Accelerator | None], notes: list[str]
) -> tuple[str | None, str | None, int | None]:
    """(cpus, memory, disk in GB) as SkyPilot writes them: `2+` for `2..`."""
    cpu, memory, disk = (section.get(key) if section else None for key in ("cpu", "memory", "disk"))
    for field in (cpu, memory):
        if field and any(slices):
            notes.append(f"{field.path}: the hosts of a TPU slice come in one size")
    size = disk.get("size") or disk if disk and disk.is_mapping else disk
    wanted = memory_range(size) if size else None
    return (
        _at_least(_cpus(cpu)) if cpu else None,
        _at_least(memory_range(memory)) if memory else None,
        None if wanted is None else max(1, int(wanted.low if wanted.low is not None else wanted.high or 1)),
    )


def _cpus(field: Field) -> Range:
    arch, count = (field.get("arch"), field.get("count")) if field.is_mapping else (None, None)
    text = "" if field.is_mapping else field.text().replace(" ", "")
    kind, colon, rest = text.rpartition(":")
    word = arch.text().lower() if arch else kind.lower() if colon else "x86"
    if word != "x86":
        raise field.error(f"TPU hosts have x86 CPUs, not `{word}`", "remove the kind of CPU")
    if colon and not rest:
        raise field.error("the number of CPUs is missing", "write x86:4 or 4..")
    if colon:
        return count_range(field.part(rest))
    return count_range(count or field)


def _at_least(wanted: Range) -> str:
    return f"{wanted.low:g}+" if wanted.high is None else str(wanted)


def _spot(run: Layers, overrides: Overrides) -> Literal["no", "yes", "auto"]:
    if overrides.use_spot is not None:
        return "yes" if overrides.use_spot else "no"
    policy = run.get("spot_policy")
    return _SPOT[policy.text().lower()] if policy else "no"


def read_retry(run: Layers) -> Recovery | None:
    field = run.get("retry")
    if field is None or (field.is_flag and not field.flag()):
        return None
    events, limit = field.get("on_events"), field.get("duration")
    if events and not events.items():
        raise events.error("no event is listed", "list when to try again, or write `retry: true`")
    words = {event.text().lower() for event in events.items()} if events else set(_EVENTS)
    return Recovery(
        events=tuple(event for event in _EVENTS if event in words),
        max_restarts_on_errors=_UNLIMITED_RESTARTS if "error" in words else 0,
        duration_s=duration(limit) if limit else _RETRY_S,
    )


def read_idle(run: Layers) -> Autostop | None:
    """dstack takes an idle instance down after 5 minutes, unless told otherwise."""
    field, old, policy = run.get("idle_duration"), run.get("termination_idle_time"), run.get("termination_policy")
    if field is None and policy and policy.text().lower() == "dont-destroy":
        return None
    used = field or old
    seconds = duration_or_off(used, _IDLE_S) if used else _IDLE_S
    return None if seconds is None else Autostop(idle_minutes=seconds / 60, down=True, wait_for="jobs")


def read_stop_duration(run: Layers, notes: list[str]) -> int:
    field = run.get("stop_duration")
    seconds = duration_or_off(field, _STOP_S) if field else _STOP_S
    if seconds is None and field:
        notes.append(f"{field.path}: Podway waits a day at the longest")
    return _LONGEST_STOP_S if seconds is None else seconds


def _note(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)
