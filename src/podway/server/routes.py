"""Every route of the API in one table, and the functions behind them.

A row holds the method, the path, the function, and the types of body and answer: the table is what the server mounts, what the
OpenAPI document is made from, and what the fuzz test walks. The functions are synchronous, run in a thread, and only call the
verbs; the streams (`watch`, file upload) are in `streams.py`.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from podway.control.archive import Archive
from podway.control.heartbeat import rest_rule
from podway.control.records import Cluster, shell_key
from podway.control.store import Store
from podway.control.strays import Strays
from podway.control.verbs import Control
from podway.errors import UserError
from podway.hosts.blobs import BlobStore
from podway.launch import Launch
from podway.launch_options import LaunchRequest
from podway.provider_table import row_of
from podway.providers import Provider, SupportsShell
from podway.server import api, views
from podway.task.task import Task
from podway.version import __version__


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """What the functions work with."""

    control: Control
    store: Store
    blobs: BlobStore
    archive: Archive
    provider: Callable[[str], Provider]
    strays: Strays
    local_token: str
    local_user: str


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks."""

    user: str
    admin: bool


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request, decoded."""

    services: Services
    caller: Caller
    path: dict[str, str]
    query: dict[str, str]
    body: Any = None


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    method: str
    path: str
    function: Callable[[Call], Any]
    summary: str
    reply: type
    body: type | None = None
    query: dict[str, type] = {}
    admin: bool = False


def info(call: Call) -> api.InfoReply:
    """Which server this is, and who you are to it."""
    return api.InfoReply(
        name="podway",
        version=__version__,
        api=api.VERSION,
        user=call.caller.user,
        admin=call.caller.admin,
        pid=os.getpid(),
    )


def preview(call: Call) -> api.PreviewReply:
    """What a launch would do, and the exact request; nothing is done."""
    return views.preview_view(call.services.control.preview(call.body, call.caller.user))


def launch(call: Call) -> api.LaunchReply:
    """Make or take a cluster and queue the task on it."""
    done = call.services.control.launch(call.body, call.caller.user)
    return _launched(done)


def execute(call: Call) -> api.LaunchReply:
    """Queue a task on a cluster, without setup."""
    body: api.ExecBody = call.body
    done = call.services.control.execute(call.path["cluster"], body.task, body.files, call.caller.user, body.request_id)
    return _launched(done)


def run(call: Call) -> api.LaunchReply:
    """Run a command on every host now."""
    done = call.services.control.run_everywhere(
        call.path["cluster"], call.body.command, call.caller.user, call.body.request_id
    )
    return _launched(done)


def clusters(call: Call) -> api.ClustersReply:
    """Every live cluster; with `past=SECONDS`, also those gone that were created since then."""
    store = call.services.store
    found = store.live_clusters()
    if "past" in call.query:
        found = store.past_clusters(_number(call.query, "past"))[::-1] + found
    counts = store.open_job_counts()
    shown = [views.cluster_view(c, counts.get(c.id, 0)) for c in found]
    return api.ClustersReply(clusters=shown, strays=len(call.services.strays.last.strays))


def strays(call: Call) -> api.StraysReply:
    """What is there of this Podway that no cluster accounts for: every provider is asked, or with look=false none."""
    known = call.services.strays
    return views.strays_view(known.last if call.query.get("look") == "false" else known.look_now())


def purge(call: Call) -> api.StraysReply:
    """Delete what no cluster accounts for, and look again."""
    return views.strays_view(call.services.strays.purge_now())


def cluster(call: Call) -> api.ClusterView:
    """One cluster, alive or the latest of that name."""
    found = _find(call)
    return views.cluster_view(found, len(call.services.store.jobs(found.id, open_only=True)))


def jobs(call: Call) -> api.JobsReply:
    """A cluster's jobs."""
    found = _find(call)
    every = call.services.store.jobs(found.id, limit=int(_number(call.query, "limit", 1000)))
    return api.JobsReply(jobs=[views.job_view(found, job) for job in every])


def job(call: Call) -> api.JobView:
    """One job; with `wait=SECONDS`, answers when it has ended or the time is over."""
    found, store = _find(call), call.services.store
    number = _job_number(call)
    deadline = time.monotonic() + min(60.0, _number(call.query, "wait", 0.0))
    while True:
        one = store.job(found.id, number)
        if one is None:
            raise UserError(f"cluster {found.name} has no job {number}", f"see: podway queue {found.name}", status=404)
        if one.done or time.monotonic() >= deadline:
            return views.job_view(found, one)
        _ticks.wait(0.05)


def cancel(call: Call) -> api.CancelReply:
    """Ask jobs to end; follow with `job?wait=` to know that nothing of them is left."""
    body: api.CancelBody = call.body
    return api.CancelReply(jobs=call.services.control.cancel(call.path["cluster"], body.jobs, every=body.all))


def stop(call: Call) -> api.ClusterView:
    """Stop the hosts, keep their disks."""
    return views.cluster_view(call.services.control.stop(call.path["cluster"]), 0)


def start(call: Call) -> api.ClusterView:
    """Start a stopped cluster."""
    return views.cluster_view(call.services.control.start(call.path["cluster"]), 0)


def down(call: Call) -> api.ClusterView:
    """Delete a cluster and everything it made."""
    return views.cluster_view(call.services.control.down(call.path["cluster"]), 0)


def autostop(call: Call) -> api.ClusterView:
    """Set or clear the rest rule."""
    cluster = call.services.control.set_autostop(call.path["cluster"], call.body.autostop)
    alone = rest_rule(call.services.provider(cluster.order.provider), cluster) is not None
    return msgspec.structs.replace(views.cluster_view(cluster, 0), rests_alone=alone)


def events(call: Call) -> api.EventsReply:
    """A cluster's history after an event id."""
    found = _find(call)
    after = int(_number(call.query, "after", 0))
    return api.EventsReply(events=[views.event_view(event) for event in call.services.store.events(found.id, after)])


def shell(call: Call) -> api.ShellReply:
    """The command that opens a shell on one host, or runs one command there."""
    found = _find(call)
    rank = int(_number(call.query, "rank", 0))
    if not found.hosts:
        raise UserError(
            f"cluster {found.name} is {found.state.value}: it has no hosts now", "wait until it is UP", status=409
        )
    if not 0 <= rank < len(found.hosts):
        raise UserError(
            f"cluster {found.name} has no host {rank}", f"hosts are 0 to {len(found.hosts) - 1}", status=404
        )
    host, provider = found.hosts[rank], call.services.provider(found.order.provider)
    if not isinstance(provider, SupportsShell):
        raise UserError(f"hosts of {provider.name} have no shell", f"use: podway run {found.name} COMMAND", status=409)
    launch = Launch(
        job=shell_key(found),
        number=0,
        cluster=found.name,
        task=Task(),
        order=found.order,
        hosts=found.hosts,
        simulated=row_of(provider.name).simulated,
        user=call.caller.user,
        submitted=time.time(),
    )
    how = provider.shell(host, launch.env_for(host, "run"), call.query.get("command"))
    return api.ShellReply(argv=list(how.argv), env=how.env, cwd=how.cwd)


def files_missing(call: Call) -> api.DigestsReply:
    """Which contents the server does not have yet."""
    return api.DigestsReply(missing=call.services.blobs.missing(call.body.digests))


def make_token(call: Call) -> api.TokenReply:
    """A token for a person."""
    token = call.services.store.add_token(call.body.user, admin=call.body.admin)
    return api.TokenReply(user=call.body.user, token=token)


def users(call: Call) -> api.UsersReply:
    """Who may use this server."""
    return api.UsersReply(
        users=[
            api.UserView(user=user, admin=admin, created=created)
            for user, admin, created in call.services.store.users()
        ]
    )


def revoke(call: Call) -> api.UsersReply:
    """Forget every token of a person."""
    if not call.services.store.revoke(call.path["user"]):
        raise UserError(f"there is no token of {call.path['user']!r}", "see: podway server users", status=404)
    return users(call)


_C = "/v1/clusters/{cluster}"
ROUTES: tuple[Route, ...] = (
    Route(method="GET", path="/v1/info", function=info, summary="This server", reply=api.InfoReply),
    Route(
        method="POST",
        path="/v1/preview",
        function=preview,
        summary="Plan a launch",
        body=LaunchRequest,
        reply=api.PreviewReply,
    ),
    Route(
        method="POST", path="/v1/launch", function=launch, summary="Launch", body=LaunchRequest, reply=api.LaunchReply
    ),
    Route(
        method="GET",
        path="/v1/clusters",
        function=clusters,
        summary="Clusters",
        reply=api.ClustersReply,
        query={"past": float},
    ),
    Route(method="GET", path=_C, function=cluster, summary="One cluster", reply=api.ClusterView),
    Route(method="DELETE", path=_C, function=down, summary="Take down", reply=api.ClusterView),
    Route(method="POST", path=f"{_C}/stop", function=stop, summary="Stop", reply=api.ClusterView),
    Route(method="POST", path=f"{_C}/start", function=start, summary="Start", reply=api.ClusterView),
    Route(
        method="POST",
        path=f"{_C}/autostop",
        function=autostop,
        summary="Autostop",
        body=api.AutostopBody,
        reply=api.ClusterView,
    ),
    Route(
        method="POST", path=f"{_C}/run", function=run, summary="Run everywhere", body=api.RunBody, reply=api.LaunchReply
    ),
    Route(
        method="POST",
        path=f"{_C}/jobs",
        function=execute,
        summary="Queue a task",
        body=api.ExecBody,
        reply=api.LaunchReply,
    ),
    Route(method="GET", path=f"{_C}/jobs", function=jobs, summary="Jobs", reply=api.JobsReply, query={"limit": int}),
    Route(
        method="POST",
        path=f"{_C}/cancel",
        function=cancel,
        summary="Cancel",
        body=api.CancelBody,
        reply=api.CancelReply,
    ),
    Route(
        method="GET",
        path=f"{_C}/jobs/{{job}}",
        function=job,
        summary="One job",
        reply=api.JobView,
        query={"wait": float},
    ),
    Route(
        method="GET",
        path=f"{_C}/events",
        function=events,
        summary="History",
        reply=api.EventsReply,
        query={"after": int},
    ),
    Route(
        method="GET",
        path=f"{_C}/shell",
        function=shell,
        summary="A shell",
        reply=api.ShellReply,
        query={"rank": int, "command": str},
    ),
    Route(
        method="GET", path="/v1/strays", function=strays, summary="Strays", reply=api.StraysReply, query={"look": str}
    ),
    Route(
        method="DELETE",
        path="/v1/strays",
        function=purge,
        summary="Delete strays",
        reply=api.StraysReply,
        admin=True,
    ),
    Route(
        method="POST",
        path="/v1/files/missing",
        function=files_missing,
        summary="Contents not here",
        body=api.DigestsBody,
        reply=api.DigestsReply,
    ),
    Route(
        method="POST",
        path="/v1/tokens",
        function=make_token,
        summary="Make a token",
        body=api.TokenBody,
        reply=api.TokenReply,
        admin=True,
    ),
    Route(method="GET", path="/v1/users", function=users, summary="People", reply=api.UsersReply, admin=True),
    Route(
        method="DELETE",
        path="/v1/users/{user}",
        function=revoke,
        summary="Forget tokens",
        reply=api.UsersReply,
        admin=True,
    ),
)

_ticks = threading.Event()  # never set: a sleep that a test may cut short


def _launched(done: Any) -> api.LaunchReply:
    return api.LaunchReply(
        cluster=done.cluster, cluster_id=done.cluster_id, job=done.job, created=done.created, notes=list(done.notes)
    )


def _find(call: Call) -> Cluster:
    name = call.path["cluster"]
    found = call.services.store.find(name) or call.services.store.find(name, gone=True)
    if found is None:
        raise UserError(f"there is no cluster {name!r}", "see: podway status", status=404)
    return found


def _job_number(call: Call) -> int:
    text = call.path["job"]
    if not text.isdigit() or len(text) > 9:
        raise UserError(f"{text!r} is not a job number", "jobs are numbered from 1", status=404)
    return int(text)


def _number(query: dict[str, str], key: str, default: float = 0.0) -> float:
    text = query.get(key)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e12:
        raise UserError(f"{key}={text!r} is not a number", f"give {key} as a plain number")
    return value
