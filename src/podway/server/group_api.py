"""The types of the API that are about job groups."""

import msgspec

from podway.launch_options import LaunchRequest


class GroupTaskBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One task of a group: the launch of its cluster, and when it ends."""

    request: LaunchRequest
    primary: bool = True
    delay_s: float = 0.0  # of one that is not primary: it ends so long after the last primary one


class GroupBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job group to launch."""

    tasks: tuple[GroupTaskBody, ...]


class GroupTaskView(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a group."""

    name: str
    cluster: str
    job: int | None  # None: not launched yet
    primary: bool
    state: str
    reason: str


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """One job group."""

    name: str
    user: str
    project: str | None
    state: str  # STARTING until all hosts are up, RUNNING, SUCCEEDED, FAILED or CANCELLED
    reason: str
    created: float
    tasks: list[GroupTaskView]


class GroupsReply(msgspec.Struct, frozen=True, kw_only=True):
    """Job groups."""

    groups: list[GroupView]
