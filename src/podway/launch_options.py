"""A launch as one value: `LaunchRequest` is what the CLI and the Python client build, what POST /v1/launch and /v1/preview carry,
and what `control/verbs.py` acts on. Nothing in between copies its fields.

A leaf module: it imports only types, since every CLI command loads it.
"""

import os

import msgspec

from podway.hosts.manifest import FileTree
from podway.task.task import Autostop, Task


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a person chooses for a launch, apart from what the task says."""

    cluster: str | None = None  # name to create or reuse; None: a new name
    provider: str | None = None  # takes precedence over the task's own placement
    project: str | None = None  # whose members may manage a new cluster too
    setup: bool = True
    autostop: Autostop | None = None
    retry_until_up: bool = False  # when every place has failed, start over until one has capacity
    valid_until_s: float | None = None  # give up a queued request after this long
    one_shot: bool = False  # no cluster: something that runs the task and ends by itself, see `SupportsOneShot`


class FollowingTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task of a pipeline that begins when the one before it has succeeded."""

    task: Task
    files: tuple[FileTree, ...] = ()


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task to run on a cluster, creating it if needed, and those that follow it there one after the other."""

    task: Task
    then: tuple[FollowingTask, ...] = ()
    options: LaunchOptions = LaunchOptions()
    files: tuple[FileTree, ...] = ()
    agreed: str | None = (
        None  # digest of the preview a person agreed to: anything else is refused (code `offer_changed`)
    )
    request_id: str | None = None  # the same id twice is one job: a client may resend when a response was lost


def new_request_id() -> str:
    """For a request that may be sent twice and is to be done once."""
    return os.urandom(8).hex()


def with_request_id(request: LaunchRequest) -> LaunchRequest:
    """The request with an id, its own where it has one."""
    return msgspec.structs.replace(request, request_id=request.request_id or new_request_id())
