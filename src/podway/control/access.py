"""Who may do what. Pure: from a caller and a cluster to the right the caller has on it.

    MANAGE  stop, start, delete, autostop, share, cancel anybody's jobs
    USE     queue jobs, run commands, open shells, cancel one's own jobs
    VIEW    see it, its jobs, their logs

The owner and administrators manage a cluster; members of its project manage it and the project's viewers view it; others have what
was granted to them on this cluster. A token's role caps all of this: a viewer's token only ever views. Who has no right on a
cluster is told that there is none.
"""

import enum
from typing import Literal

import msgspec

from podway.control.records import Cluster, Job
from podway.errors import UserError


class Right(enum.IntEnum):
    """What one may do to a cluster; each includes those before it."""

    VIEW = 1
    USE = 2
    MANAGE = 3


Role = Literal["admin", "member", "viewer"]
# Who may call a route: anybody with a token, who may create things, who has this right on the cluster of the path, administrators.
Access = Literal["anyone", "create", "view", "use", "manage", "admin"]
RIGHTS: dict[Access, Right] = {"view": Right.VIEW, "use": Right.USE, "manage": Right.MANAGE}


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks: a person by one of their tokens, and the projects they are in."""

    user: str
    role: Role = "member"
    token: str = ""
    projects: dict[str, Role] = {}

    @property
    def admin(self) -> bool:
        """May do everything."""
        return self.role == "admin"


def right_on(cluster: Cluster, caller: Caller) -> Right | None:
    """The highest right; None: not even to know of it."""
    if caller.admin:
        return Right.MANAGE
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


def allows(cluster: Cluster, caller: Caller, needed: Right) -> bool:
    """Whether the caller has at least this right."""
    found = right_on(cluster, caller)
    return found is not None and found >= needed


def require(cluster: Cluster, caller: Caller, needed: Right) -> None:
    """Refuse who has less."""
    if not allows(cluster, caller, needed):
        raise UserError(
            f"{caller.user} may not {needed.name.lower()} cluster {cluster.name}, which belongs to {cluster.user}",
            f"ask them: podway share {cluster.name} {caller.user}",
            status=403,
        )


def check_role(caller: Caller, access: Access) -> None:
    """Refuse what the token's role excludes, before anything is looked up."""
    if access == "admin" and not caller.admin:
        raise UserError(f"{caller.user} may not do this", "ask an administrator of this server", status=403)
    if caller.role == "viewer" and access in ("create", "use", "manage"):
        raise UserError("this token may only read", "ask an administrator for one with the role member", status=403)


def check_project(caller: Caller, project: str | None) -> None:
    """Clusters are launched only into projects one is a member of."""
    if project and not caller.admin and caller.projects.get(project) != "member":
        mine = ", ".join(sorted(name for name, role in caller.projects.items() if role == "member"))
        hint = f"your projects: {mine}" if mine else "ask an administrator to add you: podway server member"
        raise UserError(f"{caller.user} is not a member of project {project!r}", hint, status=403)


def check_cancel(cluster: Cluster, job: Job, caller: Caller) -> None:
    """Whoever may only use a cluster cancels their own jobs."""
    if job.user != caller.user:
        require(cluster, caller, Right.MANAGE)
