"""The functions of the routes about the server itself and the people who may use it."""

import os

from podway.errors import UserError
from podway.server import api
from podway.server.routing import ApiCall
from podway.version import __version__


def info(call: ApiCall) -> api.InfoReply:
    """Which server this is, and who you are to it."""
    return api.InfoReply(
        name="podway",
        version=__version__,
        api=api.VERSION,
        user=call.caller.user,
        admin=call.caller.admin,
        pid=os.getpid(),
    )


def make_token(call: ApiCall) -> api.TokenReply:
    """A token for a person."""
    token = call.services.store.people.add_token(call.body.user, admin=call.body.admin)
    call.services.tokens.reload()
    return api.TokenReply(user=call.body.user, token=token)


def users(call: ApiCall) -> api.UsersReply:
    """Who may use this server."""
    rows = call.services.store.people.tokens()
    return api.UsersReply(users=[api.UserView(user=row.user, admin=row.admin, created=row.created) for row in rows])


def revoke(call: ApiCall) -> api.UsersReply:
    """Forget every token of a person."""
    if not call.services.store.people.revoke(call.path["user"]):
        raise UserError(f"there is no token of {call.path['user']!r}", "see: podway server users", status=404)
    call.services.tokens.reload()
    return users(call)
