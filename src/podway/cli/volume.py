"""`podway volume VERB`: disks that outlive clusters."""

import time

import click
import msgspec

from podway.catalog.disks import HOURS_A_MONTH
from podway.cli.confirmation import proceed
from podway.cli.launching import Interaction
from podway.cli.options import CommandGroup, output_option, yes_option
from podway.cli.tables import table
from podway.quantities import format_ago
from podway.server.client import Client
from podway.server.volume_api import VolumeView
from podway.task import places
from podway.task.fields import FlagField
from podway.task.values import gigabytes
from podway.task.volumes import VolumeSpec

HEADERS = ("NAME", "INFRA", "SIZE", "$/MONTH", "STATUS", "USED BY", "CREATED")


@click.group(name="volume", cls=CommandGroup)
def command() -> None:
    """Create, list and delete disks that outlive clusters."""


@command.command(name="create")
@click.argument("name")
@click.option(
    "--infra", required=True, metavar="CLOUD[/…]", help="Where: gcp/us-east5/us-east5-b, k8s, ssh/POOL or local."
)
@click.option("--size", metavar="SIZE", help="Of the disk: 100GB. Directories of ssh and local have none.")
@click.option("--disk", metavar="ID", help="Register this existing disk or claim instead of making one.")
@click.option(
    "--disk-type",
    metavar="TYPE",
    help="On gcp: pd-balanced, or hyperdisk-balanced (v6e, tpu7x). On k8s: a storage class.",
)
@click.option(
    "--access-mode", metavar="MODE", help="On k8s: ReadWriteOnce (the default), ReadWriteMany or ReadOnlyMany."
)
@click.option("--project", metavar="NAME", help="On a team's server: the project whose members may use it too.")
def create(
    name: str,
    infra: str,
    size: str | None,
    disk: str | None,
    disk_type: str | None,
    access_mode: str | None,
    project: str | None,
) -> None:
    """Create a volume, which tasks name under `volumes`.

    On gcp it is a persistent disk, on k8s a PersistentVolumeClaim; on ssh a directory on each machine of the pool, and with local one on
    the server's machine.
    """
    spec = VolumeSpec(
        name=name,
        placement=places.from_infra(FlagField("--infra", infra)),
        size_gb=gigabytes(FlagField("--size", size)) if size is not None else None,
        disk_id=disk,
        disk_type=disk_type,
        access_mode=access_mode,
    )
    create_volume(Client(), spec, project)


def create_volume(client: Client, spec: VolumeSpec, project: str | None, *, quiet: bool = False) -> VolumeView:
    """Create it, and say where it is."""
    for note in spec.notes:
        click.echo(f"Note: {note}", err=True)
    made = client.create_volume(spec, project=project)
    if spec.size_gb and made.size_gb is None:
        click.echo(f"Note: the size has no effect on {made.provider}: the volume is a directory there", err=True)
    what = "is registered" if made.registered else "is ready"
    if quiet:
        return made
    size = f" ({made.size_gb} GB, {made.disk_type or 'a disk'})" if made.size_gb else ""
    click.echo(f"Volume {made.name} {what} on {_infra(made)}{size}.")
    return made


def apply_volume(spec: VolumeSpec, interaction: Interaction, project: str | None) -> None:
    """Create the volume of a file, as `podway apply` does."""
    if interaction.dryrun:
        click.echo(msgspec.json.format(msgspec.json.encode(spec)))
        return
    client = Client()
    if all(one.name != spec.name for one in client.volumes()):
        proceed(f"Creating volume {spec.name}.", yes=interaction.yes)
    made = create_volume(client, spec, project, quiet=interaction.json)
    if interaction.json:
        click.echo(msgspec.json.format(msgspec.json.encode(made)))


@command.command(name="list")
@output_option
def list_volumes(output: str) -> None:
    """Show volumes."""
    found = Client().volumes()
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    if not found:
        click.echo("No existing volumes.")
        return
    now = time.time()
    rows = [
        (
            one.name,
            _infra(one),
            f"{one.size_gb} GB" if one.size_gb else None,
            None if one.hourly_cost is None else f"{one.hourly_cost * HOURS_A_MONTH:,.2f}",
            one.state.upper(),
            one.used_by,
            format_ago(one.created, now),
        )
        for one in found
    ]
    click.echo(table(HEADERS, rows, right=("SIZE", "$/MONTH"), drop=("CREATED", "$/MONTH", "SIZE", "USED BY")))


@command.command(name="delete")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@yes_option
def delete(names: tuple[str, ...], yes: bool) -> None:
    """Delete volumes and everything in them.

    A registered disk is forgotten, and stays as it is.
    """
    proceed(f"Deleting {', '.join(names)} and everything in them.", yes=yes)
    client = Client()
    for name in names:
        client.delete_volume(name)
        click.echo(f"Volume {name} is deleted.")


def _infra(one: VolumeView) -> str:
    return "/".join(filter(None, (one.provider, one.zone or one.region)))
