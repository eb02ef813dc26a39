"""`Client`: everything the command line does, for Python programs and for the command line itself.

A client talks to the team's server when there was a `podway login`, else to this machine's own, which it starts when none runs
(`connection.py`). HTTP is spoken by `http1.py`, which starts ten times faster than the standard library's client; https goes
through that one. `AsyncClient` (`async_client.py`) has the same methods.

    with podway.Client() as client:
        launched = client.launch("task.yaml", cluster="demo")
        for line in client.logs("demo", launched.job):
            print(line, end="")
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, Self, TypedDict, Unpack, cast

import msgspec

from podway.control.records import ENDED, default_name
from podway.errors import UserError
from podway.launch_options import LaunchOptions, LaunchRequest, new_request_id, with_request_id
from podway.server import api
from podway.server.connection import BROKE_OFF, RETRY_S, ServerConnection
from podway.server.group_client import GroupCalls
from podway.server.pool_client import PoolCalls
from podway.server.run_client import RunCalls
from podway.server.schedule_client import ScheduleCalls
from podway.server.service_client import ServiceCalls
from podway.server.task_source import TaskKeywords, TaskSource, read_source
from podway.server.urls import query, quote
from podway.server.volume_client import VolumeCalls

if TYPE_CHECKING:
    from podway.hosts.manifest import FileTree
    from podway.plan.plans import TrainPlan
    from podway.server.planning import RehearsalResult
    from podway.server.shell import HostLogin, ShellCommand
    from podway.task.task import Autostop, Task
POLL_S = (0.05, 1.0)  # soon at first, then seldom
LONG_POLL_S = 30.0


class LaunchKeywords(TaskKeywords, total=False):
    """The same, and the fields of `LaunchOptions`."""

    cluster: str | None  # to create or reuse; None: a new name
    provider: str | None
    project: str | None
    setup: bool
    autostop: Autostop | None
    retry_until_up: bool
    valid_until_s: float | None


class LogKeywords(TypedDict, total=False):
    """Which part of a job's output, and how it is shown."""

    follow: bool  # to the end of the job; False: what there is now
    tail: int  # only the last lines of what there is; 0: all
    rank: int | None  # one host's output
    raw: bool  # every host's copy of lines that are alike
    timestamps: bool  # the time (UTC) before each line
    spread: bool  # behind a line shown once for several hosts, the range of each figure that differs


class Client(ServiceCalls, RunCalls, VolumeCalls, ScheduleCalls, PoolCalls, GroupCalls):
    """Everything the command line does, against a team's server (after `podway login`, or by `url` and `token`) or this machine's own.

    Every method raises UserError, with what to do, when it cannot do what it is asked.
    """

    def __init__(self, url: str | None = None, token: str | None = None, *, retry_s: float = RETRY_S) -> None:
        self._connection = ServerConnection(url, token, retry_s)
        self._call = self._connection.call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the streams that are open; from another thread too. Jobs go on."""
        self._connection.close()

    @property
    def own_server(self) -> bool:
        """Whether the server is this machine's own, of the same user, and not a team's."""
        return self._connection.is_own

    def fork(self) -> Client:
        """Another client of the same server, closed on its own."""
        other = Client()
        other._connection = self._connection.fork()
        other._call = other._connection.call
        return other

    # launching

    def request(self, task: TaskSource, **keywords: Unpack[LaunchKeywords]) -> LaunchRequest:
        """A launch as one value, to preview and to submit. `task`: a task file's path, its content as a dict, or a Task."""
        ours = {key: value for key, value in keywords.items() if key in LaunchOptions.__struct_fields__}
        others = {key: value for key, value in keywords.items() if key not in ours}
        options = msgspec.structs.replace(LaunchOptions(), **ours)
        return LaunchRequest(task=read_source(task, **cast("TaskKeywords", others)), options=options)

    def preview(self, request: LaunchRequest) -> api.PreviewReply:
        """What a launch would do: the offers, the chosen one, and the exact request."""
        self._connection.match_environment()
        return self._call("POST", "/v1/preview", api.PreviewReply, request)

    def launch(
        self,
        task: TaskSource,
        *,
        files: tuple[FileTree, ...] | None = None,
        **keywords: Unpack[LaunchKeywords],
    ) -> api.LaunchReply:
        """Create or reuse a cluster, upload the task's files and queue it there; returns at once. `files`: uploaded before."""
        request = self.request(task, **keywords)
        trees = self._upload(request.task) if files is None else files
        return self.submit(msgspec.structs.replace(request, files=trees))

    def submit(self, request: LaunchRequest) -> api.LaunchReply:
        """Launch exactly this request; its files have been uploaded."""
        # The name and the request's id are chosen here, so that a request sent twice creates one cluster and one job.
        name = request.options.cluster or default_name(os.environ.get("USER", ""))
        options = msgspec.structs.replace(request.options, cluster=name)
        request = with_request_id(msgspec.structs.replace(request, options=options))
        self._connection.match_environment()
        return self._call("POST", "/v1/launch", api.LaunchReply, request)

    def exec(
        self,
        cluster: str,
        task: TaskSource,
        *,
        files: tuple[FileTree, ...] | None = None,
        **keywords: Unpack[TaskKeywords],
    ) -> api.LaunchReply:
        """Queue a task on a cluster that is up, without its setup; returns at once. `files`: uploaded before."""
        read = read_source(task, **keywords)
        trees = self._upload(read, mounts=False) if files is None else files
        body = api.ExecBody(task=read, files=trees, request_id=new_request_id())
        return self._call("POST", f"{_at(cluster)}/jobs", api.LaunchReply, body)

    def run(self, cluster: str, command: str) -> api.LaunchReply:
        """Run a command on every host at once, bypassing the queue."""
        body = api.RunBody(command=command, request_id=new_request_id())
        return self._call("POST", f"{_at(cluster)}/run", api.LaunchReply, body)

    # jobs

    def jobs(self, cluster: str, limit: int = 1000) -> list[api.JobView]:
        """A cluster's jobs, oldest first."""
        return self._call("GET", f"{_at(cluster)}/jobs?limit={limit}", api.JobsReply).jobs

    def job(self, cluster: str, number: int | None = None, wait: float = 0.0) -> api.JobView:
        """One job (None: the latest), once it has ended or after `wait` seconds."""
        which = "latest" if number is None else str(number)
        return self._call("GET", f"{_at(cluster)}/jobs/{which}?wait={wait}", api.JobView)

    def latest(self, cluster: str) -> int:
        """The number of the latest job; a command of `run` counts where there is nothing else."""
        return self.job(cluster).number

    def wait(self, cluster: str, job: int | None = None, *, timeout: float | None = None) -> api.JobView:
        """Wait until a job (None: the latest) has ended; TimeoutError if it has not within `timeout` seconds."""
        number = self.latest(cluster) if job is None else job
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = LONG_POLL_S if deadline is None else min(LONG_POLL_S, max(0.0, deadline - time.monotonic()))
            found = self.job(cluster, number, wait=left)
            if found.state in ENDED:
                return found
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"job {number} on {cluster} is {found.state} after {timeout:g} s")

    def cancel(self, cluster: str, jobs: Iterable[int] = (), *, every: bool = False) -> list[int]:
        """Ask jobs to end: these, all, or the latest that has not ended; those that were asked. `wait` for their end."""
        body = api.CancelBody(jobs=tuple(jobs), all=every)
        return self._call("POST", f"{_at(cluster)}/cancel", api.CancelReply, body).jobs

    def usage(self, cluster: str, job: int) -> list[api.UsageView]:
        """What every rank of a job uses now."""
        return self._call("GET", f"{_at(cluster)}/jobs/{job}/usage", api.UsageReply).ranks

    # streams

    def logs(self, cluster: str, job: int | None = None, **keywords: Unpack[LogKeywords]) -> Iterator[str]:
        """The lines of a job (None: the latest) as `podway logs` prints them."""
        for frame in self.watch(cluster, self.latest(cluster) if job is None else job, **keywords):
            if frame.kind == "log":
                yield frame.text

    def watch(
        self,
        cluster: str,
        job: int,
        *,
        follow: bool = True,
        tail: int = 0,
        rank: int | None = None,
        raw: bool = False,
        timestamps: bool = False,
        spread: bool = False,
        colour: bool = False,
        event: int = 0,
    ) -> Iterator[api.Frame]:
        """A job's events and log lines to its end, across restarts of the server: nothing is lost and nothing comes twice."""
        cursor = ""
        shown = {
            "follow": "" if follow else "false",
            "rank": rank,
            "raw": raw,
            "timestamps": timestamps,
            "spread": spread,
            "colour": colour,
        }

        def where() -> str:
            # Of the tail only the first answer knows; from then on the cursor says where to go on.
            found = query({**shown, "tail": 0 if cursor else tail, "cursor": cursor, "event": event})
            return f"{_at(cluster)}/jobs/{job}/watch?{found}"

        for frame in self._connection.frames(where, api.Frame):
            cursor, event = frame.cursor or cursor, frame.event or event
            if frame.kind != "ping":
                yield frame
            if frame.kind == "end":
                return

    def output(self, cluster: str, job: int, rank: int, phase: str) -> Iterator[bytes]:
        """The raw bytes of one rank's phase (`setup` or `run`)."""
        path = f"{_at(cluster)}/jobs/{job}/output?rank={rank}&phase={phase}"
        with self._connection.opened("GET", path) as response:
            while chunk := response.read(1 << 16):
                yield chunk

    # clusters

    def clusters(self, past: float | None = None) -> list[api.ClusterView]:
        """Clusters that exist; with `past`, also deleted ones created since then."""
        return self.overview(past).clusters

    def overview(self, past: float | None = None) -> api.ClustersReply:
        """Clusters, and how many orphaned resources the server has noticed."""
        since = "" if past is None else f"?past={past}"
        return self._call("GET", f"/v1/clusters{since}", api.ClustersReply)

    def cluster(self, name: str) -> api.ClusterView:
        """One cluster."""
        return self._call("GET", _at(name), api.ClusterView)

    def wait_until(self, cluster: str, state: str = "UP", *, timeout: float | None = None) -> api.ClusterView:
        """Wait until a cluster is UP, STOPPED or GONE; TimeoutError if it is not within `timeout` seconds."""
        begun, (pause, most) = time.monotonic(), POLL_S
        while True:
            found = self.cluster(cluster)
            if found.state == state:
                return found
            if found.state == "GONE":
                raise UserError(f"cluster {cluster} is GONE: {found.reason}", "launch it again")
            if timeout is not None and time.monotonic() - begun > timeout:
                raise TimeoutError(f"cluster {cluster} is {found.state} after {timeout:g} s")
            time.sleep(pause)
            pause = min(most, pause * 1.5)

    def stop(self, cluster: str) -> api.ClusterView:
        """Stop the hosts and keep their disks; returns at once."""
        return self._call("POST", f"{_at(cluster)}/stop", api.ClusterView)

    def start(self, cluster: str) -> api.ClusterView:
        """Start stopped hosts; returns at once."""
        return self._call("POST", f"{_at(cluster)}/start", api.ClusterView)

    def down(self, cluster: str) -> api.ClusterView:
        """Delete a cluster; returns at once."""
        return self._call("DELETE", _at(cluster), api.ClusterView)

    def autostop(self, cluster: str, autostop: Autostop | None) -> api.ClusterView:
        """Set the autostop policy, or clear it."""
        return self._call("POST", f"{_at(cluster)}/autostop", api.ClusterView, api.AutostopBody(autostop=autostop))

    def events(self, cluster: str, after: int = 0) -> list[api.EventView]:
        """A cluster's history after an event id, oldest first."""
        return self._call("GET", f"{_at(cluster)}/events?after={after}", api.EventsReply).events

    def shell(self, cluster: str, rank: int = 0, command: str | None = None) -> ShellCommand:
        """The command line that opens a shell on a host, or runs one command there; made here from what the server knows."""
        from podway.server.shell import shell_command  # few commands need it

        return shell_command(self.host_login(cluster, rank), command, cluster=cluster, rank=rank)

    def host_login(self, cluster: str, rank: int = 0) -> HostLogin:
        """Where a host is; at a team's server, with a certificate for a few minutes."""
        from podway.server.shell import host_login  # few commands need it

        return host_login(self._connection, _at(cluster), cluster=cluster, rank=rank)

    def orphans(self, *, look: bool = True) -> api.OrphansReply:
        """Resources of this Podway that no cluster accounts for: asked of every provider now, or as last seen."""
        return self._call("GET", f"/v1/orphans?look={'true' if look else 'false'}", api.OrphansReply)

    def purge(self) -> api.OrphansReply:
        """Delete those resources; what is still there afterwards."""
        while (reply := self._call("DELETE", "/v1/orphans", api.OrphansReply)).purging:
            continue
        return reply

    # the server

    def info(self) -> api.InfoReply:
        """Which server this is, and who you are to it."""
        return self._call("GET", "/v1/info", api.InfoReply)

    def page_link(self) -> str:
        """An address that opens the web page once, within two minutes, as you."""
        from podway.server.page_api import SessionLinkReply

        path = self._call("POST", "/v1/session-links", SessionLinkReply).path
        return f"{self._connection.address}{path}"

    def make_token(
        self,
        user: str,
        role: Literal["admin", "member", "viewer", "gateway"] = "member",
        *,
        name: str = "",
        lifetime_s: float | None = 90 * 86400.0,
    ) -> str:
        """A token for a person of the team; `lifetime_s` None: it never expires."""
        body = api.TokenBody(user=user, role=role, name=name, lifetime_s=lifetime_s)
        return self._call("POST", "/v1/tokens", api.TokenReply, body).token

    def tokens(self) -> list[api.TokenView]:
        """Your tokens; everybody's, for an administrator."""
        return self._call("GET", "/v1/tokens", api.TokensReply).tokens

    def members(self) -> list[api.MemberView]:
        """Who is in your projects; in all of them, for an administrator."""
        return self._call("GET", "/v1/members", api.MembersReply).members

    def set_member(self, project: str, user: str, role: Literal["member", "viewer"] | None = "member") -> None:
        """Put a person into a project, or (None) take them out."""
        path = f"/v1/projects/{quote(project)}/members/{quote(user)}"
        if role is None:
            self._call("DELETE", path, api.MembersReply)
        else:
            self._call("PUT", path, api.MembersReply, api.MemberBody(role=role))

    def share(self, cluster: str, user: str, right: Literal["view", "use"] | None = "use") -> api.ClusterView:
        """Let a person view or use a cluster, or (None) no longer."""
        path = f"{_at(cluster)}/grants/{quote(user)}"
        if right is None:
            return self._call("DELETE", path, api.ClusterView)
        return self._call("PUT", path, api.ClusterView, api.GrantBody(right=right))

    def audit(self, limit: int = 100, user: str | None = None) -> list[api.AuditView]:
        """Who did what, the latest first."""
        return self._call("GET", f"/v1/audit?{query({'limit': limit, 'user': user})}", api.AuditReply).entries

    def revoke_token(self, token_id: str) -> None:
        """Forget one token."""
        self._call("DELETE", f"/v1/tokens/{quote(token_id)}", api.TokensReply)

    def revoke(self, user: str) -> None:
        """Revoke a person's tokens."""
        self._call("DELETE", f"/v1/users/{quote(user)}", api.TokensReply)

    # knowing before paying, on this machine

    def plan(
        self,
        model: str,
        *,
        seq: int,
        tpu: str = "any",
        batch: int | None = None,
        mesh: str | None = None,
        microbatches: int | None = None,
        remat: str | None = None,
        slices: int | None = None,
        tokens: float | None = None,
        days: float | None = None,
        budget: float | None = None,
        spot: bool = False,
    ) -> list[TrainPlan]:
        """Training plans, best first: slice, mesh, microbatches and remat, with memory, step time and cost."""
        from podway.plan.search import PlanOptions  # the planner is slow to import
        from podway.server.planning import plan_training

        options = PlanOptions(
            seq=seq,
            batch=batch,
            microbatches=microbatches,
            remat=remat,
            slices=slices,
            tokens=tokens,
            days=days,
            budget=budget,
            spot=spot,
        )
        return plan_training(model, tpu, mesh, options)

    def rehearse(self, model: str, plan: TrainPlan, *, full: bool = False) -> RehearsalResult:
        """Compile a plan's step with the TPU compiler: bytes of HBM, and seconds of a step. Needs podway[rehearse]."""
        from podway.server.planning import rehearse_plan  # the planner is slow to import

        return rehearse_plan(model, plan, full=full)

    # files

    def missing(self, digests: Iterable[str]) -> api.DigestsReply:
        """Which contents the server does not have, or has a part of."""
        body = api.DigestsBody(digests=tuple(digests))
        return self._call("POST", "/v1/files/missing", api.DigestsReply, body)

    def content_blocks(self, digest: str) -> api.BlocksReply:
        """The blocks of a content that the server has."""
        return self._call("GET", f"/v1/files/{digest}/blocks", api.BlocksReply)

    def upload(self, pack: Iterable[bytes]) -> None:
        """Send contents as a pack, streamed."""
        try:
            with self._connection.sent_once("POST", "/v1/files", pack) as response:
                response.read()
        except OSError as error:  # a pack is read once and cannot be sent again
            what = f"the upload broke off: {error}"
            raise UserError(what, "run the command again: it goes on where it stopped", code=BROKE_OFF) from None

    def _upload(self, task: Task, *, mounts: bool = True) -> tuple[FileTree, ...]:
        from podway.server.uploading import NoProgress, upload  # reading trees costs more than all the rest

        return upload(self, NoProgress(), task, mounts=mounts)


def _at(cluster: str) -> str:
    return f"/v1/clusters/{quote(cluster)}"
