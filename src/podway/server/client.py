"""`Client`: the verbs over HTTP, for the CLI and for Python programs.

A client talks to the team's server when there was a `podway login`, else to this machine's own, which it starts when none runs.
HTTP is spoken by `http1.py`, which starts ten times faster than the standard library's client; https goes through that one.

    client = podway.Client()
    launched = client.launch(task, cluster="demo")
    for frame in client.watch("demo", launched.job): ...
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from podway.control.records import default_name
from podway.decoding import from_json, json_decoder
from podway.errors import UserError
from podway.home import home
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.server import api
from podway.server.http1 import Response, request

if TYPE_CHECKING:
    from podway.hosts.manifest import FileTree
    from podway.task.task import Autostop, Task

T = TypeVar("T")
RECONNECT_S = 60.0


class Unreachable(Exception):
    """No server answers at the address we have."""


class Client:
    """See the module docstring. Every method raises UserError with what to do when it cannot."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self._place = home()
        self._fixed = (url, token or "") if url else None
        self._known: tuple[str, str] | None = None

    # verbs

    def info(self) -> api.InfoReply:
        """Which server, and who you are to it."""
        return self._call("GET", "/v1/info", api.InfoReply)

    def preview(self, request: LaunchRequest) -> api.PreviewReply:
        """What a launch would do."""
        return self._call("POST", "/v1/preview", api.PreviewReply, request)

    def launch(self, task: Task, *, files: tuple[FileTree, ...] = (), **options: Any) -> api.LaunchReply:
        """Create or reuse a cluster and queue the task on it; returns at once. `options`: the fields of LaunchOptions."""
        return self.submit(LaunchRequest(task=task, files=files, options=LaunchOptions(**options)))

    def submit(self, request: LaunchRequest) -> api.LaunchReply:
        """The same for a request that was previewed."""
        # The name and the request's id are chosen here, so that a request sent twice creates one cluster and one job.
        name = request.options.cluster or default_name(os.environ.get("USER", ""))
        options = msgspec.structs.replace(request.options, cluster=name)
        request = msgspec.structs.replace(request, options=options, request_id=request.request_id or _request_id())
        return self._call("POST", "/v1/launch", api.LaunchReply, request)

    def execute(self, cluster: str, task: Task, files: tuple[FileTree, ...] = ()) -> api.LaunchReply:
        """Queue a task on a cluster that is up."""
        return self._call(
            "POST",
            f"{_at(cluster)}/jobs",
            api.LaunchReply,
            api.ExecBody(task=task, files=files, request_id=_request_id()),
        )

    def run(self, cluster: str, command: str) -> api.LaunchReply:
        """A command on every host, now."""
        return self._call(
            "POST", f"{_at(cluster)}/run", api.LaunchReply, api.RunBody(command=command, request_id=_request_id())
        )

    def clusters(self, past: float | None = None) -> list[api.ClusterView]:
        """Live clusters; also those gone that were created since `past`."""
        return self.overview(past).clusters

    def overview(self, past: float | None = None) -> api.ClustersReply:
        """Clusters, and how many strays the server has noticed."""
        query = "" if past is None else f"?past={past}"
        return self._call("GET", f"/v1/clusters{query}", api.ClustersReply)

    def cluster(self, name: str) -> api.ClusterView:
        """One cluster."""
        return self._call("GET", _at(name), api.ClusterView)

    def jobs(self, cluster: str, limit: int = 1000) -> list[api.JobView]:
        """A cluster's jobs."""
        return self._call("GET", f"{_at(cluster)}/jobs?limit={limit}", api.JobsReply).jobs

    def job(self, cluster: str, number: int, wait: float = 0.0) -> api.JobView:
        """One job, when it has ended or `wait` is over."""
        return self._call("GET", f"{_at(cluster)}/jobs/{number}?wait={wait}", api.JobView)

    def cancel(self, cluster: str, jobs: Iterable[int] = (), *, every: bool = False) -> list[int]:
        """Ask jobs to end."""
        body = api.CancelBody(jobs=tuple(jobs), all=every)
        return self._call("POST", f"{_at(cluster)}/cancel", api.CancelReply, body).jobs

    def stop(self, cluster: str) -> api.ClusterView:
        """Stop the hosts."""
        return self._call("POST", f"{_at(cluster)}/stop", api.ClusterView)

    def start(self, cluster: str) -> api.ClusterView:
        """Start stopped hosts."""
        return self._call("POST", f"{_at(cluster)}/start", api.ClusterView)

    def down(self, cluster: str) -> api.ClusterView:
        """Delete a cluster."""
        return self._call("DELETE", _at(cluster), api.ClusterView)

    def autostop(self, cluster: str, autostop: Autostop | None) -> api.ClusterView:
        """Set or clear the rest rule."""
        return self._call("POST", f"{_at(cluster)}/autostop", api.ClusterView, api.AutostopBody(autostop=autostop))

    def strays(self, *, look: bool = True) -> api.StraysReply:
        """Resources of this Podway that no cluster accounts for: asked of every provider now, or as last seen."""
        return self._call("GET", f"/v1/strays?look={'true' if look else 'false'}", api.StraysReply)

    def purge(self) -> api.StraysReply:
        """Delete those resources; what is still there afterwards."""
        return self._call("DELETE", "/v1/strays", api.StraysReply)

    def events(self, cluster: str, after: int = 0) -> list[api.EventView]:
        """History after an event id."""
        return self._call("GET", f"{_at(cluster)}/events?after={after}", api.EventsReply).events

    def shell(self, cluster: str, rank: int = 0, command: str | None = None) -> api.ShellReply:
        """How to open a shell on a host, or run one command there."""
        query = _query({"rank": rank, "command": command})
        return self._call("GET", f"{_at(cluster)}/shell?{query}", api.ShellReply)

    def usage(self, cluster: str, job: int) -> list[api.UsageView]:
        """What every rank of a job uses now."""
        return self._call("GET", f"{_at(cluster)}/jobs/{job}/usage", api.UsageReply).ranks

    def make_token(self, user: str, *, admin: bool = False) -> str:
        """A token for a person of the team."""
        return self._call("POST", "/v1/tokens", api.TokenReply, api.TokenBody(user=user, admin=admin)).token

    def users(self) -> list[api.UserView]:
        """Who may use the server."""
        return self._call("GET", "/v1/users", api.UsersReply).users

    def revoke(self, user: str) -> None:
        """Forget a person's tokens."""
        self._call("DELETE", f"/v1/users/{_quote(user)}", api.UsersReply)

    # files and streams

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Which contents the server does not have."""
        body = api.DigestsBody(digests=tuple(digests))
        return self._call("POST", "/v1/files/missing", api.DigestsReply, body).missing

    def upload(self, pack: Iterable[bytes]) -> None:
        """Send contents as a pack, streamed."""
        try:
            with self._send("POST", "/v1/files", pack, "application/octet-stream") as response:
                response.read()
        except OSError as error:  # a pack is read once and cannot be sent again
            raise UserError(f"the upload broke off: {error}", "run the command again; what arrived is kept") from None

    def output(self, cluster: str, job: int, rank: int, phase: str) -> Iterator[bytes]:
        """The raw bytes of one rank's phase."""
        with self._open("GET", f"{_at(cluster)}/jobs/{job}/output?rank={rank}&phase={phase}") as response:
            while chunk := response.read(1 << 16):
                yield chunk

    def watch(self, cluster: str, job: int, **options: Any) -> Iterator[api.Frame]:
        """Follow a job to its end, across restarts of the server: nothing is lost and nothing comes twice."""
        cursor, event, decoder = "", int(options.pop("event", 0)), json_decoder(api.Frame)
        broken_since: float | None = None
        while True:
            query = _query({**options, "cursor": cursor, "event": event})
            try:
                with self._open("GET", f"{_at(cluster)}/jobs/{job}/watch?{query}") as response:
                    while line := response.readline():
                        broken_since = None
                        frame = decoder.decode(line)
                        cursor, event = frame.cursor or cursor, frame.event or event
                        if frame.kind != "ping":
                            yield frame
                        if frame.kind == "end":
                            return
            except (OSError, msgspec.DecodeError, Unreachable) as error:
                broken_since = broken_since or time.monotonic()
                if time.monotonic() - broken_since > RECONNECT_S:
                    raise UserError(f"the Podway server does not answer: {error}", "run the command again") from None
            time.sleep(0.2)
            if cursor:
                options["tail"] = 0  # what was asked for at first has been shown; from here on only the cursor counts

    # the wire

    def _call(self, method: str, path: str, kind: type[T], body: msgspec.Struct | None = None) -> T:
        data = None if body is None else msgspec.json.encode(body)
        with self._open(method, path, data, "application/json") as response:
            return from_json(response.read(), kind)

    def _open(
        self, method: str, path: str, data: bytes | Iterable[bytes] | None = None, kind: str = "application/json"
    ) -> Response:
        try:
            return self._send(method, path, data, kind)
        except (OSError, Unreachable) as error:
            if self._fixed or (self._place / "remote.json").exists():
                url = self._address()[0]
                raise UserError(
                    f"no Podway server answers at {url} ({error})", "check the address, or: podway logout"
                ) from None
            if isinstance(error, TimeoutError):
                raise UserError("the Podway server does not answer", "see its log: podway server logs") from None
        self._known = None
        from podway.server.starting import start_server  # rarely needed, and subprocess is slow to import

        start_server(self._place)
        return self._send(method, path, data, kind)

    def _send(self, method: str, path: str, data: bytes | Iterable[bytes] | None, kind: str) -> Response:
        url, token = self._address()
        scheme, _, rest = url.partition("://")
        host, _, base = rest.partition("/")
        headers = {"Authorization": f"Bearer {token}"}
        if data is not None:
            headers["Content-Type"] = kind
        response = request(scheme, host, method, f"/{base}".rstrip("/") + path, headers, data)
        if response.status >= 400:
            raise _problem(response)
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
                raise Unreachable(str(path)) from None
        return self._known


def _request_id() -> str:
    return os.urandom(8).hex()


def _problem(response: Response) -> UserError:
    data = response.read()
    try:
        error = from_json(data, api.ErrorReply).error
    except msgspec.DecodeError:
        return UserError(f"the server answered {response.status}", "is this a Podway server?", status=response.status)
    return UserError(error.what, error.hint, status=response.status)


def _at(cluster: str) -> str:
    return f"/v1/clusters/{_quote(cluster)}"


def _quote(text: str) -> str:
    if text.isascii() and text.replace("-", "").replace("_", "").isalnum():
        return text
    from urllib.parse import quote  # most names need no quoting, and urllib is slow to import

    return quote(text, safe="")


def _query(options: dict[str, Any]) -> str:
    pairs = []
    for key, value in options.items():
        if value is not None and value != "" and value is not False:
            pairs.append(f"{key}={_quote('true' if value is True else str(value))}")
    return "&".join(pairs)
