"""A task as understood, for a person to read before paying: slices with their facts, scripts, variables, notes.

Secrets are never shown, nor the values of variables whose names say that they are one.
"""

import re
import time

import msgspec

from podway.catalog.slices import Slice, find_slice
from podway.quantities import format_duration
from podway.task.task import (
    Bucket,
    FileMount,
    Git,
    LocalDir,
    Placement,
    Probe,
    ReplicaGroup,
    Resources,
    Scaling,
    ServiceSpec,
    Task,
    Url,
    Volume,
    job_secrets,
)
from podway.task.volumes import VolumeSpec

_MASK = "*****"
_HIDDEN_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|KEY|APIKEY)($|_)", re.I)
_WIDTH = 14
_MOST_ALTERNATIVES = 6


def explain(task: Task) -> str:
    """The task as a block of `label  value` lines."""
    rows = [("Name", task.name or "-"), ("Kind", f"{task.kind} (a {_DIALECTS[task.dialect]} file)")]
    grouped = task.service is not None and bool(task.service.groups)
    rows += [] if grouped else _resource_rows(task)
    rows += _file_rows(task) + _policy_rows(task)
    if task.service:
        rows += _service_rows(task.service)
    if task.dev:
        rows.append(("IDE", " ".join(filter(None, (task.dev.ide, task.dev.version))) or "ssh only"))
        idle = task.dev.inactivity_s
        when = "never" if idle is None else f"{format_duration(idle)} after the last connection and job"
        rows.append(("Ends", when))
    rows += [("Starts", f"{one} (UTC)") for one in task.schedule]
    rows += [("Environment", f"{name}={_shown(name, value)}") for name, value in task.env.items()]
    rows += [("Secret", f"{name}={_MASK}") for name in job_secrets(task)]
    if task.python and not grouped:
        rows.append(("Python", task.python))
    rows += [("Setup", line) for line in task.setup.rstrip().splitlines()]
    if not grouped:
        rows += [("Run", line) for line in task.run.rstrip().splitlines()] or [("Run", "-")]
    rows += [("Note", note) for note in task.notes]
    return "".join(_lines(rows))


_DIALECTS = {"skypilot": "SkyPilot", "dstack": "dstack"}


def _lines(rows: list[tuple[str, str]]) -> list[str]:
    """A label is printed once for the rows that follow each other under it."""
    out, last = [], ""
    for label, value in rows:
        out.append(f"{'' if label == last else label:<{_WIDTH}}{value}".rstrip() + "\n")
        last = label
    return out


def _shown(name: str, value: str) -> str:
    return _MASK if _HIDDEN_NAME.search(name) else value.replace("\n", "\\n")


def _resource_rows(task: Task) -> list[tuple[str, str]]:
    shown = task.resources[:_MOST_ALTERNATIVES]
    rows = [("Slice", _resource_text(one, task.slices)) for one in shown]
    if len(task.resources) > len(shown):
        rows.append(("Slice", f"or one of {len(task.resources) - len(shown)} more"))
    if len(task.resources) > 1:
        rows.append(("Choice", "in this order" if task.ordered else "the cheapest first"))
    first = task.resources[0]
    details = [
        ("Where", _place(first.placement) if len({one.placement for one in task.resources}) == 1 else "see above"),
        ("Spot", {"no": "no", "yes": "yes", "auto": "spot first, then on demand"}[first.spot]),
        ("At most", f"${first.max_hourly_cost:g}/h" if first.max_hourly_cost else ""),
        ("Host", first.instance_type or ""),
        ("CPUs", first.cpus or ""),
        ("Memory", f"{first.memory} GB" if first.memory else ""),
        ("Disk", f"{first.disk_gb} GB" if first.disk_gb else ""),
        ("Image", first.image or ""),
        ("Network", first.network or ""),
        ("Priority class", first.priority_class or ""),
        ("Open ports", ", ".join(first.ports)),
        ("Forwarded", ", ".join(task.ports)),
        ("Labels", ", ".join(f"{key}={value}" for key, value in (first.labels | task.tags).items())),
    ]
    return rows + [(label, value) for label, value in details if value]


def _resource_text(one: Resources, slices: int) -> str:
    where = "" if one.placement == Placement() else f" in {_place(one.placement)}"
    wanted = one.accelerator
    if wanted is None:
        return f"no TPU: {_count(slices, 'CPU host')}{where}"
    found = find_slice(wanted.type, wanted.topology)
    extra = [
        f"runtime {wanted.runtime_version or found.generation_facts.default_runtime}",
        "" if wanted.tpu_vm else f"a TPU Node {wanted.tpu_name or ''}".strip(),
        "as a queued resource" if wanted.queued else "",
        f"reservation {wanted.reservation}" if wanted.reservation else "",
        "best effort" if wanted.best_effort else "",
    ]
    times = f"{slices} x " if slices > 1 else ""
    return f"{times}{found.accelerator_type}: {_facts(found)}; {', '.join(filter(None, extra))}{where}"


def _facts(found: Slice) -> str:
    return (
        f"{_count(found.chips, 'chip')} ({found.topology_text}) on {_count(found.hosts, 'host')}, "
        f"{found.hbm_bytes / 2**30:g} GiB HBM, {found.peak_bf16 / 1e12:,.0f} TFLOP/s bf16"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _place(where: Placement) -> str:
    return "/".join(filter(None, (where.provider, where.region, where.zone))) or "anywhere"


def _file_rows(task: Task) -> list[tuple[str, str]]:
    rows = [("Workdir", _source(task.workdir))] if task.workdir else []
    if task.first_hosts is not None:
        rows.append(("Hosts", f"the first {_count(task.first_hosts, 'host')} of the cluster"))
    if task.working_dir:
        rows.append(("Runs in", task.working_dir))
    rows += [("Mount", _mount(mount)) for mount in task.file_mounts]
    return rows + [("Volume", _volume(volume)) for volume in task.volumes]


def _mount(mount: FileMount) -> str:
    return f"{mount.target} <- {_source(mount.source)}"


def _source(source: LocalDir | Git | Bucket | Url) -> str:
    match source:
        case LocalDir(path=path):
            return path
        case Git(url=url, ref=ref, hash=commit):
            return " at ".join(filter(None, (url, commit or ref)))
        case Url(url=url):
            return url
        case Bucket():
            extra = [source.mode, "created if absent" if source.create else "", "read-only" if source.read_only else ""]
            extra += [f"filled from {path}" for path in source.upload] + [
                "" if source.persistent else "deleted at the end"
            ]
            return f"{source.uri} ({', '.join(filter(None, extra))})"


def explain_volume(spec: VolumeSpec) -> str:
    """A volume in words."""
    place = "/".join(filter(None, msgspec.structs.astuple(spec.placement)))
    rows = [("Volume", spec.name), ("Where", place), ("Size", f"{spec.size_gb} GB" if spec.size_gb else "-")]
    rows += [("Registers", spec.disk_id)] if spec.disk_id else []
    return "\n".join([*(f"{title:<12} {value}" for title, value in rows), *(f"Note: {note}" for note in spec.notes)])


def _volume(volume: Volume) -> str:
    source = volume.name or volume.instance_path or "a new disk"
    size = f" of {volume.size_gb} GB" if volume.size_gb else ""
    return f"{volume.path} <- {source}{size}{' (read-only)' if volume.read_only else ''}"


def _policy_rows(task: Task) -> list[tuple[str, str]]:
    rows = []
    if task.autostop:
        what = "taken down" if task.autostop.down else "stopped"
        idle = f"{what} after {task.autostop.idle_minutes:g} idle minutes"
        rows.append(("Autostop", idle if task.service is None else "none: a service ends when it is told to"))
    if task.recovery:
        limit = f", for {task.recovery.duration_s} s" if task.recovery.duration_s else ""
        rows.append(("Recovery", f"on {', '.join(task.recovery.events)}: {task.recovery.strategy}{limit}"))
    if task.max_duration_s is not None:
        rows.append(("At longest", f"{task.max_duration_s} s"))
    if task.reuse_only:
        rows.append(("Cluster", "an existing one only"))
    return rows


def _service_rows(service: ServiceSpec) -> list[tuple[str, str]]:
    rows = [("Port", str(service.port))]
    if service.groups:
        for one in service.groups:
            rows += _group_rows(one)
    else:
        rows.append(("Replicas", _scaling_text(service.scaling)))
    if service.model:
        rows.append(("Model", f"{service.model.name} ({service.model.format})"))
    if service.tls:
        until = time.strftime("%Y-%m-%d", time.gmtime(service.tls.expires))
        rows.append(("Certificate", f"for {', '.join(service.tls.names) or 'no name'}, until {until}; HTTPS only"))
    probes: list[Probe] = []
    for part in service.groups or (service,):
        probes += [probe for probe in part.probes if probe not in probes]
    return rows + [("Probe", f"{probe.method} {probe.path} within {probe.timeout_s:g} s") for probe in probes]


def _group_rows(group: ReplicaGroup) -> list[tuple[str, str]]:
    """A group of replicas; what it runs stands below it."""
    role = f", {group.worker.role}" if group.worker.role != "regular" else ""
    what = f", router ({group.router})" if group.router else role
    rows = [("Group", f"{group.name}: {_scaling_text(group.scaling)}{what}")]
    rows += [("  on", _resource_text(one, 1)) for one in group.resources[:_MOST_ALTERNATIVES]]
    images = dict.fromkeys(one.image for one in group.resources if one.image)
    rows += [("  image", image) for image in images]
    rows += [("  python", group.python)] if group.python else []
    return rows + [("  run", line) for line in group.run.rstrip().splitlines()]


def _scaling_text(scaling: Scaling) -> str:
    fixed = scaling.min_replicas == scaling.max_replicas
    replicas = f"{scaling.min_replicas}" if fixed else f"{scaling.min_replicas} to {scaling.max_replicas}"
    targets = [f"{scaling.target_qps:g} requests/s each"] if scaling.target_qps else []
    if scaling.target:
        unit = "requests at once each" if scaling.metric == "concurrency" else f"s of {scaling.metric}"
        targets.append(f"{scaling.target:g} {unit}")
    targets += [f"{target:g} requests/s on {name}" for name, target in scaling.target_qps_by_type.items()]
    return ", ".join([replicas, *targets])
