"""The options of every verb that takes a task: what they put in place of the file's own values, as one `Overrides`."""

import functools
import os
from collections.abc import Callable
from typing import Any

import click

from podway.task.environment import Overrides

_OPTIONS = (
    click.option("-n", "--name", help="Name of the job, shown in queues and logs."),
    click.option("--workdir", metavar="DIR", help="Directory of this machine to sync to ~/sky_workdir on every host."),
    click.option(
        "--infra",
        "--provider",
        "infra",
        metavar="CLOUD[/REGION[/ZONE]]",
        help="Where: local (simulated on this machine), gcp, gcp/us-east5, gcp/us-east5/us-east5-b, ...",
    ),
    click.option("--num-nodes", type=int, metavar="N", help="Number of slices."),
    click.option(
        "--gpus", "--tpus", "--tpu", "tpus", metavar="TYPE", help="Slice type, such as v6e-16; see: podway tpus"
    ),
    click.option("--use-spot/--no-use-spot", default=None, help="Spot capacity, or not."),
    click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="Variable of the task; without VALUE, yours."),
    click.option("--env-file", multiple=True, metavar="FILE", help="File of NAME=VALUE lines; --env is stronger."),
    click.option("--secret", multiple=True, metavar="NAME[=VALUE]", help="As --env; masked in logs, stored encrypted."),
    click.option("--secret-file", multiple=True, metavar="FILE", help="As --env-file, for secrets."),
)


def task_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options; `function` gets them as `overrides`."""

    @functools.wraps(function)
    def collected(
        *,
        env: tuple[str, ...],
        env_file: tuple[str, ...],
        secret: tuple[str, ...],
        secret_file: tuple[str, ...],
        name: str | None,
        workdir: str | None,
        infra: str | None,
        num_nodes: int | None,
        tpus: str | None,
        use_spot: bool | None,
        **others: Any,
    ) -> None:
        overrides = Overrides(
            env=env,
            env_files=env_file,
            secrets=secret,
            secret_files=secret_file,
            name=name,
            workdir=workdir,
            infra=infra,
            num_nodes=num_nodes,
            tpus=tpus,
            use_spot=use_spot,
            local_env=dict(os.environ),
        )
        function(overrides=overrides, **others)

    for option in reversed(_OPTIONS):
        collected = option(collected)
    return collected
