"""`podway login`: send commands to a team's server from now on."""

import json
import sys
from http.client import HTTPException
from urllib.parse import urlsplit

import click

from podway.errors import UserError
from podway.files import write_atomically
from podway.home import home
from podway.server.client import Client

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@click.command(name="login")
@click.argument("url")
@click.option("--token", help="Your token. Safer: omit it and type or pipe it in; other users can see arguments.")
def command(url: str, token: str | None) -> None:
    """Log in to a team's server.

    URL is the server's address. An administrator makes you a token with: podway server token USER
    """
    url = checked_url(url)
    token = token or _asked_token()
    try:
        info = Client(url, token, retry_s=0.0).info()
    except (OSError, HTTPException) as error:
        raise UserError(f"cannot reach {url}: {error}", "check the address, and that the server runs") from None
    save_remote(url, token)
    click.echo(f"Logged in to {url} as {info.user}{' (administrator)' if info.admin else ''}.")


def checked_url(text: str) -> str:
    """The address without a trailing slash; a UserError if it is not one."""
    text = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(text)
        port_ok = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_ok = urlsplit(""), False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_ok or parts.query or parts.fragment:
        raise UserError(
            f"{text!r} is not the address of a server", "write it as https://podway.example.org or http://HOST:PORT"
        )
    if parts.username is not None:
        raise UserError("the address holds a name or password", "leave it out; your token identifies you")
    if parts.scheme == "http" and parts.hostname not in LOOPBACK:
        click.echo(
            f"Note: {parts.hostname} is reached without encryption; others on the network can read your token.",
            err=True,
        )
    return text.rstrip("/")


def _asked_token() -> str:
    if sys.stdin.isatty():
        text = click.prompt("Token", hide_input=True, err=True)
    else:
        text = sys.stdin.readline()
    token = str(text).strip()
    if not token or not token.isascii() or not token.isprintable():
        raise UserError("no token given", "type it, or pipe it in: podway login URL < token.txt")
    return token


def save_remote(url: str, token: str) -> None:
    """Readable by its owner only, and written atomically."""
    path = home() / "remote.json"
    write_atomically(path, json.dumps({"url": url, "token": token}).encode(), mode=0o600)
