"""`podway check FILE`: the task as Podway reads it, or the mistakes in it. Nothing is started."""

import sys
from pathlib import Path

import click
import msgspec

from podway.cli.options import output_option
from podway.cli.task_options import task_options
from podway.control.capability_check import check_places, forecast
from podway.errors import UserError
from podway.home import home
from podway.provider_table import find_row
from podway.task.environment import Overrides
from podway.task.explain import explain, explain_volume
from podway.task.places import OTHER_CLOUDS
from podway.task.read import read_tasks, read_tasks_text, read_volume
from podway.task.schema import json_schema
from podway.task.task import without_secrets


@click.command(name="check")
@click.argument("file", required=False)
@output_option
@click.option("--json-schema", "as_schema", is_flag=True, help="Print the JSON schema of task files, for editors.")
@task_options
@click.pass_context
def command(ctx: click.Context, file: str | None, output: str, as_schema: bool, overrides: Overrides) -> None:
    """Read the task in FILE (- for standard input) and print what it means.

    A mistake is shown with its file, line and column, and what to do about it. `podway check gcp` (gke, ssh) is
    `podway doctor gcp`.
    """
    if as_schema:
        click.echo(msgspec.json.format(msgspec.json.encode(json_schema()), indent=2))
        return
    if file is not None and not Path(file).exists() and (row := find_row(file)) is not None and row.diagnose:
        from podway.cli.doctor import examine  # a task is checked without it

        ctx.exit(examine((row.name,), json=output == "json"))
    if file is not None and file in OTHER_CLOUDS and not Path(file).exists():
        raise UserError(f"{file} has no TPUs Podway can reach", "check one of: gcp, gke, ssh, or a task file")
    if file is None:
        raise click.UsageError("Give the path of a task file, or --json-schema.")
    text = sys.stdin.buffer.read() if file == "-" else None
    volume = read_volume(file, text, overrides)
    if volume is not None:
        shown_volume = msgspec.json.format(msgspec.json.encode(volume), indent=2) if output == "json" else ""
        click.echo(shown_volume or explain_volume(volume))
        return
    tasks = read_tasks(file, overrides=overrides) if text is None else read_tasks_text(text, overrides=overrides)
    tasks = tuple(
        msgspec.structs.replace(task, notes=(*task.notes, *check_places(task, home()), *forecast(task)))
        for task in tasks
    )
    if any("podway" in task.run for task in tasks):
        from podway.plan.task_needs import check_products  # a task without a model is checked without the planner

        for task in tasks:
            check_products(task)
    if output == "json":
        shown = [without_secrets(task) for task in tasks]
        click.echo(msgspec.json.format(msgspec.json.encode(shown if len(shown) > 1 else shown[0]), indent=2))
        return
    if len(tasks) > 1:
        click.echo(f"A pipeline of {len(tasks)} tasks on one cluster, each after the one before.\n")
    click.echo("\n".join(explain(task) for task in tasks), nl=False)
