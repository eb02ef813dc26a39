"""What a server throws away, once an hour: contents no open job, service, schedule or pool needs, and the logs of clusters long gone."""

import asyncio
import logging
import shutil
import time

from podway.control.archive import Archive
from podway.control.store import Store
from podway.errors import UserError
from podway.hosts.blobs import BlobStore
from podway.hosts.tree import TreeManifest

EVERY_S = 3600.0
CONTENTS_KEPT_S = 24 * 3600.0  # a day after their last use: `exec` with the same files uploads nothing
LOGS_KEPT_S = 30 * 24 * 3600.0

log = logging.getLogger("podway.housekeeping")


def tidy(store: Store, blobs: BlobStore, archive: Archive, now: float) -> tuple[int, int]:
    """(contents removed, logs of clusters removed)."""
    needed: set[str] = set()
    jobs = (job for cluster in store.live_clusters() for job in store.jobs(cluster.id, open_only=True))
    revisions = (revision for service in store.services.live() for revision in service.revisions)
    scheduled = (record.request.files for record in store.schedules.all())
    pools = store.pools.all()
    pooled = (
        *(pool.request.files for pool in pools),
        *(job.request.files for pool in pools for job in store.pools.jobs(pool, open_only=True)),
    )
    open_groups = (group for group in store.groups.all() if group.ended is None)
    grouped = (member.request.files for group in open_groups for member in group.members)
    kept = (*(job.files for job in jobs), *(one.files for one in revisions), *scheduled, *pooled, *grouped)
    for tree in (tree for trees in kept for tree in trees):
        needed.add(tree.manifest)
        try:
            needed.update(TreeManifest.decode(blobs.read(tree.manifest)).sizes)
        except UserError:
            continue  # its job will say so
    removed, _ = blobs.gc(needed, grace_s=CONTENTS_KEPT_S)
    old = 0
    for place in archive.root.glob("*") if archive.root.exists() else ():
        owner = store.cluster(place.name)
        if owner is None or (not owner.live and (owner.ended or 0) < now - LOGS_KEPT_S):
            shutil.rmtree(place, ignore_errors=True)
            old += 1
    return removed, old


async def keep_tidy(store: Store, blobs: BlobStore, archive: Archive) -> None:
    """For as long as the server runs."""
    while True:
        try:
            done = await asyncio.to_thread(tidy, store, blobs, archive, time.time())
            log.info("removed %d contents and the logs of %d clusters", *done)
        except Exception:
            log.exception("housekeeping")
        await asyncio.sleep(EVERY_S)
