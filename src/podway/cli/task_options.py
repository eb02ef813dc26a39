"""The options of every verb that takes a task: what overrides the file's own values, as one `Overrides`."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from podway.errors import UserError
from podway.task.environment import Overrides
from podway.task.paths import absolute, read_file

_OPTIONS = (
    click.option("-n", "--name", help="Name of the job, shown in queues and logs."),
    click.option("--workdir", metavar="DIR", help="Local directory to sync to ~/sky_workdir on every host."),
    click.option(
        "--infra",
        "--provider",
        "--cloud",
        "infra",
        metavar="WHERE",
        help="Where to run: local (simulated here), gcp[/REGION[/ZONE]], k8s[/CONTEXT], ssh[/POOL].",
    ),
    click.option("--region", metavar="REGION", help="Only in this region, such as us-east5."),
    click.option("--zone", metavar="ZONE", help="Only in this zone, such as us-east5-b."),
    click.option(
        "--inventory",
        metavar="FILE",
        help="File that lists your own machines to run on over ssh (docs/ssh.md).",
    ),
    click.option("--num-nodes", type=int, metavar="N", help="Number of slices."),
    click.option(
        "--gpus",
        "--tpus",
        "--tpu",
        "tpus",
        metavar="TYPE",
        help="Slice type, such as v6e-16; launch also takes auto.",
    ),
    click.option(
        "--image", "--image-id", "image", metavar="NAME", help="Container image to run in, such as python:3.12."
    ),
    click.option(
        "--ignore-image", is_flag=True, help="Run in the hosts' own environment, whatever image the file names."
    ),
    click.option("--use-spot/--no-use-spot", default=None, help="Use spot capacity."),
    click.option(
        "--priority",
        type=click.IntRange(-1000, 1000),
        metavar="N",
        help="Of the jobs that wait for a cluster, the highest is next; 0 when not given.",
    ),
    click.option(
        "--env",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="Environment variable; without VALUE, taken from your shell.",
    ),
    click.option("--env-file", multiple=True, metavar="FILE", help="File of NAME=VALUE lines; --env takes precedence."),
    click.option(
        "--secret", multiple=True, metavar="NAME[=VALUE]", help="Like --env; masked in logs, stored encrypted."
    ),
    click.option("--secret-file", multiple=True, metavar="FILE", help="Like --env-file, for secrets."),
)


def listed_in(inventory: str, infra: str | None) -> str:
    """The infra of an inventory: ssh, with the file's path instead of a pool's name."""
    if infra not in (None, "ssh"):
        raise UserError(f"--inventory lists machines for ssh, and --infra says {infra}", "leave --infra out")
    path = absolute(inventory, Path.cwd(), os.environ)
    read_file(path, "an inventory", inventory)
    return f"ssh/{path}"


def within(infra: str | None, region: str | None, zone: str | None) -> str | None:
    """`cloud/region/zone` of the three options; a zone or region alone is Google's."""
    if region is None and zone is None:
        return infra
    if infra is not None and "/" in infra:
        raise UserError(
            f"--infra {infra} names a location, and so does --{'zone' if zone else 'region'}", "use one of them"
        )
    return "/".join([infra or "gcp", region or "*", *([zone] if zone else [])])


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
        region: str | None,
        zone: str | None,
        inventory: str | None,
        num_nodes: int | None,
        tpus: str | None,
        use_spot: bool | None,
        priority: int | None,
        image: str | None,
        ignore_image: bool,
        **others: Any,
    ) -> None:
        overrides = Overrides(
            env=env,
            env_files=env_file,
            secrets=secret,
            secret_files=secret_file,
            name=name,
            workdir=workdir,
            infra=within(infra, region, zone) if inventory is None else listed_in(inventory, infra),
            num_nodes=num_nodes,
            tpus=tpus,
            use_spot=use_spot,
            priority=priority,
            image=image,
            ignore_image=ignore_image,
            local_env=dict(os.environ),
        )
        function(overrides=overrides, **others)

    for option in reversed(_OPTIONS):
        collected = option(collected)
    return collected
