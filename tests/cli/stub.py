"""A server that answers the HTTP API from a few records: the CLI and its real client are tested over a real socket.

What it does is what a test puts into it: clusters, jobs, offers, and the frames of a watch. What it was asked is in `calls`.
File contents go into a real blob store.
"""

import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from podway.errors import UserError
from podway.hosts.blobs import BlobStore
from podway.server import api
from podway.server.pool_api import PoolsReply, PoolView, PoolWorkerView
from podway.server.service_api import ServiceView
from podway.server.volume_api import VolumesReply, VolumeView
from podway.task.pools import PoolSize
from tests.cli import records

TOKEN = "stub-token"


class Stub:
    """The answers, and a thread that gives them."""

    def __init__(self, home: Path) -> None:
        self.clusters: dict[str, api.ClusterView] = {}
        self.services: dict[str, ServiceView] = {}
        self.past: list[api.ClusterView] = []
        self.volumes = [VOLUME]
        self.pools: list[PoolView] = []
        self.jobs: dict[str, list[api.JobView]] = {}
        self.orphans: list[api.OrphanView] = []
        self.events: dict[str, list[api.EventView]] = {}
        self.later_events: dict[str, list[api.EventView]] = {}  # seen from the second look on
        self.offers = [records.offer()]
        self.frames: list[api.Frame] = []
        self.hold = False  # the watch stays open after its last frame
        self.output: dict[tuple[int, str], bytes] = {}
        self.tokens: list[api.TokenView] = []
        self.members: list[api.MemberView] = []
        self.entries: list[api.AuditView] = []
        self.shell = api.ShellReply(home="/nowhere", env={"PODWAY_RANK": "0"})
        self.launch_job: int | None = 1
        self.launch_then: list[int] = []
        self.order = records.order()
        self.moves_to: list[str] = []
        self.refuse: dict[str, UserError] = {}  # path suffix -> what to answer
        self.garbage = False
        self.calls: list[tuple[str, str, Any]] = []
        self.blobs = BlobStore(home / "stub-blobs")
        self.coming: dict[str, list[str]] = {}  # name -> states it will be seen in, one after the other
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self.hold = False
        self._server.shutdown()
        self._server.server_close()

    def announce(self, home: Path, name: str = "server.json") -> None:
        """As a real server does when it is ready."""
        home.mkdir(exist_ok=True)
        (home / name).write_text(json.dumps({"url": self.url, "token": TOKEN}))

    def add(self, *clusters: api.ClusterView) -> None:
        for cluster in clusters:
            self.clusters[cluster.name] = cluster
            self.jobs.setdefault(cluster.name, [])

    def asked(self, method: str, path: str) -> list[Any]:
        """The bodies (or queries) of every such call."""
        return [body for its_method, its_path, body in self.calls if (its_method, its_path) == (method, path)]

    # answers

    def answer(self, method: str, path: str, query: dict[str, str], data: bytes) -> Any:
        body = json.loads(data) if data and path != "/v1/files" else query
        self.calls.append((method, path, body))
        for suffix, error in self.refuse.items():
            if path.endswith(suffix):
                raise error
        for its_method, pattern, function in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and its_method == method:
                return function(self, *map(unquote, found.groups()), body, data)
        raise UserError(f"there is nothing at {path}", "", status=404)

    def find(self, name: str) -> api.ClusterView:
        if name not in self.clusters:
            raise UserError(f"there is no cluster {name!r}", "see: podway status", status=404)
        return self.clusters[name]

    def find_service(self, name: str) -> ServiceView:
        if name not in self.services:
            raise UserError(f"there is no service {name!r}", "see: podway services", status=404)
        return self.services[name]

    def seen(self, name: str, body: Any, data: bytes) -> api.ClusterView:
        cluster = self.find(name)
        if self.coming.get(name):
            cluster = msgspec.structs.replace(cluster, state=self.coming[name].pop(0))
            self.clusters[name] = cluster
        return cluster

    def move(self, name: str, state: str, coming: str, goal: str) -> api.ClusterView:
        self.clusters[name] = msgspec.structs.replace(self.find(name), state=state, goal=goal)
        self.coming[name] = [state, coming]
        return self.clusters[name]

    def find_job(self, name: str, number: str, body: Any, data: bytes) -> api.JobView:
        self.find(name)
        if number == "latest":
            if not self.jobs[name]:
                raise UserError(f"cluster {name} has no jobs", f"submit one: podway exec {name} FILE", status=404)
            return self.jobs[name][-1]
        for job in self.jobs[name]:
            if job.number == int(number):
                return job
        raise UserError(f"cluster {name} has no job {number}", f"see: podway queue {name}", status=404)

    def preview(self, body: Any, data: bytes) -> api.PreviewReply:
        name = body["options"].get("cluster") or "podway-ada-1234"
        request = {"provider": "local", "name": name, "steps": [{"verb": "start-host"}]}
        return api.PreviewReply(
            cluster=name,
            exists=name in self.clusters,
            offers=self.offers,
            order=self.order,
            request=request,
            digest=self.order.zone or "",
        )

    def launch(self, body: Any, data: bytes) -> api.LaunchReply:
        if self.moves_to:  # what was shown is not to be had any more
            self.order = msgspec.structs.replace(self.order, zone=self.moves_to.pop(0))
            self.offers = [msgspec.structs.replace(offer, zone=self.order.zone) for offer in self.offers]
            raise UserError("the offer has changed", "look again", status=409, code="offer_changed")
        name = body["options"]["cluster"]
        created = name not in self.clusters
        if created:
            self.add(records.cluster(name, state="INIT"))
            self.coming[name] = ["INIT", "UP"]
        reply = api.LaunchReply(cluster=name, cluster_id=f"id-{name}", job=self.launch_job, created=created)
        return msgspec.structs.replace(reply, then=self.launch_then)

    def execute(self, name: str, body: Any, data: bytes) -> api.LaunchReply:
        self.find(name)
        return api.LaunchReply(cluster=name, cluster_id=f"id-{name}", job=self.launch_job, created=False)

    def cancel(self, name: str, body: Any, data: bytes) -> api.CancelReply:
        self.find(name)
        open_jobs = [job for job in self.jobs[name] if job.ended is None]
        numbers = [job.number for job in open_jobs if body["all"] or job.number in body["jobs"]]
        self.jobs[name] = [
            msgspec.structs.replace(job, state="CANCELLED", ended=1.0) if job.number in numbers else job
            for job in self.jobs[name]
        ]
        return api.CancelReply(jobs=numbers)

    def autostop(self, name: str, body: Any, data: bytes) -> api.ClusterView:
        return self.find(name)

    def list_clusters(self, body: Any, data: bytes) -> api.ClustersReply:
        past = self.past if "past" in body else []
        return api.ClustersReply(clusters=[*past, *self.clusters.values()], orphans=len(self.orphans))

    def history(self, name: str, body: Any, data: bytes) -> api.EventsReply:
        looks = len([path for _, path, _ in self.calls if path.endswith(f"/{name}/events")])
        found = [*self.events.get(name, []), *(self.later_events.get(name, []) if looks > 1 else [])]
        return api.EventsReply(events=[event for event in found if event.id > int(body["after"])])

    def purge(self, body: Any, data: bytes) -> api.OrphansReply:
        self.orphans = []
        return api.OrphansReply(orphans=[])

    def list_jobs(self, name: str, body: Any, data: bytes) -> api.JobsReply:
        self.find(name)
        return api.JobsReply(jobs=self.jobs[name][-int(body["limit"]) :])

    def info(self, body: Any, data: bytes) -> api.InfoReply:
        return api.InfoReply(name="podway", version="0.1.0", api=1, user="ada", admin=True, pid=4_000_000)

    def upload(self, body: Any, data: bytes) -> api.DigestsReply:
        self.blobs.put_pack([data])
        return api.DigestsReply(missing=[])

    def make_token(self, body: Any, data: bytes) -> api.TokenReply:
        return api.TokenReply(user=body["user"], token="pw_new")

    def watched(self, name: str, number: str, body: Any, data: bytes) -> Iterator[bytes]:
        self.find_job(name, number, body, data) if self.jobs.get(name) else self.find(name)
        return self._frames()

    def _frames(self) -> Iterator[bytes]:
        for frame in self.frames:
            yield msgspec.json.encode(frame) + b"\n"
        while self.hold:
            time.sleep(0.01)

    def written(self, name: str, number: str, body: Any, data: bytes) -> Iterator[bytes]:
        return iter([self.output.get((int(body["rank"]), body["phase"]), b"")])


VOLUME = VolumeView(
    name="data",
    user="ann",
    project=None,
    provider="gcp",
    region="us-east5",
    zone="us-east5-b",
    size_gb=200,
    disk_type="pd-balanced",
    disk="projects/p/zones/us-east5-b/disks/volume-data",
    registered=False,
    state="ready",
    used_by="demo",
    created=0.0,
    hourly_cost=0.0274,
)
POOL = PoolView(
    name="workers-1",
    user="ann",
    project=None,
    size=PoolSize(workers=2, max_workers=2),
    accelerators=["v6e-8"],
    slices=1,
    revision=1,
    leaving=False,
    reason="",
    created=0.0,
    waiting=1,
    workers=[
        PoolWorkerView(number=number, cluster=f"workers-1-{number}", state=state, job=job, outdated=False)
        for number, state, job in ((1, "free", None), (2, "busy", 7))
    ],
)
_C, _S = "/v1/clusters/([^/]+)", "/v1/services/([^/]+)"
ROUTES: list[tuple[str, str, Any]] = [
    ("GET", "/v1/info", Stub.info),
    ("GET", "/v1/orphans", lambda stub, body, data: api.OrphansReply(orphans=stub.orphans)),
    ("DELETE", "/v1/orphans", Stub.purge),
    ("GET", f"{_C}/events", Stub.history),
    ("POST", "/v1/preview", Stub.preview),
    ("POST", "/v1/launch", Stub.launch),
    ("GET", "/v1/clusters", Stub.list_clusters),
    ("GET", _C, Stub.seen),
    ("DELETE", _C, lambda stub, name, body, data: stub.move(name, "TERMINATING", "GONE", "gone")),
    ("POST", f"{_C}/stop", lambda stub, name, body, data: stub.move(name, "STOPPING", "STOPPED", "stopped")),
    ("POST", f"{_C}/start", lambda stub, name, body, data: stub.move(name, "INIT", "UP", "up")),
    ("POST", f"{_C}/autostop", Stub.autostop),
    ("POST", f"{_C}/run", Stub.execute),
    ("POST", f"{_C}/jobs", Stub.execute),
    ("GET", f"{_C}/jobs", Stub.list_jobs),
    ("POST", f"{_C}/cancel", Stub.cancel),
    ("GET", f"{_C}/jobs/([0-9]+|latest)", Stub.find_job),
    ("GET", f"{_C}/jobs/([0-9]+)/watch", Stub.watched),
    ("GET", f"{_C}/jobs/([0-9]+)/output", Stub.written),
    ("GET", f"{_C}/shell", lambda stub, name, body, data: stub.shell),
    ("POST", "/v1/files/missing", lambda stub, b, d: api.DigestsReply(missing=stub.blobs.missing(b["digests"]))),
    ("GET", "/v1/files/([0-9a-f]+)/blocks", lambda stub, digest, body, data: api.BlocksReply(mean=1024, rows=b"")),
    ("POST", "/v1/files", Stub.upload),
    ("POST", "/v1/tokens", Stub.make_token),
    ("GET", "/v1/tokens", lambda stub, body, data: api.TokensReply(tokens=stub.tokens)),
    ("DELETE", "/v1/tokens/([^/]+)", lambda stub, token, body, data: api.TokensReply(tokens=[])),
    ("GET", "/v1/members", lambda stub, body, data: api.MembersReply(members=stub.members)),
    ("PUT", "/v1/projects/([^/]+)/members/([^/]+)", lambda stub, p, u, body, data: api.MembersReply(members=[])),
    ("DELETE", "/v1/projects/([^/]+)/members/([^/]+)", lambda stub, p, u, body, data: api.MembersReply(members=[])),
    ("PUT", f"{_C}/grants/([^/]+)", lambda stub, name, user, body, data: stub.find(name)),
    ("DELETE", f"{_C}/grants/([^/]+)", lambda stub, name, user, body, data: stub.find(name)),
    ("GET", _S, lambda stub, name, body, data: stub.find_service(name)),
    ("PUT", f"{_S}/grants/([^/]+)", lambda stub, name, user, body, data: stub.find_service(name)),
    ("DELETE", f"{_S}/grants/([^/]+)", lambda stub, name, user, body, data: stub.find_service(name)),
    ("GET", "/v1/pools", lambda stub, body, data: PoolsReply(pools=stub.pools)),
    ("GET", "/v1/pools/([^/]+)", lambda stub, name, body, data: POOL),
    ("DELETE", "/v1/pools/([^/]+)", lambda stub, name, body, data: PoolsReply(pools=[])),
    ("GET", "/v1/volumes", lambda stub, body, data: VolumesReply(volumes=stub.volumes)),
    ("GET", "/v1/audit", lambda stub, body, data: api.AuditReply(entries=stub.entries)),
    ("DELETE", "/v1/users/([^/]+)", lambda stub, user, body, data: api.TokensReply(tokens=[])),
]


def _handler(stub: Stub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            parts = urlsplit(self.path)
            try:
                if self.headers["Authorization"] != f"Bearer {TOKEN}":
                    raise UserError("this token is not known here", "ask for a new one", status=401)
                found = stub.answer(self.command, parts.path, dict(parse_qsl(parts.query)), self.body())
                status, pieces = 200, found if isinstance(found, Iterator) else iter([msgspec.json.encode(found)])
            except UserError as error:
                reply = api.ErrorReply(error=api.ErrorView(what=error.what, hint=error.hint, code=error.code or ""))
                status, pieces = error.status, iter([msgspec.json.encode(reply)])
            self.send_response(status)
            self.end_headers()
            for piece in [b"{nonsense"] if stub.garbage else pieces:
                self.wfile.write(piece)
                self.wfile.flush()

        do_GET = do_POST = do_PUT = do_DELETE = answer

        def body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data

        def log_message(self, *args: Any) -> None:
            pass

    return Handler
