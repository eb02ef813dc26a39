"""`podway tune`: from the planner's ranking to a measurement on the slice itself.

1. Plan: the best plans for the slice, and what `--try` adds, are the candidates.
2. Rehearse: each goes through the TPU compiler, where that is installed; one that does not fit is left out.
3. Measure: one job on the slice runs a few steps of each, one after the other (`train/candidates.py`).
4. A table shows what was predicted, rehearsed and measured; the fastest is written as settings for `podway train`.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import msgspec

from podway.catalog.slices import Slice
from podway.cli.plan_options import model_argument, plan_options_of, seq_option, step_options
from podway.cli.rehearse import ask, outcome_of
from podway.cli.screen import Screen
from podway.cli.tables import table
from podway.errors import UserError
from podway.extras import installed, load
from podway.files import write_atomically
from podway.model.families import find_model
from podway.model.shape import ModelShape
from podway.plan.picking import one_slice
from podway.plan.plans import TrainPlan
from podway.plan.search import plan_train
from podway.quantities import format_number, format_seconds
from podway.rehearse.rehearsal import rehearse_training, training_settings
from podway.server.client import Client
from podway.task.task import Autostop
from podway.train.candidates import Measurement, read_line

_SETUP = "command -v podway >/dev/null || pip install 'podway[train,tpu]'"
_RUN = """printf '%s' "$PODWAY_CANDIDATES" > candidates.json
podway train --candidates candidates.json --candidate-limit "$PODWAY_CANDIDATE_LIMIT"
"""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the step, and what is known of it so far."""

    settings: tuple[str, ...]
    predicted: float | None = None  # seconds of a step, by the planner
    rehearsed: float | None = None  # by the compiler
    unfit: str | None = None  # why it is not run
    measured: Measurement | None = None

    @property
    def seconds(self) -> float | None:
        return self.measured.seconds if self.measured else None


@click.command(name="tune")
@model_argument
@seq_option
@click.option("--tpu", "--tpus", "tpu", required=True, help="The slice: v6e-16.")
@step_options
@click.option(
    "--top", type=click.IntRange(min=1), metavar="N", default=4, show_default=True, help="How many plans to measure."
)
@click.option("--steps", type=click.IntRange(min=3), metavar="N", default=10, show_default=True, help="Steps of each.")
@click.option(
    "--try", "more", multiple=True, metavar="SETTINGS",
    help="Another candidate: settings of `podway train` that go over the best plan.",
)  # fmt: skip
@click.option("--rehearse/--no-rehearse", default=True, help="Compile each for the slice first.")
@click.option(
    "--limit",
    type=click.IntRange(min=10),
    metavar="SECONDS",
    default=1800,
    show_default=True,
    help="Seconds for each candidate.",
)
@click.option("-c", "--cluster", help="A cluster that is up, which stays; by default one is created and deleted.")
@click.option("--infra", help="Where the slice is created, as for `podway launch`.")
@click.option("-w", "--write", default="tuned.yaml", show_default=True, help="Where the fastest settings are written.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before launching.")
def command(model: str, tpu: str, **asked: Any) -> None:
    """Measure the best plans on the slice itself.

    \b
    podway tune llama3.1-8b --tpu v6e-16 --seq 8192
    podway tune llama3.1-8b --tpu v6e-16 --try 'loss.chunks=8'
    podway train tuned.yaml data.paths='[~/text/*.jsonl]'
    """
    shape, slice = find_model(model), one_slice(tpu)
    plans = plan_train(shape, plan_options_of(slice.devices, asked), [slice]).plans[: asked["top"]]
    candidates = _candidates(model, plans, asked["more"], asked["steps"])
    if asked["rehearse"] and installed("rehearse"):
        candidates = _rehearsed(model, shape, slice, plans, candidates)
    runnable = [one for one in candidates if one.unfit is None]
    if not runnable:
        click.echo(_table(candidates, slice, asked))
        raise UserError("no candidate fits", "use a larger slice, or another --mesh, --batch or --remat")
    measured = iter(_measure([one.settings for one in runnable], slice, asked))
    candidates = [one if one.unfit else msgspec.structs.replace(one, measured=next(measured)) for one in candidates]
    click.echo(_table(candidates, slice, asked))
    done = [one for one in candidates if one.seconds is not None]
    if not done:
        raise UserError("no candidate ran to its end", "see the reasons above; the job's log has more")
    best = min(done, key=lambda one: one.seconds or 0)
    settings = [word for word in best.settings if not word.startswith("schedule.")]
    write_atomically(Path(asked["write"]), _settings().config_yaml(_settings().read_config(None, settings)))
    click.echo(f"\nfastest: candidate {candidates.index(best) + 1}, written to {asked['write']}")
    click.echo(f"  podway train {asked['write']} data.paths='[…]' schedule.steps=1000")


def _candidates(model: str, plans: Sequence[TrainPlan], more: Sequence[str], steps: int) -> list[Candidate]:
    always = (f"model.name={model}", f"schedule.steps={steps}", "schedule.kind=constant")
    found = [
        Candidate(settings=(*always, *training_settings(plan.mesh, plan.training)), predicted=plan.time.total)
        for plan in plans
    ]
    found += [Candidate(settings=(*found[0].settings, *shlex.split(words))) for words in more]
    for one in found:
        _settings().read_config(None, one.settings)  # a mistake is reported before anything is launched
    return found


def _rehearsed(
    model: str, shape: ModelShape, slice: Slice, plans: Sequence[TrainPlan], candidates: Sequence[Candidate]
) -> list[Candidate]:
    """What the compiler says of each plan; settings that were added by hand are left to the measurement."""
    wanted = [rehearse_training(model, slice, plan.mesh, plan.training, fast=True) for plan in plans]
    with Screen(err=True) as screen:
        reports = ask(wanted, screen, jobs=None, fresh=False)
    found = []
    for one, rehearsal, report, plan in zip(candidates, wanted, reports, plans, strict=False):
        outcome = outcome_of(rehearsal, report, shape, slice, plan.mesh, plan.training)
        memory = report.memory
        unfit = "does not compile" if memory is None else None if memory.fits else "does not fit (rehearsed)"
        seconds = outcome.estimate.point if outcome.estimate else None
        found.append(msgspec.structs.replace(one, rehearsed=seconds, unfit=unfit))
    return [*found, *candidates[len(plans) :]]


def _measure(settings: Sequence[Sequence[str]], slice: Slice, asked: dict[str, Any]) -> list[Measurement]:
    """One job that runs all of them; what it measured, in their order."""
    task = {
        "name": "tune",
        "run": _RUN,
        "setup": _SETUP,
        "resources": {"accelerators": f"tpu-{slice.accelerator_type}"},
    }
    env = {
        "PODWAY_CANDIDATES": msgspec.json.encode(settings).decode(),
        "PODWAY_CANDIDATE_LIMIT": str(asked["limit"]),
    }
    with Client() as client, Screen(err=True) as screen:
        if asked["cluster"]:
            launched = client.exec(asked["cluster"], task, env=env)
        else:
            idle = Autostop(idle_minutes=5, down=True)  # should this process die
            request = client.request(task, env=env, infra=asked["infra"], autostop=idle)
            offer = next((one for one in client.preview(request).offers if one.chosen), None)
            if not asked["yes"] and offer is not None:
                cost = f"${offer.hourly_cost:.2f} an hour" if offer.hourly_cost else "nothing (simulated)"
                click.confirm(
                    f"{len(settings)} candidates on {offer.accelerator_type}, which costs {cost}: go on?", abort=True
                )
            launched = client.submit(request)
        assert launched.job is not None  # the task has a run
        try:
            return _follow(client, launched.cluster, launched.job, len(settings), screen)
        finally:
            if not asked["cluster"]:
                client.down(launched.cluster)


def _follow(client: Client, cluster: str, job: int, count: int, screen: Screen) -> list[Measurement]:
    found: dict[int, Measurement] = {}
    screen.wait(f"{cluster}: candidate 1 of {count}")
    for line in client.logs(cluster, job, raw=True):
        one = read_line(line)
        if one is None or not 0 <= one.candidate < count:
            continue
        before = found.get(one.candidate)
        # Several ranks may tell of one failure: that it ran out of memory says more than that another rank was lost.
        if before is None or (one.failed is not None and before.failed in (None, "another rank failed")):
            found[one.candidate] = one
        result = one.failed or format_seconds(one.seconds or 0)
        if before is None:
            screen.line(f"candidate {one.candidate + 1} of {count}: {result}")
            screen.wait(f"{cluster}: candidate {min(one.candidate + 2, count)} of {count}")
    ended = client.wait(cluster, job)
    missing = f"the job ended before it ({ended.state})"
    return [found.get(number) or Measurement(candidate=number, failed=missing) for number in range(count)]


def _table(candidates: Sequence[Candidate], slice: Slice, asked: dict[str, Any]) -> str:
    fastest = min((one.seconds for one in candidates if one.seconds is not None), default=None)
    rows = []
    for number, one in enumerate(candidates, 1):
        config = _settings().read_config(None, one.settings)
        tokens = config.batch.global_size(slice.devices) * config.batch.length
        times = [
            None if value is None else format_seconds(value) for value in (one.predicted, one.rehearsed, one.seconds)
        ]
        rate = format_number(tokens / one.seconds) if one.seconds else None
        note = (
            one.unfit
            or (one.measured.failed if one.measured else None)
            or ("fastest" if one.seconds == fastest else "")
        )
        rows.append(
            (
                number,
                config.mesh.shape,
                config.batch.sequences,
                config.batch.microbatches,
                config.remat.policy,
                *times,
                rate,
                note,
            )
        )
    headers = ("#", "MESH", "BATCH", "MB", "REMAT", "PREDICTED", "REHEARSED", "MEASURED", "TOK/S", "NOTE")
    return table(headers, rows, right=("#", "BATCH", "MB", "PREDICTED", "REHEARSED", "MEASURED", "TOK/S"))


def _settings() -> ModuleType:
    """The trainer's settings: numpy comes with them, and help must not need it."""
    return load("podway.train.settings", "train", "podway tune")
