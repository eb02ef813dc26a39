"""The functions of the routes about clusters: launch, look, change, and the orphans that belong to none."""

import asyncio
import time
from typing import Any

import msgspec

from podway.control.access import right_on
from podway.control.heartbeat import shutdown_policy
from podway.control.records import Cluster, shell_key
from podway.errors import UserError
from podway.hosts.agent.packs import FilesError
from podway.launch import Launch
from podway.order import Host
from podway.provider_table import row_of
from podway.providers import SupportsCertificates, SupportsShell
from podway.server import api, views
from podway.server.routing import ApiCall
from podway.task.task import Task

PURGE_WAIT_S = 45.0  # a client gives up on a silent connection after 90 s


def preview(call: ApiCall) -> api.PreviewReply:
    """What a launch would do, and the exact request; nothing is done."""
    return views.preview_view(call.services.control.preview(call.body, call.caller))


def launch(call: ApiCall) -> api.LaunchReply:
    """Create or reuse a cluster and queue the task on it."""
    return views.launched_view(call.services.control.launch(call.body, call.caller))


def clusters(call: ApiCall) -> api.ClustersReply:
    """Every live cluster the caller may see; with `past=SECONDS`, also deleted ones that were created since then."""
    store = call.services.store
    found = store.live_clusters()
    if "past" in call.query:
        found = store.past_clusters(call.query["past"])[::-1] + found
    counts = store.open_job_counts()
    shown = [views.cluster_view(c, counts.get(c.id, 0)) for c in found if right_on(c, call.caller) is not None]
    orphans = len(call.services.orphans.last.orphans) if call.caller.admin else 0
    services = sum(right_on(one, call.caller) is not None for one in store.services.live())
    schedules = len(call.services.schedules.list_for(call.caller))
    return api.ClustersReply(clusters=shown, orphans=orphans, services=services, schedules=schedules)


def cluster(call: ApiCall) -> api.ClusterView:
    """One cluster, alive or the latest of that name."""
    found = call.find_cluster()
    return views.cluster_view(found, len(call.services.store.jobs(found.id, open_only=True)))


def stop(call: ApiCall) -> api.ClusterView:
    """Stop the hosts, keep their disks."""
    return views.cluster_view(call.services.control.stop(call.path["cluster"]), 0)


def start(call: ApiCall) -> api.ClusterView:
    """Start a stopped cluster."""
    return views.cluster_view(call.services.control.start(call.path["cluster"]), 0)


def down(call: ApiCall) -> api.ClusterView:
    """Delete a cluster and everything it created."""
    return views.cluster_view(call.services.control.down(call.path["cluster"]), 0)


def autostop(call: ApiCall) -> api.ClusterView:
    """Set or clear the autostop policy."""
    cluster = call.services.control.set_autostop(call.path["cluster"], call.body.autostop)
    able = shutdown_policy(call.services.provider(cluster.order.provider), cluster) is not None
    return msgspec.structs.replace(views.cluster_view(cluster, 0), self_teardown=able)


def share(call: ApiCall) -> api.ClusterView:
    """Let a person view or use a cluster."""
    done = call.services.control.share(call.path["cluster"], call.path["user"], call.body.right)
    return views.cluster_view(done, 0)


def unshare(call: ApiCall) -> api.ClusterView:
    """Take back what was granted to a person."""
    return views.cluster_view(call.services.control.share(call.path["cluster"], call.path["user"], None), 0)


def events(call: ApiCall) -> api.EventsReply:
    """A cluster's history after an event id."""
    found = call.services.store.events(call.find_cluster().id, call.query.get("after", 0))
    return api.EventsReply(events=[views.event_view(event) for event in found])


def shell(call: ApiCall) -> api.ShellReply:
    """Where a shell on one host is, and the environment a job there has."""
    found = call.find_cluster()
    host = _host_of(found, call.query.get("rank", 0))
    provider = call.services.provider(found.order.provider)
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
    how = provider.shell(host, launch.env_for(host, "run"))
    return api.ShellReply(
        home=how.home, env=how.env, endpoint=how.endpoint, known_hosts=list(how.known_hosts), pod=how.pod
    )


async def certificate(call: ApiCall) -> api.CertificateReply:
    """Certify a person's key for one host, for a few minutes, and have the host trust the server's certificates."""
    found = await call.in_thread(call.find_cluster)
    host = _host_of(found, call.body.rank)
    provider = call.services.provider(found.order.provider)
    if not isinstance(provider, SupportsCertificates):
        raise UserError(
            f"hosts of {provider.name} take no certificates",
            f"use: podway run {found.name} COMMAND",
            status=409,
            code=api.NO_CERTIFICATES,
        )
    authority, principal = call.services.authority, f"podway-{found.id}"
    signed = authority.sign(call.body.public_key, principal, f"podway user={call.caller.user} cluster={found.name}")
    await provider.trust(host, authority.trust_line(principal))
    return api.CertificateReply(certificate=signed.text, expires=signed.expires)


def _host_of(found: Cluster, rank: int) -> Host:
    if not found.hosts:
        raise UserError(
            f"cluster {found.name} is {found.state.value}: it has no hosts now", "wait until it is UP", status=409
        )
    if not 0 <= rank < len(found.hosts):
        raise UserError(
            f"cluster {found.name} has no host {rank}", f"hosts are 0 to {len(found.hosts) - 1}", status=404
        )
    return found.hosts[rank]


async def orphans(call: ApiCall) -> api.OrphansReply:
    """Resources of this Podway that no cluster accounts for: every provider is asked, or with look=false none."""
    scanner = call.services.orphans
    return views.orphans_view(await scanner.scan_all() if call.query.get("look", True) else scanner.last)


async def purge(call: ApiCall) -> api.OrphansReply:
    """Delete what no cluster accounts for. While `purging` is true, ask again."""
    report, purging = await call.services.orphans.purge(PURGE_WAIT_S)
    return msgspec.structs.replace(views.orphans_view(report), purging=purging)


def files_missing(call: ApiCall) -> api.DigestsReply:
    """Which contents the server does not have yet."""
    missing = call.services.blobs.missing(call.body.digests)
    return api.DigestsReply(missing=missing, arrived=call.services.blobs.arrived(missing))


def content_blocks(call: ApiCall) -> api.BlocksReply:
    """The blocks of a content, so that of one that differs little only what differs is uploaded."""
    found = call.services.blobs.blocks(call.path["digest"])
    return api.BlocksReply(mean=found.mean, rows=found.rows)


async def upload(call: ApiCall) -> api.DigestsReply:
    """Contents into the store, as they come: a pack."""
    request: Any = call.request
    try:
        with call.services.blobs.receiver() as receiver:
            async for chunk in request.stream():
                await asyncio.to_thread(receiver.feed, chunk)
            receiver.close()
    except FilesError as error:
        raise UserError(f"the upload is not right: {error}", "run the command again") from None
    return api.DigestsReply(missing=[])
