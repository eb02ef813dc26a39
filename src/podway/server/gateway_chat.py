"""A conversation with a service's model for the page: through its gateway, as a program of the person would talk to it.

The page talks to this server alone and holds no key, so the server asks the gateway for it, with a key of that person which never
leaves the two: it follows from the server's own secret, and stands in the table of routes for as long as the person has a token. So the
gateway balances, counts and measures these requests like all others.
"""

import asyncio
import ssl
import time
from urllib.parse import urlsplit

import msgspec
from starlette.responses import Response

from podway.control.access import Caller
from podway.control.people import token_digest
from podway.control.vault import SecretVault
from podway.errors import UserError
from podway.hosts.link import Connect, Reader, Writer
from podway.server.host_http import HostResponse, exchange
from podway.server.model_routes import completion_request, relay
from podway.server.routing import ApiCall
from podway.server.service_views import live_gateway

UNKNOWN_KEY = 401
LEARN_S, AGAIN_S = 10.0, 0.25  # until a gateway has heard of a new person's key


def page_key(vault: SecretVault, user: str) -> str:
    """The key that the page's requests of a person have."""
    return "pp_" + vault.derive(f"page key of {user}")


def page_keys(vault: SecretVault, callers: list[Caller]) -> list[tuple[str, Caller]]:
    """For everybody who holds a token that may use something: the digest of their key, and the most that a token of theirs may do."""
    most: dict[str, Caller] = {}
    for caller in callers:
        if caller.role in ("admin", "member") and not (caller.user in most and most[caller.user].admin):
            most[caller.user] = caller
    return [(token_digest(page_key(vault, user)), caller) for user, caller in most.items()]


async def chat(call: ApiCall) -> Response:
    """A completion of a conversation or of a text by a service's model, streamed as server-sent events."""
    path, sent = completion_request(call.body)
    base, key = await call.in_thread(lambda: _target(call))
    deadline = time.monotonic() + LEARN_S
    while True:
        answer = await _ask(base, path, key, msgspec.json.encode(sent))
        if answer.status != UNKNOWN_KEY or time.monotonic() > deadline:
            return await relay(answer)
        await answer.whole()
        await asyncio.sleep(AGAIN_S)


def _target(call: ApiCall) -> tuple[str, str]:
    service, rows = call.find_service(), call.services.store.services
    if service.spec.model is None:
        raise UserError(f"{service.name} serves no model", "name one in the service's file", status=409)
    same = [
        one for one in rows.live() if one.goal == "up" and one.spec.model and one.spec.model.name == call.body.model
    ]
    newest = max(same, key=lambda one: one.created, default=None)
    if newest is None or newest.id != service.id:
        by = f"{newest.name} answers for it" if newest is not None else f"its model is {service.spec.model.name}"
        raise UserError(f"{service.name} does not answer for the model {call.body.model!r}", by, status=409)
    url = live_gateway(rows)
    if url is None:
        raise UserError("no gateway reports to this server", "start one: podway gateway run", status=503)
    # A service that asks for no key gets whatever headers a client sends: the key is not for its program.
    key = page_key(call.services.control.vault, call.caller.user) if service.spec.auth else ""
    return url.rstrip("/"), key


async def _ask(base: str, path: str, key: str, body: bytes) -> HostResponse:
    at = urlsplit(base)
    headers = {"host": at.netloc} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        return await exchange(_connect(base), "POST", at.path + path, body, headers)
    except UserError as error:
        raise UserError(f"the gateway {base} does not answer: {error.what}", "see its log", status=503) from None


def _connect(base: str) -> Connect:
    at = urlsplit(base)
    secure = at.scheme == "https"

    async def connect() -> tuple[Reader, Writer]:
        context = ssl.create_default_context() if secure else None
        return await asyncio.open_connection(at.hostname, at.port or (443 if secure else 80), ssl=context)

    return connect
