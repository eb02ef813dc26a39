"""How a client reaches its server: the address, one request at a time, and errors as UserErrors.

The address is the one given, else the team's server after a `podway login`, else this machine's own, which is started when none
runs. A call that is safe to send twice is sent again while the connection breaks or the
server is away, until a deadline. Requests that are open are known, so that `close` from another thread ends them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from podway.decoding import from_json, json_decoder
from podway.errors import UserError
from podway.home import home
from podway.server import api
from podway.server.http1 import OpenSockets, Response, request
from podway.version import __version__

T = TypeVar("T")
RETRY_S = 20.0  # how long a call that is safe to repeat is repeated while the network or the server is away
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
SILENT = "silent"  # the server took the request and did not answer within its time limit
PROVIDER_FAILED = "provider_failed"  # the server is there, and a cloud is not: `app.py` answers 503 with this code
RECONNECT_S = 60.0  # how long a stream that broke is tried again
BROKE_OFF = "upload_broke_off"  # the connection did, in the middle of an upload
OTHER_VERSION = "other_version"  # client and server speak different APIs: `app.py` answers 426 with this code
AWAY = (502, 503, 504)  # what a proxy answers for a server that restarts
Payload = bytes | Iterable[bytes] | None


class NoServer(Exception):
    """No server answers at the address we have."""


class ClientClosed(RuntimeError):
    """The client was closed before or during a request."""

    def __init__(self) -> None:
        super().__init__("this client is closed")


class ServerConnection:
    """See the module docstring."""

    def __init__(self, url: str | None = None, token: str | None = None, retry_s: float = RETRY_S) -> None:
        self.retry_s = retry_s
        self._place = home()
        self._fixed = (url.rstrip("/"), token or "") if url else None
        self._known: tuple[str, str] | None = None
        self._sockets = OpenSockets()
        self.closed = False

    def fork(self) -> ServerConnection:
        """Another one to the same server, closed on its own."""
        url, token = self._fixed or (None, None)
        other = ServerConnection(url, token, self.retry_s)
        other._place, other._known = self._place, self._known
        return other

    @property
    def is_own(self) -> bool:
        """Whether it is this machine's own server, of the same user."""
        return self._fixed is None and not (self._place / "remote.json").exists()

    def match_environment(self) -> None:
        """Before a launch: this machine's own server has the settings for providers that this process has."""
        if self.closed or not self.is_own:
            return
        from podway.server.environment import match_environment  # few commands launch

        def providers_in_use() -> set[str]:
            return {cluster.order.provider for cluster in self.call("GET", "/v1/clusters", api.ClustersReply).clusters}

        if match_environment(self._place, providers_in_use):
            self._known = None

    def close(self) -> None:
        """End every open request; its reader gets `ClientClosed`."""
        self.closed = True
        self._sockets.shut()

    @property
    def address(self) -> str:
        """The server's URL, once a request was made."""
        known = self._fixed or self._known
        return known[0] if known else ""

    def call(self, method: str, path: str, kind: type[T], body: msgspec.Struct | None = None) -> T:
        """One request with a JSON answer."""
        data = None if body is None else msgspec.json.encode(body)
        deadline, pause = time.monotonic() + self.retry_s, FIRST_PAUSE_S
        while True:
            try:
                with self.opened(method, path, data) as response:
                    return from_json(response.read(), kind)
            except msgspec.DecodeError as error:
                raise UserError(
                    f"this is Podway {__version__}, and it cannot read what the server at {self.address} answers: {error}",
                    "install the version that `podway server status` shows, or restart your own: podway server stop",
                ) from None
            except (OSError, UserError) as error:
                left = deadline - time.monotonic()
                if not _is_passing(error) or not _is_safe(method, path) or left <= 0:
                    raise _as_user_error(error) from None
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    @contextlib.contextmanager
    def opened(self, method: str, path: str, data: Payload = None) -> Iterator[Response]:
        """One request; the answer while it is read. Starts this machine's server if that is needed."""
        with self._until_closed(), self._answered(method, path, data) as response:
            yield response

    def frames(self, where: Callable[[], str], kind: type[T], *, once: bool = False) -> Iterator[T]:
        """What a stream brings, across restarts of the server: it is opened again at `where()`, which says where to go on, until the
        caller has enough; with `once`, until it ends."""
        decoder = json_decoder(kind)
        broken_since: float | None = None
        while True:
            try:
                with self.opened("GET", where()) as response:
                    while line := response.readline():
                        broken_since = None
                        yield decoder.decode(line)
                if once:
                    return
            except ClientClosed:
                return
            except (OSError, msgspec.DecodeError, NoServer) as error:
                broken_since = broken_since or time.monotonic()
                if time.monotonic() - broken_since > RECONNECT_S:
                    raise UserError(f"the Podway server does not answer: {error}", "run the command again") from None
            time.sleep(0.2)

    @contextlib.contextmanager
    def sent_once(self, method: str, path: str, data: Payload) -> Iterator[Response]:
        """The same for a body that can be read only once: a failure is an OSError."""
        with self._until_closed(), self._send(method, path, data, "application/octet-stream") as response:
            yield response

    @contextlib.contextmanager
    def _until_closed(self) -> Iterator[None]:
        """A connection that ends because `close` was called is not a network error."""
        try:
            yield
        except (OSError, UserError):
            if self.closed:
                raise ClientClosed from None
            raise

    def _answered(self, method: str, path: str, data: Payload) -> Response:
        try:
            return self._send(method, path, data)
        except (OSError, NoServer) as error:
            if self.closed:
                raise ClientClosed from None
            if self._fixed or (self._place / "remote.json").exists():
                url = self._address()[0]
                raise UserError(
                    f"no Podway server answers at {url} ({getattr(error, 'strerror', None) or error})",
                    "check the address, or: podway logout",
                    status=503,
                    code=SILENT if isinstance(error, TimeoutError) else None,
                ) from None
            if isinstance(error, TimeoutError):
                raise UserError(
                    "the Podway server does not answer", "see its log: podway server logs", status=503, code=SILENT
                ) from None
        self._known = None
        from podway.server.starting import start_server  # rarely needed, and subprocess is slow to import

        start_server(self._place)
        return self._send(method, path, data)

    def _send(self, method: str, path: str, data: Payload, kind: str = "application/json") -> Response:
        if self.closed:
            raise ClientClosed
        url, token = self._address()
        scheme, _, rest = url.partition("://")
        host, _, base = rest.partition("/")
        headers = {"Authorization": f"Bearer {token}", api.VERSION_HEADER: f"{api.VERSION} {__version__}"}
        if data is not None:
            headers["Content-Type"] = kind
        response = request(scheme, host, method, f"/{base}".rstrip("/") + path, headers, data, self._sockets)
        if response.status >= 400:
            with response:
                problem = _problem(response)
            if problem.code == OTHER_VERSION and self.is_own:
                problem = UserError(problem.what, "restart it with this version: podway server stop", status=426)
            raise problem
        return response

    def _address(self) -> tuple[str, str]:
        if self._fixed:
            return self._fixed
        if self._known is None:
            remote = self._place / "remote.json"
            path = remote if remote.exists() else self._place / "server.json"
            try:
                found = msgspec.json.decode(path.read_bytes())
                self._known = (found["url"], found["token"])
            except (OSError, msgspec.DecodeError, KeyError, TypeError):
                raise NoServer(str(path)) from None
        return self._known


def _is_safe(method: str, path: str) -> bool:
    """Whether a request may be sent again after its answer was lost: all but making a token or key. A launch carries its id."""
    return not (method == "POST" and path in ("/v1/tokens", "/v1/gateway/keys"))


def _is_passing(error: OSError | UserError) -> bool:
    """Whether it may be over soon. A server that was silent for the whole time limit of a request is not asked again."""
    if isinstance(error, UserError):
        return error.status in AWAY and error.code not in (SILENT, PROVIDER_FAILED)
    return not isinstance(error, TimeoutError)


def _as_user_error(error: OSError | UserError) -> UserError:
    if isinstance(error, UserError):
        return error
    return UserError(f"the connection to the Podway server broke off: {error}", "run the command again", status=503)


def _problem(response: Response) -> UserError:
    data = response.read()
    try:
        error = from_json(data, api.ErrorReply).error
    except msgspec.DecodeError:
        return UserError(f"the server answered {response.status}", "is this a Podway server?", status=response.status)
    return UserError(error.what, error.hint, status=response.status, code=error.code)
