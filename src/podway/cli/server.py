"""`podway server`: run a server for a team, or manage the one on this machine.

`podway server` alone, and `podway server run`, become the server process. The other subcommands query or stop the server of this
machine; those about people (`token`, `users`, `revoke`, `member`, `members`, `audit`) go to the server that commands go to, the
team's after a login.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from podway.cli.options import RunByDefault, output_option
from podway.cli.tables import table
from podway.errors import UserError
from podway.gateway.state_dir import running_gateway
from podway.home import home
from podway.hosts.agent import processes
from podway.quantities import format_ago, format_duration, parse_duration
from podway.server.api import InfoReply
from podway.server.client import Client
from podway.server.starting import start_server

STOP_TIMEOUT_S = 15.0
NOT_RUNNING = 3  # what init scripts answer for a service that does not run


@click.group(name="server", cls=RunByDefault)
def command() -> None:
    """Run a server, or manage the one on this machine.

    Every machine has its own server, which starts automatically when a command needs it. A team shares one: run it where
    everyone can reach it, create a token for each user, and let them log in.

    `podway server [OPTIONS]` is `podway server run [OPTIONS]`.
    """


@command.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    default=0,
    help="Port to listen on.  [default: any free one]",
)
@click.option("--db", metavar="URL", default="", help="postgresql://... for a team.  [default: SQLite in PODWAY_HOME]")
@click.option(
    "--allow-local",
    is_flag=True,
    help="Let people with a token simulate slices here, each cluster as a user of its own (needs root).",
)
@click.option(
    "--tls-cert", type=click.Path(exists=True, dir_okay=False, resolve_path=True), help="Certificate chain, as PEM."
)
@click.option(
    "--tls-key", type=click.Path(exists=True, dir_okay=False, resolve_path=True), help="Its private key, as PEM."
)
@click.option("--foreground", is_flag=True, help="Log here instead of in PODWAY_HOME/server.log.")
def run(
    host: str, port: int, db: str, allow_local: bool, tls_cert: str | None, tls_key: str | None, foreground: bool
) -> None:
    """Run a server in this process, until Ctrl-C."""
    environment = {**os.environ, "PODWAY_DB": db} if db else dict(os.environ)  # not argv: the URL may hold a password
    argv = [sys.executable, "-m", "podway.server.main", "--host", host, "--port", str(port)]
    flags = [*(["--allow-local"] if allow_local else []), *(["--foreground"] if foreground else [])]
    flags += [
        word for name, path in (("--tls-cert", tls_cert), ("--tls-key", tls_key)) if path for word in (name, path)
    ]
    sys.stdout.flush()
    os.execve(sys.executable, [*argv, *flags], environment)


@command.command()
def start() -> None:
    """Start this machine's server if it is not running."""
    info = _running()
    if info is None:
        start_server(home())
        info = _running()
    if info is None:
        raise UserError("the Podway server exited right after it started", "see why: podway server logs")
    click.echo(f"The Podway server is running (pid {info.pid}).")


@command.command()
def stop() -> None:
    """Stop this machine's server. Jobs and hosts keep running without it."""
    info = _running()
    if info is None:
        click.echo("No Podway server is running on this machine.")
        return
    needed = _has_services()
    os.kill(info.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while _alive(info.pid):
        if time.monotonic() > deadline:
            raise UserError(f"the server (pid {info.pid}) does not stop", f"kill it: kill -9 {info.pid}")
        time.sleep(0.05)
    click.echo("The Podway server is stopped. Jobs keep running; the next command starts the server again.")
    gateway = running_gateway(home() / "gateway")
    if gateway is not None and _alive(gateway.pid) and not needed:
        os.kill(gateway.pid, signal.SIGTERM)  # it serves nothing, and the server that would end it is gone
    elif gateway is not None and _alive(gateway.pid):
        click.echo(f"Services are still served by the gateway at {gateway.url} (pid {gateway.pid}).")


def _has_services() -> bool:
    """Whether the gateway is to go on; where the server cannot say, it is."""
    known = _read(home() / "server.json")
    try:
        return bool(Client(known["url"], known["token"], retry_s=0.0).services())
    except (UserError, OSError, KeyError):
        return True


@command.command()
@output_option
@click.pass_context
def status(ctx: click.Context, output: str) -> None:
    """Show which server commands use, and whether it answers."""
    remote = _read(home() / "remote.json")
    info = Client().info() if remote else _running()
    url = (remote or _read(home() / "server.json")).get("url")
    if output == "json":
        document = {"running": info is not None, "url": url if info else None, "team": bool(remote), "info": info}
        click.echo(msgspec.json.format(msgspec.json.encode(document)))
    elif info is None:
        click.echo("No Podway server is running on this machine; it starts automatically when a command needs it.")
    else:
        whose = "the team's server" if remote else "this machine's own server"
        role = info.role or ("admin" if info.admin else "member")
        rows = [
            ("URL", f"{url} ({whose})"),
            ("VERSION", info.version),
            ("PID", info.pid),
            ("YOU", f"{info.user} ({role})"),
        ]
        click.echo(table(("SERVER", "running"), rows))
    ctx.exit(NOT_RUNNING if info is None else 0)


@command.command()
@click.option(
    "--tail", type=click.IntRange(min=0), metavar="N", default=100, show_default=True, help="The last N lines; 0: all."
)
@click.option("--follow/--no-follow", default=False, help="Follow until Ctrl-C.")
def logs(tail: int, follow: bool) -> None:
    """Show the log of this machine's server."""
    path = home() / "server.log"
    if not path.exists():
        raise UserError("no server log found", "start one: podway server start")
    with path.open(errors="replace") as file:
        lines = file.readlines()
        click.echo("".join(lines[-tail:] if tail else lines), nl=False)
        while follow:
            if line := file.readline():
                click.echo(line, nl=False)
            else:
                time.sleep(0.2)


@command.command()
@click.argument("user")
@click.option(
    "--role",
    type=click.Choice(["member", "viewer", "admin", "gateway"]),
    default="member",
    show_default=True,
    help="viewer: reads only; admin: everything, also tokens and projects; gateway: learns routes and reports, nothing else.",
)
@click.option("--name", default="", help="What it is for, such as laptop; shown in lists and in the audit log.")
@click.option("--expires", metavar="DURATION", default="90d", show_default=True, help="Such as 12h or 30d, or never.")
def token(user: str, role: Literal["member", "viewer", "admin", "gateway"], name: str, expires: str) -> None:
    """Create a token for USER. It is shown once; only its digest is stored."""
    lifetime = None if expires == "never" else parse_duration(expires, "--expires")
    made = Client().make_token(user, role, name=name, lifetime_s=lifetime)
    click.echo(f"Give this to {user}; it is not shown again. They use it with: podway login URL", err=True)
    click.echo(made)


@command.command()
@output_option
def users(output: str) -> None:
    """Show the tokens of the people who may use the server (your own, unless you are an administrator)."""
    found = Client().tokens()
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    elif not found:
        click.echo("No tokens yet; create one with: podway server token USER")
    else:
        now = time.time()
        rows = [
            (one.user, one.role, one.name or None, format_ago(one.created, now), _expiry(one.expires, now), one.id)
            for one in found
        ]
        click.echo(table(("USER", "ROLE", "NAME", "SINCE", "EXPIRES", "TOKEN"), rows))


@command.command()
@click.argument("user", required=False)
@click.option("--token", "token_id", metavar="ID", help="Only this token, as `podway server users` shows it.")
def revoke(user: str | None, token_id: str | None) -> None:
    """Revoke all tokens of USER, or one token."""
    if (user is None) == (token_id is None):
        raise click.UsageError("Give USER, or --token ID.")
    if token_id is not None:
        Client().revoke_token(token_id)
        click.echo(f"Token {token_id} is no longer valid.")
    else:
        Client().revoke(str(user))
        click.echo(f"{user} can no longer use this server.")


@command.command()
@click.argument("project")
@click.argument("user")
@click.option("--role", type=click.Choice(["member", "viewer"]), default="member", show_default=True,
              help="member: manages the project's clusters; viewer: only sees them.")  # fmt: skip
@click.option("--remove", is_flag=True, help="Take USER out of the project.")
def member(project: str, user: str, role: Literal["member", "viewer"], remove: bool) -> None:
    """Put USER into PROJECT, whose members manage each other's clusters."""
    Client().set_member(project, user, None if remove else role)
    click.echo(f"{user} is no longer in {project}." if remove else f"{user} is a {role} of {project}.")


@command.command()
@output_option
def members(output: str) -> None:
    """Show who is in which project (yours, unless you are an administrator)."""
    found = Client().members()
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    elif not found:
        click.echo("No projects yet; create one with: podway server member PROJECT USER")
    else:
        click.echo(table(("PROJECT", "USER", "ROLE"), [(one.project, one.user, one.role) for one in found]))


@command.command()
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1, 10_000),
    metavar="N",
    default=50,
    show_default=True,
    help="How many entries.",
)
@click.option("--user", help="Only what this person did.")
@output_option
def audit(limit: int, user: str | None, output: str) -> None:
    """Show who did what, the latest first: every change, and what was refused."""
    found = Client().audit(limit, user)
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    rows = [
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one.time)),
            one.user,
            one.token,
            one.address,
            one.action,
            one.target or None,
            one.status,
        )
        for one in found
    ]
    click.echo(table(("TIME (UTC)", "USER", "TOKEN", "FROM", "ACTION", "ON", "STATUS"), rows))


def _expiry(expires: float | None, now: float) -> str:
    if expires is None:
        return "never"
    return "expired" if expires <= now else f"in {format_duration(expires - now)}"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _running() -> InfoReply | None:
    """This machine's own server, if it answers; it is never started."""
    known = _read(home() / "server.json")
    if not known:
        return None
    try:
        return Client(known["url"], known["token"], retry_s=0.0).info()
    except (UserError, OSError, KeyError):
        return None


def _alive(pid: int) -> bool:
    """A zombie has ended, though its parent has not looked yet: the first process of a container may never look."""
    process = processes.read(pid)
    return process is not None and process.alive
