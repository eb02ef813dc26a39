"""Buckets that hosts have mounted from the start, where a provider mounts them when it makes the hosts (pods of Kubernetes). Pure."""

from collections.abc import Sequence

import msgspec

from podway.errors import UserError
from podway.order import Order, OrderBucket
from podway.provider_table import row_of
from podway.task.task import Bucket, Task


def with_buckets(order: Order, tasks: Sequence[Task]) -> Order:
    """The order with every bucket that one of the tasks mounts."""
    if "attached-buckets" not in row_of(order.provider).capabilities:
        return order
    found: dict[str, OrderBucket] = {}
    for wanted in (one for task in tasks for one in mounted_buckets(task)):
        known = found.setdefault(wanted.target, wanted)
        if known != wanted:
            raise UserError(
                f"file_mounts {wanted.target}: both {known.uri} and {wanted.uri} are to be mounted there",
                "hosts have all mounts of a launch from the start: give each a place of its own, with the same settings",
            )
    return msgspec.structs.replace(order, buckets=tuple(found.values())) if found else order


def check_mounted(order: Order, cluster: str, task: Task) -> None:
    """A task's mounts must be those that the cluster's hosts were made with."""
    if "attached-buckets" not in row_of(order.provider).capabilities:
        return
    have = {_place(one) for one in order.buckets}
    for wanted in mounted_buckets(task):
        if _place(wanted) not in have:
            kind = ", read only" if wanted.read_only else ""
            raise UserError(
                f"cluster {cluster} does not have {wanted.uri} mounted at {wanted.target}{kind}: its pods have the mounts "
                "they were made with",
                f"use another cluster name (-c), or podway down {cluster} first; or launch with --one-shot; or mode: COPY",
                status=409,
            )


def mounted_buckets(task: Task) -> list[OrderBucket]:
    """The buckets that a task mounts, in its order."""
    return [
        OrderBucket(
            uri=source.uri,
            target=mount.target,
            read_only=source.read_only,
            arguments=source.options.get("mount_options", "") if source.mode == "MOUNT" else "",
            create=source.create,
        )
        for mount in task.file_mounts
        if isinstance(source := mount.source, Bucket) and source.mode != "COPY"
    ]


def _place(bucket: OrderBucket) -> tuple[str, str, bool]:
    return bucket.uri.rstrip("/"), bucket.target, bucket.read_only
