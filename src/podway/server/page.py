"""The web page: its files, and the way in.

Files are read once and kept with their compressed form. The page runs no inline script and talks to this server alone; the
content-security policy holds it to that. `/login?code=…` turns a link of `podway ui` into a session and goes to the page.
"""

import gzip
import hashlib
import mimetypes
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

import podway.page
from podway.server.sessions import SESSION_S, Sessions, cookie_name

FOLDER = Path(podway.page.__file__).parent
KINDS = (".html", ".js", ".css", ".svg", ".txt")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time, and answered by 304 while nothing changed
}


class PageFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of the page."""

    content: bytes
    compressed: bytes
    kind: str
    etag: str


def read_files(folder: Path = FOLDER) -> dict[str, PageFile]:
    """Every file by its path below the folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in KINDS:
            content = path.read_bytes()
            kind = mimetypes.guess_type(path.name)[0] or "text/plain"
            found[path.relative_to(folder).as_posix()] = PageFile(
                content=content,
                compressed=gzip.compress(content, 9, mtime=0),
                kind="text/javascript" if path.suffix == ".js" else kind,
                etag=f'"{hashlib.sha256(content).hexdigest()[:20]}"',
            )
    return found


class PageServer:
    """The routes of the page."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._files = read_files()

    async def file(self, request: Request) -> Response:
        """A file; every other address below `/` is a view, which the page itself finds."""
        name = request.path_params.get("path", "")
        found = self._files.get(name)
        if found is None and "." not in name.rpartition("/")[2]:
            found = self._files["index.html"]
        if found is None:
            return Response("not found\n", status_code=404, media_type="text/plain", headers=HEADERS)
        headers = {**HEADERS, "etag": found.etag, "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(found.compressed, media_type=found.kind, headers={**headers, "content-encoding": "gzip"})
        return Response(found.content, media_type=found.kind, headers=headers)

    async def login(self, request: Request) -> Response:
        """Open a session by a link; a link that is used up leads to a page that says so."""
        cookie = self._sessions.open(request.query_params.get("code", ""))
        if cookie is None:
            return RedirectResponse("/page/expired", status_code=303, headers=HEADERS)
        answer = RedirectResponse("/page/", status_code=303, headers=HEADERS)
        secure = request.url.scheme == "https"
        name = cookie_name(request.headers.get("host", ""))
        answer.set_cookie(name, cookie, max_age=int(SESSION_S), httponly=True, samesite="strict", secure=secure)
        return answer

    async def root(self, request: Request) -> Response:
        """The address itself leads to the page."""
        return RedirectResponse("/page/", status_code=307, headers=HEADERS)
