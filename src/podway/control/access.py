"""Who may do what. Pure: from a caller and a cluster (or service) to the right the caller has on it.

    MANAGE  stop, start, delete, autostop, share, cancel anybody's jobs; of a service: update, scale, roll back, end, share
    USE     queue jobs, run commands, open shells, cancel one's own jobs; of a service: send it requests, through a gateway
    VIEW    see it, its jobs, their logs; of a service: see it, its replicas and its history

The owner and administrators manage a cluster; members of its project manage it and the project's viewers view it; others have what
was granted to them on this cluster. A token's role caps all of this: a viewer's token only ever views, and a gateway's only learns
routes and reports what it saw. Who has no right on a cluster is told that there is none.
"""

import enum
from typing import Literal, Protocol

import msgspec

from podway.control.records import Cluster, Grant, Job
from podway.errors import UserError
from podway.task.task import Task


class Right(enum.IntEnum):
    """What one may do to a cluster; each includes those before it."""

    VIEW = 1
    USE = 2
    MANAGE = 3


Role = Literal["admin", "member", "viewer", "gateway"]
# Who may call a route: any person with a token, who may create things, who has this right on the cluster or service of the path,
# administrators, gateways (and administrators).
Access = Literal["anyone", "create", "view", "use", "manage", "admin", "gateway"]
RIGHTS: dict[Access, Right] = {"view": Right.VIEW, "use": Right.USE, "manage": Right.MANAGE}


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks: a person by one of their tokens, and the projects they are in."""

    user: str
    role: Role = "member"
    token: str = ""
    projects: dict[str, Role] = {}
    internal: bool = False  # the server itself, for a service that was checked when it was applied

    @property
    def admin(self) -> bool:
        """May do everything."""
        return self.role == "admin"


class Owned(Protocol):
    """Something that belongs to a person: a cluster or a service."""

    @property
    def name(self) -> str:
        """Of it."""

    @property
    def user(self) -> str:
        """Whose it is."""

    @property
    def project(self) -> str | None:
        """Whose members may manage it too."""

    @property
    def grants(self) -> tuple[Grant, ...]:
        """What its owner allows others."""


def right_on(cluster: Owned, caller: Caller) -> Right | None:
    """The highest right; None: not even to know of it."""
    if caller.admin:
        return Right.MANAGE
    if caller.role == "gateway":
        return None
    found = 0
    if cluster.user == caller.user:
        found = Right.MANAGE
    in_project = caller.projects.get(cluster.project) if cluster.project else None
    if in_project is not None:
        found = max(found, Right.VIEW if in_project == "viewer" else Right.MANAGE)
    found = max([found, *(Right[grant.right.upper()] for grant in cluster.grants if grant.user == caller.user)])
    if caller.role == "viewer":
        found = min(found, Right.VIEW)
    return Right(found) if found else None


def with_grant(grants: tuple[Grant, ...], user: str, right: Literal["view", "use"] | None) -> tuple[Grant, ...]:
    """Let a person view or use it, or (None) no longer."""
    others = tuple(grant for grant in grants if grant.user != user)
    return others if right is None else (*others, Grant(user=user, right=right))


def allows(cluster: Owned, caller: Caller, needed: Right) -> bool:
    """Whether the caller has at least this right."""
    found = right_on(cluster, caller)
    return found is not None and found >= needed


def require(cluster: Owned, caller: Caller, needed: Right) -> None:
    """Refuse who has less."""
    if not allows(cluster, caller, needed):
        raise UserError(
            f"{caller.user} may not {needed.name.lower()} {cluster.name}, which belongs to {cluster.user}",
            f"ask them: podway share {cluster.name} {caller.user}",
            status=403,
        )


def check_role(caller: Caller, access: Access) -> None:
    """Refuse what the token's role excludes, before anything is looked up."""
    if access == "gateway" and caller.role in ("admin", "gateway"):
        return
    if access in ("admin", "gateway") and not caller.admin:
        raise UserError(f"{caller.user} may not do this", "ask an administrator of this server", status=403)
    if caller.role == "gateway":
        raise UserError("this token is a gateway's", "use a person's token", status=403)
    if caller.role == "viewer" and access in ("create", "use", "manage"):
        raise UserError("this token may only read", "ask an administrator for one with the role member", status=403)


def check_project(caller: Caller, project: str | None) -> None:
    """Clusters are launched only into projects one is a member of."""
    if project and not caller.admin and caller.projects.get(project) != "member":
        mine = ", ".join(sorted(name for name, role in caller.projects.items() if role == "member"))
        hint = f"your projects: {mine}" if mine else "ask an administrator to add you: podway server member"
        raise UserError(f"{caller.user} is not a member of project {project!r}", hint, status=403)


def check_inventory(caller: Caller, task: Task) -> None:
    """An inventory is a file of the server's machine, which says whom its user's ssh keys log in to: for administrators."""
    if caller.admin or caller.internal:
        return
    for resources in task.resources:
        place = resources.placement.region or ""
        if place.startswith("/"):
            raise UserError(
                f"{caller.user} may not name a file of the server's machine: {place}",
                "name a pool of the server, or ask an administrator to make one",
                status=403,
            )


def check_cancel(cluster: Cluster, job: Job, caller: Caller) -> None:
    """Whoever may only use a cluster cancels their own jobs."""
    if job.user != caller.user:
        require(cluster, caller, Right.MANAGE)


def check_taken(cluster: Cluster, caller: Caller) -> None:
    """A name that is somebody else's cluster cannot be launched on."""
    if right_on(cluster, caller) is None:
        raise UserError(f"the name {cluster.name!r} is taken", "use another cluster name (-c)", status=409)
    require(cluster, caller, Right.USE)
