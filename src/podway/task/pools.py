"""Pools: workers that are alike, kept up for jobs to take, and the files that describe them.

A SkyPilot file with a `pool` section describes the workers: what they run on, and the setup that each runs once. A dstack file of
`type: fleet` is a pool too: each of its nodes is a worker; with `placement: cluster` all of them are one worker of several slices. A
fleet of machines reached over ssh (`ssh_config`) is no pool of workers, but a list of machines: see `task/ssh_fleets.py`.
"""

import msgspec

from podway.task.dstack_resources import read_resources
from podway.task.environment import Overrides
from podway.task.fields import Field, Layers
from podway.task.fleet_keys import FLEET
from podway.task.problems import Problems
from podway.task.shapes import Anything, Key, Table, Whole, check
from podway.task.task import Task, TaskPart
from podway.task.values import count_range, dstack_name, duration_or_off
from podway.task.yamlfile import Mapping

MOST_WORKERS = 1000
_FLEET_IDLE_S = 3 * 24 * 3600  # dstack's own
_POOL_IDLE_S = 300


class PoolSize(TaskPart, frozen=True):
    """How many workers a pool has."""

    workers: int  # always kept
    max_workers: int  # made while jobs wait for one
    first_workers: int | None = None  # made at once; None: as many as are kept
    idle_s: float | None = None  # workers above `workers` go when idle this long; None: never


class PoolSpec(TaskPart, frozen=True):
    """A pool to make or change: `task` is what each worker runs on and the setup it runs once."""

    name: str | None
    task: Task
    size: PoolSize


_WORKERS = Whole(minimum=0, maximum=MOST_WORKERS)
POOL = Table(
    keys={
        "workers": Key(shape=_WORKERS, about="How many workers are kept."),
        "min_workers": Key(shape=_WORKERS, about="How many are kept, with max_workers."),
        "max_workers": Key(shape=_WORKERS, about="How many there may be while jobs wait."),
        "downscale_delay_seconds": Key(
            shape=Whole(minimum=0), about="How long a worker above min_workers may be idle."
        ),
        **{
            name: Key(
                shape=Anything(), about="Of SkyPilot's autoscaler.", note="a worker is added for each job that waits"
            )
            for name in ("queue_length_threshold", "upscale_delay_seconds")
        },
    }
)


def read_sky_pool(section: Field) -> PoolSize:
    """The size that the `pool` section of a SkyPilot file gives; its notes are none that change what happens."""
    problems = Problems()
    check(section, POOL, [], problems)
    problems.raise_any()
    fixed, least, most = (section.get(key) for key in ("workers", "min_workers", "max_workers"))
    if fixed and (least or most):
        raise fixed.error("min_workers or max_workers is given too", "keep workers, or the two others")
    if fixed is None and least is None:
        raise section.error("nothing says how many workers are kept", "add `workers: 2`")
    kept = (fixed or least or section).integer()
    highest = most.integer() if most else kept
    if most and highest < kept:
        raise most.error(f"max_workers {highest} is below min_workers {kept}", "raise the one or lower the other")
    delay = section.get("downscale_delay_seconds")
    return PoolSize(workers=kept, max_workers=highest, idle_s=delay.number() if delay else _POOL_IDLE_S)


def sky_worker(task: Task, section: Field) -> Task:
    """The task of a worker: it sets up, and runs nothing."""
    if task.run.strip() or task.service is not None:
        raise section.error(
            "a pool's workers run nothing by themselves", "remove `run`; give it to the jobs: podway launch --pool NAME"
        )
    notes = task.notes
    if task.autostop is not None:
        notes = (*notes, "autostop: the workers of a pool are kept; podway pool down ends them")
    return msgspec.structs.replace(task, autostop=None, notes=notes)


def without_key(root: Field, key: str) -> Field:
    """The same mapping without one of its keys."""
    assert isinstance(root.node, Mapping)
    entries = {name: one for name, one in root.node.entries.items() if name != key}
    return Field(root.file, msgspec.structs.replace(root.node, entries=entries), root.path)


def read_fleet(root: Field, overrides: Overrides) -> PoolSpec:
    """A dstack fleet of cloud machines."""
    notes: list[str] = []
    problems = Problems()
    check(root, FLEET, notes, problems)
    problems.raise_any()
    run = Layers(root)
    name, together = root.get("name"), root.get("placement")
    size = _fleet_size(root, notes)
    slices = 1
    if together and together.text().lower() == "cluster" and size.max_workers > 1:
        slices = size.first_workers or size.workers or size.max_workers
        if size.workers != size.max_workers:
            notes.append(f"{together.path}: one worker of {slices} slices, which are there together or not at all")
        size = msgspec.structs.replace(size, workers=min(size.workers, 1), max_workers=1, first_workers=1)
    task = Task(dialect="dstack", resources=read_resources(run, overrides, notes), slices=slices)
    called = overrides.name or (dstack_name(name) if name else None)
    return PoolSpec(name=called, task=msgspec.structs.replace(task, name=called, notes=tuple(notes)), size=size)


def _fleet_size(root: Field, notes: list[str]) -> PoolSize:
    nodes, idle = root.get("nodes"), root.get("idle_duration") or root.get("termination_idle_time")
    target = None
    if nodes is None:
        raise root.error("nothing says how many nodes it has", "add `nodes: 2` (or `nodes: 0..2`), or an `ssh_config`")
    if nodes.is_mapping:
        low, aim, high = (nodes.get(key) for key in ("min", "target", "max"))
        least = low.integer() if low else 0
        target = aim.integer() if aim else None
        most = high.integer() if high else max(least, target or 0, 1)
    else:
        wanted = count_range(nodes)
        least = int(wanted.low or 0)
        most = int(wanted.high) if wanted.high is not None else MOST_WORKERS
    if not least <= (least if target is None else target) <= most <= MOST_WORKERS or most == 0:
        raise nodes.error(
            f"from {least} to {most} nodes is not possible", f"write at most {MOST_WORKERS}, with min <= target <= max"
        )
    seconds = duration_or_off(idle, _FLEET_IDLE_S) if idle else _FLEET_IDLE_S
    if idle and least == most:
        notes.append(f"{idle.path}: {least} nodes are always kept; write `nodes: 0..{least}` to end them when idle")
    return PoolSize(workers=least, max_workers=most, first_workers=target, idle_s=seconds)
