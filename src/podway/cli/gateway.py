"""`podway gateway`: pass requests to the replicas of services; keys for them, and what was used.

`podway gateway` alone, and `podway gateway run`, become the gateway. `keys` and `usage` ask the server that commands go to.
"""

import os
import re
import time
from pathlib import Path

import click
import msgspec

from podway.cli.options import RunByDefault, output_option
from podway.cli.tables import table
from podway.errors import UserError
from podway.home import home
from podway.quantities import format_ago, parse_duration

TOKEN_VARIABLE = "PODWAY_GATEWAY_TOKEN"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@click.group(name="gateway", cls=RunByDefault)
def command() -> None:
    """Pass requests for models and services to their replicas.

    This machine's own server starts a gateway when it has a service. For a team, run one or several where clients reach them.
    See docs/gateway.md.

    `podway gateway [OPTIONS]` is `podway gateway run [OPTIONS]`.
    """


@command.command()
@click.option("--server", metavar="URL", help="Learn routes from this server.  [default: the one commands go to]")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help=f"The gateway's token (podway server token NAME --role gateway).  [default: {TOKEN_VARIABLE}]",
)
@click.option("--routes", type=click.Path(path_type=Path, dir_okay=False), help="A file of routes; no server is asked.")
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for the last routes and usage.  [default: PODWAY_HOME/gateway]",
)
@click.option(
    "--single", is_flag=True, hidden=True, help="One gateway for the directory; this machine's server uses it."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    default=8080,
    show_default=True,
    help="The port; 0 for a free one.",
)
@click.option("--url", default="", help="Where clients reach it, if not there (behind a load balancer).")
@click.option("--tls-cert", type=click.Path(), help="A certificate chain (PEM), for https.")
@click.option("--tls-key", type=click.Path(), help="Its private key (PEM).")
@click.option(
    "--drain",
    type=click.FloatRange(0),
    metavar="SECONDS",
    default=30.0,
    show_default=True,
    help="Seconds that requests under way have to end after SIGTERM.",
)
@click.option(
    "--hedge",
    type=click.FloatRange(0.001),
    metavar="SECONDS",
    help="Send a request that may be repeated to a second replica too when no answer has begun by then.",
)
def run(
    server: str | None,
    token_file: Path | None,
    routes: Path | None,
    state: Path | None,
    single: bool,
    host: str,
    port: int,
    url: str,
    tls_cert: str | None,
    tls_key: str | None,
    drain: float,
    hedge: float | None,
) -> None:
    """Run a gateway in this process, until SIGTERM or Ctrl-C.

    Routes come from the server, or from a file: a new file in its place is used at once. SIGHUP replaces the process with a new
    one without refusing a connection.
    """
    from podway.gateway.main import GatewaySettings, serve

    if routes and (server or token_file):
        raise click.UsageError("Give --routes, or --server with its token.")
    if tls_key and not tls_cert:
        raise click.UsageError("--tls-key needs --tls-cert.")
    if host not in LOOPBACK and not tls_cert:
        click.echo(f"Warning: keys and answers pass unencrypted on {host}; give --tls-cert and --tls-key.", err=True)
    settings = GatewaySettings(
        routes=routes,
        state=state or (None if routes else home() / "gateway"),
        single=single,
        host=host,
        port=port,
        url=url,
        tls_cert=tls_cert,
        tls_key=tls_key,
        drain_s=drain,
        hedge_s=hedge,
    )
    if routes:
        serve(settings)
        return
    from podway.control.vault import SecretVault
    from podway.server.gateway_source import GatewaySource
    from podway.server.tunnels import TunnelDialer

    # Where the server is another machine's, so are the keys to log in to hosts: replicas are reached at their addresses.
    dialer = TunnelDialer(home()) if server is None else None
    assert settings.state is not None  # without --routes there is one
    settings.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    vault = SecretVault(settings.state / "secret.key")
    serve(settings, GatewaySource(home(), *_address(server, token_file), own=single), dialer, vault)


def _address(server: str | None, token_file: Path | None) -> tuple[str | None, str | None]:
    """The server's address and the gateway's token; (None, None): those that commands use."""
    if server is None:
        if token_file is not None:
            raise click.UsageError("--token-file needs --server.")
        return None, None
    from podway.cli.login import checked_url

    token = token_file.read_text().strip() if token_file is not None else os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        hint = "make one there: podway server token NAME --role gateway, and give it with --token-file"
        raise UserError(f"a gateway needs a token for {server}", hint)
    return checked_url(server), token


@command.group()
def keys() -> None:
    """Keys that open services and nothing else, with limits."""


@keys.command()
@click.argument("name")
@click.option("--user", help="For somebody else; administrators only.")
@click.option(
    "--service", "services", multiple=True, help="Only this service (repeatable).  [default: all you may use]"
)
@click.option("--requests-per-minute", type=click.FloatRange(0, min_open=True), metavar="N", help="At most so many.")
@click.option(
    "--tokens-per-day",
    type=click.IntRange(0),
    metavar="N",
    help="A budget of prompt and completion tokens, by day (UTC).",
)
@click.option("--expires", metavar="DURATION", default="90d", show_default=True, help="Such as 12h or 30d, or never.")
def create(
    name: str,
    user: str | None,
    services: tuple[str, ...],
    requests_per_minute: float | None,
    tokens_per_day: int | None,
    expires: str,
) -> None:
    """Create a key called NAME. It is shown once; only its digest is stored."""
    from podway.server.client import Client

    made = Client().make_gateway_key(
        name,
        user=user,
        services=services or None,
        requests_per_minute=requests_per_minute,
        tokens_per_day=tokens_per_day,
        lifetime_s=None if expires == "never" else parse_duration(expires, "--expires"),
    )
    click.echo("The key is not shown again. Clients send it as their API key.", err=True)
    click.echo(made)


@keys.command(name="list")
@output_option
def list_keys(output: str) -> None:
    """Show keys (your own, unless you are an administrator)."""
    from podway.server.client import Client

    found = Client().gateway_keys()
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    if not found:
        click.echo("No keys yet; create one with: podway gateway keys create NAME")
        return
    now = time.time()
    rows = [
        (
            one.user,
            one.name,
            "all" if one.services is None else " ".join(one.services),
            one.requests_per_minute and f"{one.requests_per_minute:g}",
            one.tokens_per_day,
            format_ago(one.created, now),
            "never" if one.expires is None else time.strftime("%Y-%m-%d", time.gmtime(one.expires)),
            one.id,
        )
        for one in found
    ]
    click.echo(table(("USER", "NAME", "SERVICES", "PER MINUTE", "TOKENS/DAY", "SINCE", "EXPIRES", "KEY"), rows))


@keys.command()
@click.argument("key")
def delete(key: str) -> None:
    """Delete KEY, by its id in the list."""
    from podway.server.client import Client

    Client().delete_gateway_key(key)
    click.echo(f"Key {key} is no longer valid.")


@command.command()
@click.option("--since", metavar="DAY", default="", help="From this day on, such as 2026-11-01.  [default: all]")
@output_option
def usage(since: str, output: str) -> None:
    """Show what was used of services, by day, user and model (your own, unless you are an administrator)."""
    from podway.server.client import Client

    if since and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", since):
        raise UserError(f"{since!r} is not a day", "write it as 2026-11-01")
    found = Client().usage_by_day(since)
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    elif not found:
        click.echo("Nothing was used yet.")
    else:
        rows = [
            (
                one.day,
                one.user,
                one.service,
                one.model,
                one.requests,
                one.prompt_tokens,
                one.completion_tokens,
                None if one.cost is None else f"${one.cost:,.2f}",
            )
            for one in found
        ]
        headers = ("DAY", "USER", "SERVICE", "MODEL", "REQUESTS", "PROMPT", "COMPLETION", "COST")
        click.echo(table(headers, rows, right=("REQUESTS", "PROMPT", "COMPLETION", "COST")))
