"""Sessions of the web page: a link that opens one once, and a cookie that stands for the token it was made with.

A session has no rights of its own: each request asks who holds its token now, so that a revoked token ends its sessions too. Links
and sessions are in memory alone; after a restart of the server a person opens the page again with `podway ui`.
"""

import hmac
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

T = TypeVar("T")

LINK_S = 120.0
SESSION_S = 12 * 3600.0
MOST = 10_000
CSRF_HEADER = "x-podway-csrf"
OTHER_SESSION = "other_session"  # the code of a change that another session's page sent


def cookie_name(host: str) -> str:
    """The cookie of a page at this address (`127.0.0.1:4000`). Browsers share cookies between the ports of a host, servers do not."""
    port = host.rpartition(":")[2]
    return f"podway_session_{port}" if port.isascii() and port.isdigit() else "podway_session"


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One browser of one person."""

    token_digest: str
    csrf: str  # what a request that changes something must bring; another site's page cannot read it
    expires: float


class Sessions:
    """The links and sessions of a server; used from its event loop alone."""

    def __init__(self) -> None:
        self._links: dict[str, tuple[str, float]] = {}  # code -> token digest, when it expires
        self._sessions: dict[str, Session] = {}

    def make_link(self, token_digest: str, now: float | None = None) -> str:
        """A code that opens one session, once, within two minutes."""
        now = time.time() if now is None else now
        _make_room(self._links, lambda link: link[1] <= now)
        code = secrets.token_urlsafe(32)
        self._links[code] = (token_digest, now + LINK_S)
        return code

    def open(self, code: str, now: float | None = None) -> str | None:
        """The cookie of a new session, or None where the code is used up, expired or was never given out."""
        now = time.time() if now is None else now
        found = self._links.pop(code, None)
        if found is None or found[1] <= now:
            return None
        _make_room(self._sessions, lambda one: one.expires <= now)
        cookie = secrets.token_urlsafe(32)
        self._sessions[cookie] = Session(token_digest=found[0], csrf=secrets.token_urlsafe(32), expires=now + SESSION_S)
        return cookie

    def find(self, cookie: str, now: float | None = None) -> Session | None:
        """The session of a cookie."""
        found = self._sessions.get(cookie)
        return found if found is not None and found.expires > (time.time() if now is None else now) else None

    def close(self, cookie: str) -> None:
        """End a session."""
        self._sessions.pop(cookie, None)


def _make_room(kept: dict[str, T], expired: Callable[[T], bool]) -> None:
    """For one more: all live equally long, so the oldest stand first and expire first."""
    while kept and (len(kept) >= MOST or expired(next(iter(kept.values())))):
        del kept[next(iter(kept))]


def csrf_matches(session: Session, header: str | None) -> bool:
    """Whether a request that changes something comes from the page itself."""
    return header is not None and hmac.compare_digest(session.csrf.encode(), header.encode("utf-8", "surrogateescape"))
