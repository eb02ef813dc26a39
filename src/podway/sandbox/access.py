"""Who may ask the sandbox for anything: those who show a token, from a program of this machine.

One token is the owner's, new with each sandbox and handed out by `podway sandbox env`; it opens everything. Each host has one
more, which its metadata server tells it; with that it may do what a service account may do, but not command the sandbox.
A token comes as `Authorization: Bearer`, or, for storage clients that know no credentials but a URL, as the password of
`Authorization: Basic`. Requests that a web page can cause are refused whatever they show: those with an Origin, and those
for a host name that is not this machine's own (DNS rebinding).
"""

import base64
import binascii
import hmac
import ipaddress
import secrets
from collections.abc import Mapping

from podway.sandbox.status import ApiError, invalid

OWNER, HOST = "owner", "host"


class Access:
    """The tokens in force."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self._of_hosts: dict[tuple[int, int], str] = {}  # (node's number, worker) -> token

    def host_token(self, number: int, worker: int) -> str:
        """The token of one host, the same each time."""
        return self._of_hosts.setdefault((number, worker), f"ya29.host-{secrets.token_urlsafe(32)}")

    def revoke(self, number: int) -> None:
        """The node is gone, and its hosts' tokens with it."""
        for key in [key for key in self._of_hosts if key[0] == number]:
            del self._of_hosts[key]

    def caller(self, authorization: str) -> str:
        """Whose token a header shows."""
        shown = shown_token(authorization).encode()
        if hmac.compare_digest(shown, self.token.encode()):
            return OWNER
        if any(hmac.compare_digest(shown, one.encode()) for one in self._of_hosts.values()):
            return HOST
        said = (
            "Request had invalid authentication credentials."
            if shown
            else "Request is missing required authentication."
        )
        raise ApiError("UNAUTHENTICATED", f'{said} For this sandbox: eval "$(podway sandbox env)"')


def shown_token(authorization: str) -> str:
    """The token in a header; nothing where there is none."""
    kind, _, value = authorization.strip().partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def check_origin(headers: Mapping[str, str], *names: str) -> None:
    """Refuse what a web page may have sent; `names` are host names that are right besides addresses."""
    if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
        raise ApiError("PERMISSION_DENIED", "Requests from web pages are refused.")
    host = headers.get("host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() in ("localhost", *names):
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        raise ApiError("PERMISSION_DENIED", f"Host '{name}' is refused: use an address or localhost.") from None


def check_json(headers: Mapping[str, str]) -> None:
    """A body must say that it is JSON, which no form of a web page can."""
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise invalid(f"Content-Type is '{kind}'; it must be application/json.")
