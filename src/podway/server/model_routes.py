"""The functions of the routes that talk to a model that a job serves: `podway serve` on a cluster, with no service around it.

The page talks to this server alone, so requests go through it: only the two below, only to the port that the job's own command
names, and what comes back is given a type that no browser executes. The first host of the job serves, whatever the provider.
"""

from collections.abc import AsyncIterator

import msgspec
from starlette.responses import Response, StreamingResponse

from podway.control.access import right_on
from podway.control.records import Job, JobState
from podway.control.service_records import Replica
from podway.decoding import from_json
from podway.errors import UserError
from podway.hosts.link import Connect
from podway.providers import SupportsPorts
from podway.server import page_api
from podway.server.host_http import HostResponse, exchange
from podway.server.routing import ApiCall

PORT = 8000
OK, NOT_YET = 200, 503
_HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-store"}


class _Model(msgspec.Struct):
    id: str


class _Health(msgspec.Struct):
    status: str = ""


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Refusal(msgspec.Struct):
    error: dict[str, object] = {}


def serving_port(job: Job, replica: Replica | None = None) -> int | None:
    """Where a job serves: as a replica at the port it was given, else by its own command; None where it runs no `podway serve`."""
    from podway.plan.task_needs import command_of, option_of  # the planner takes a while to import

    command = command_of(job.task)
    if command is None or command.verb != "serve":
        return None
    if replica is not None:
        return replica.port
    port = option_of(command, "--port") or str(PORT)
    return int(port) if port.isascii() and port.isdigit() and 0 < int(port) < 65536 else None


def served(call: ApiCall) -> page_api.ServedReply:
    """The jobs that serve a model now, of all clusters the caller may see."""
    found, replicas = [], _replicas(call)
    for cluster in call.services.store.live_clusters():
        if right_on(cluster, call.caller) is None or not cluster.hosts:
            continue
        for job in call.services.store.jobs(cluster.id, open_only=True):
            if job.state is JobState.RUNNING and (port := serving_port(job, replicas.get(cluster.id))) is not None:
                url = f"http://127.0.0.1:{port}/v1"
                found.append(page_api.ServedView(cluster=cluster.name, job=job.number, name=job.name or "", url=url))
    return page_api.ServedReply(served=found)


def _replicas(call: ApiCall) -> dict[str, Replica]:
    """The replicas of services, by the id of their cluster."""
    return {one.cluster_id: one for one in call.services.store.services.open_replicas() if one.cluster_id is not None}


async def models(call: ApiCall) -> page_api.ServedModelsReply:
    """The names of the models that a job serves."""
    connect = await call.in_thread(lambda: _connect(call))
    try:
        health = await exchange(connect, "GET", "/health")
        status = from_json(await health.whole() or b"{}", _Health).status
        answer = await exchange(connect, "GET", "/v1/models")
        names = [one.id for one in from_json(await answer.whole(), _Models).data]
    except UserError as error:
        if error.status != NOT_YET:
            raise
        return page_api.ServedModelsReply(models=[], ready=False, note="starting")
    except msgspec.MsgspecError:
        raise UserError("the program on the host serves no models", "see the job's log", status=502) from None
    ready = health.status == OK
    return page_api.ServedModelsReply(models=names, ready=ready, note="" if ready else status or "not ready")


async def chat(call: ApiCall) -> Response:
    """A completion of a conversation or of a text, streamed as server-sent events."""
    path, sent = completion_request(call.body)
    connect = await call.in_thread(lambda: _connect(call))
    return await relay(await exchange(connect, "POST", path, msgspec.json.encode(sent)))


def completion_request(body: page_api.ChatBody) -> tuple[str, dict[str, object]]:
    """The path and body of the streamed completion that is asked of a model."""
    sent = {name: value for name, value in msgspec.to_builtins(body).items() if value is not None}
    if (body.messages is None) == (body.prompt is None):
        raise UserError("a request has messages or a prompt", "give one of the two")
    path = "/v1/completions" if body.messages is None else "/v1/chat/completions"
    return path, sent | {"stream": True, "stream_options": {"include_usage": True}}


async def relay(answer: HostResponse) -> Response:
    """A model's answer passed on; UserError where it refuses."""
    if answer.status != OK:
        raise _refusal(answer.status, await answer.whole())
    return StreamingResponse(_events(answer.body), media_type="text/event-stream", headers=_HEADERS)


async def _events(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events; where the host is lost on the way, the last of them says so."""
    try:
        async for part in body:
            yield part
    except UserError as error:
        yield b"data: " + msgspec.json.encode({"error": {"message": error.what}}) + b"\n\n"


def _connect(call: ApiCall) -> Connect:
    cluster, job = call.find_job()
    port = serving_port(job, _replicas(call).get(cluster.id))
    if port is None:
        raise UserError(f"job {job.number} of {cluster.name} serves no model", "it must run podway serve", status=409)
    if job.state is not JobState.RUNNING or not cluster.hosts:
        raise UserError(f"job {job.number} of {cluster.name} is {job.state.value}", "start it again", status=409)
    provider = call.services.provider(cluster.order.provider)
    if not isinstance(provider, SupportsPorts):
        raise UserError(f"ports of {provider.name}'s hosts cannot be reached", "use the host's own address", status=409)
    return provider.connect_port(cluster.hosts[0], port)


def _refusal(status: int, data: bytes) -> UserError:
    try:
        message = str(from_json(data, _Refusal).error.get("message", ""))
    except msgspec.MsgspecError:
        message = ""
    # Only what the caller can put right keeps its status: a 401 or 404 of the model's program is not one of this server.
    if status == NOT_YET:
        return UserError(message[:500] or "the model is not ready", "try again in a moment", status=NOT_YET)
    return UserError(
        message[:500] or f"the model answered {status}",
        "change the request",
        status=status if status in (400, 422, 429) else 502,
    )
