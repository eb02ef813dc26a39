"""`podway gateway`: pass requests to the replicas of services."""

from pathlib import Path

import click


@click.command(name="gateway")
@click.option("--routes", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The file of routes.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="The port; 0 for a free one."
)
@click.option("--tls-cert", type=click.Path(), help="A certificate chain (PEM), for https.")
@click.option("--tls-key", type=click.Path(), help="Its private key (PEM).")
@click.option(
    "--drain",
    type=click.FloatRange(0),
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
def command(
    routes: Path, host: str, port: int, tls_cert: str | None, tls_key: str | None, drain: float, hedge: float | None
) -> None:
    """Pass requests for models and services to their replicas.

    The file of routes says which services there are, which replicas are ready and who may use them; a new file in its place is
    used at once. See docs/gateway.md.
    """
    from podway.gateway.main import GatewaySettings, serve

    if tls_key and not tls_cert:
        raise click.UsageError("--tls-key needs --tls-cert.")
    if host not in ("127.0.0.1", "::1", "localhost") and not tls_cert:
        click.echo(f"Warning: keys and answers pass unencrypted on {host}; give --tls-cert and --tls-key.", err=True)
    serve(
        GatewaySettings(
            routes=routes, host=host, port=port, tls_cert=tls_cert, tls_key=tls_key, drain_s=drain, hedge_s=hedge
        )
    )
