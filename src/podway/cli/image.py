"""`podway image`: container images of a working directory, without Docker."""

from pathlib import Path

import click
import msgspec

from podway.cli.options import CommandGroup
from podway.cli.screen import Screen
from podway.errors import UserError
from podway.home import home
from podway.providers.gke.settings import read_settings
from podway.quantities import format_bytes
from podway.task.task import CONTAINER, LocalDir, Task, container_image

WORKDIR = "/workdir"


@click.group(name="image", cls=CommandGroup)
def command() -> None:
    """Build container images without Docker."""


@command.command()
@click.argument("directory", default=".", type=click.Path())
@click.option("--base", required=True, metavar="IMAGE", help="The image to build upon, such as python:3.12.")
@click.option(
    "--to", "target", required=True, metavar="REPOSITORY", help="Where to push it, such as ghcr.io/me/train:1."
)
@click.option("--path", default=WORKDIR, show_default=True, help="Where the directory is in the image.")
def build(directory: str, base: str, target: str, path: str) -> None:
    """Push DIRECTORY as one layer over a base image, and print the image's name.

    The name ends in the digest of the contents: the same directory over the same base is the same image, and only what the registry
    lacks is sent. `.gitignore` (or `.skyignore`) says what is left out. Logins are those of docker, podman and their helpers.
    """
    with Screen(err=True) as screen:
        image = _build(screen, directory, base, target, path)
    click.echo(image)


def with_image_of_workdir(task: Task, repository: str, *, push: bool) -> Task:
    """The task with its working directory in its image, for a run to which nothing is synced."""
    if not isinstance(task.workdir, LocalDir):
        raise UserError("--push puts the workdir into the image, and the task has none", "name it: --workdir DIR")
    images = sorted({container_image(one.image) or read_settings(home()).image for one in task.resources})
    if len(images) != 1:
        raise UserError(
            f"--push builds on one image, and the task names {', '.join(images)}", "name one: --image IMAGE"
        )
    with Screen(err=True) as screen:
        image = _build(screen, task.workdir.path, images[0], repository, WORKDIR, push=push)
    resources = tuple(msgspec.structs.replace(one, image=f"{CONTAINER}{image}") for one in task.resources)
    inside = task.working_dir or ""
    cwd = inside if inside.startswith(("/", "~")) else f"{WORKDIR}/{inside}".rstrip("/")
    return msgspec.structs.replace(task, workdir=None, resources=resources, working_dir=cwd)


def _build(screen: Screen, directory: str, base: str, target: str, path: str, *, push: bool = True) -> str:
    """The name of the image, by its digest."""
    from podway.hosts.tree import scan
    from podway.images.build import build_image, check_path
    from podway.images.reference import parse_reference

    source, into, place = parse_reference(base), parse_reference(target), check_path(path)
    screen.wait(f"Reading {directory}")
    found = scan(Path(directory), cache_dir=_cache())
    for note in found.notes:
        screen.line(f"Note: {note}")
    built = build_image(found, source, into, place, screen.wait, push=push)
    screen.wait("")
    if push:
        screen.done(f"Sent {format_bytes(built.sent)}; the registry had {format_bytes(built.reused)} already.")
    else:
        screen.line(f"Note: {built.image} is not pushed by --dryrun")
    return str(built.image)


def _cache() -> Path:
    """Where hashes of unchanged files are remembered, as for uploads."""
    place = home() / "cache"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place
