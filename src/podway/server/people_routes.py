"""The functions of the routes about the server itself and the people who may use it."""

import os
import re

import msgspec

from podway.errors import UserError
from podway.server import api
from podway.server.routing import ApiCall
from podway.version import __version__

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}")


def info(call: ApiCall) -> api.InfoReply:
    """Which server this is, and who you are to it."""
    caller = call.caller
    return api.InfoReply(
        name="podway",
        version=__version__,
        api=api.VERSION,
        user=caller.user,
        admin=caller.admin,
        role=caller.role,
        projects=dict(caller.projects),
        pid=os.getpid(),
    )


def make_token(call: ApiCall) -> api.TokenReply:
    """A token for a person, shown this once."""
    body: api.TokenBody = call.body
    checked_name(body.user, "user")
    if body.name:
        checked_name(body.name, "token name")
    if body.lifetime_s is not None and not 0 < body.lifetime_s < 1e10:
        raise UserError("lifetime_s must be above 0", "give seconds, or null for a token that never expires")
    token = call.services.store.people.add_token(body.user, body.role, body.name, body.lifetime_s)
    call.services.tokens.reload()
    return api.TokenReply(user=body.user, token=token)


def tokens(call: ApiCall) -> api.TokensReply:
    """Your tokens; everybody's, for an administrator."""
    caller = call.caller
    rows = [row for row in call.services.store.people.tokens() if caller.admin or row.user == caller.user]
    shown = [
        api.TokenView(id=row.id, user=row.user, name=row.name, role=row.role, created=row.created, expires=row.expires)
        for row in rows
    ]
    return api.TokensReply(tokens=shown)


def revoke_token(call: ApiCall) -> api.TokensReply:
    """Forget one token: your own, or anybody's for an administrator."""
    people, found = call.services.store.people, call.path["token"]
    row = next((row for row in people.tokens() if row.id == found), None)
    if row is None or not (call.caller.admin or row.user == call.caller.user):
        raise UserError(f"there is no token {found!r}", "see: podway server users", status=404)
    people.revoke(row.user, row.id)
    call.services.tokens.reload()
    return tokens(call)


def revoke(call: ApiCall) -> api.TokensReply:
    """Forget every token of a person."""
    if not call.services.store.people.revoke(call.path["user"]):
        raise UserError(f"there is no token of {call.path['user']!r}", "see: podway server users", status=404)
    call.services.tokens.reload()
    return tokens(call)


def members(call: ApiCall) -> api.MembersReply:
    """Who is in your projects; in all of them, for an administrator."""
    caller = call.caller
    rows = [row for row in call.services.store.people.members() if caller.admin or row.project in caller.projects]
    return api.MembersReply(members=[api.MemberView(**msgspec.structs.asdict(row)) for row in rows])


def set_member(call: ApiCall) -> api.MembersReply:
    """Put a person into a project, which exists while it has members."""
    project, user = checked_name(call.path["project"], "project"), checked_name(call.path["user"], "user")
    call.services.store.people.set_member(project, user, call.body.role)
    call.services.tokens.reload()
    return members(call)


def remove_member(call: ApiCall) -> api.MembersReply:
    """Take a person out of a project."""
    call.services.store.people.set_member(call.path["project"], call.path["user"], None)
    call.services.tokens.reload()
    return members(call)


def audit(call: ApiCall) -> api.AuditReply:
    """Who did what, the latest first."""
    limit, user = min(call.query.get("limit", 100), 10_000), call.query.get("user")
    found = call.services.store.people.audit(limit, user)
    entries = [
        api.AuditView(**{key: value for key, value in msgspec.structs.asdict(entry).items() if key != "id"})
        for entry in found
    ]
    return api.AuditReply(entries=entries)


def checked_name(text: str, what: str) -> str:
    """The name of a person, a project, a token or a key, if it can be one."""
    if not NAME.fullmatch(text):
        raise UserError(f"{text!r} cannot be a {what}", "use letters, digits and . _ @ + -, at most 100 characters")
    return text
