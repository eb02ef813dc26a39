"""The functions of the routes that the page needs beside those of the CLI: sessions, changes as they happen, the catalog, a plan."""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
from starlette.responses import Response, StreamingResponse

from podway.catalog.prices import offers_for, price_of
from podway.catalog.slices import Slice, all_slices
from podway.errors import UserError
from podway.model.layout import AXES
from podway.model.params import count
from podway.server import page_api
from podway.server.routing import ApiCall
from podway.server.sessions import COOKIE
from podway.version import __version__

CHANGES_S = 20.0  # a sign of life
LONGEST_S = 3600.0  # then the page asks again, and its session is looked at again
TOGETHER_S = 0.1  # changes that come together are told together


async def make_link(call: ApiCall) -> page_api.SessionLinkReply:
    """A link that opens the page once, as the person who asks."""
    digest = getattr(call.request.state, "token_digest", None) if call.request is not None else None
    if digest is None:
        raise UserError("a session cannot open another one", "run: podway ui", status=403)
    return page_api.SessionLinkReply(path=f"/login?code={call.services.sessions.make_link(digest)}")


async def session(call: ApiCall) -> page_api.SessionReply:
    """Who the page belongs to, and what its changes must bring."""
    csrf = getattr(call.request.state, "csrf", "") if call.request is not None else ""
    return page_api.SessionReply(user=call.caller.user, role=call.caller.role, csrf=csrf, version=__version__)


async def end_session(call: ApiCall) -> page_api.SessionReply:
    """Log out."""
    assert call.request is not None
    call.services.sessions.close(call.request.cookies.get(COOKIE, ""))
    return page_api.SessionReply(user=call.caller.user, role=call.caller.role, csrf="", version=__version__)


async def changes(call: ApiCall) -> Response:
    """A line whenever something was written, for an hour or for `seconds`; what it was, the routes tell to those who may see it."""
    until = time.monotonic() + min(LONGEST_S, call.query.get("seconds", LONGEST_S))

    async def lines() -> AsyncIterator[bytes]:
        yield msgspec.json.encode(page_api.ChangeFrame()) + b"\n"
        with call.services.notifier.subscription() as changed:
            while (left := until - time.monotonic()) > 0:
                found = await changed.take(min(CHANGES_S, left))
                yield msgspec.json.encode(page_api.ChangeFrame(changed=bool(found))) + b"\n"
                await asyncio.sleep(TOGETHER_S)

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def slices(call: ApiCall) -> page_api.SlicesReply:
    """Every slice type there is, with its facts and its prices by place."""
    return page_api.SlicesReply(slices=[_slice_view(one) for one in all_slices()])


def _slice_view(one: Slice) -> page_api.SliceView:
    offers = offers_for(one)
    return page_api.SliceView(
        type=one.accelerator_type,
        generation=one.generation,
        chips=one.chips,
        hosts=one.hosts,
        topology=one.topology_text,
        hbm_gib=one.hbm_bytes / 2**30,
        peak_tflops=one.peak_bf16 / 1e12,
        on_demand=price_of(one),
        spot=price_of(one, spot=True),
        prices=[
            page_api.PriceView(place=offer.zone or offer.region, on_demand=offer.on_demand, spot=offer.spot)
            for offer in offers
        ],
    )


def plan(call: ApiCall) -> page_api.PlanReply:
    """Slices, meshes and batches for a training run, ranked."""
    # The planner is not needed to start a server, and takes a while to import.
    from podway.model.families import find_model
    from podway.plan.picking import slices_named
    from podway.plan.plans import TrainPlan
    from podway.plan.search import PlanOptions, plan_train

    body: page_api.PlanBody = call.body
    options = PlanOptions(
        seq=body.seq, batch=body.batch, tokens=body.tokens, days=body.days, budget=body.budget, spot=body.spot
    )
    shape = find_model(body.model)
    search = plan_train(shape, options, slices_named(body.tpu))

    def view(found: TrainPlan) -> page_api.PlanView:
        return page_api.PlanView(
            slice=found.slice.accelerator_type,
            topology=found.slice.topology_text,
            chips=found.chips,
            mesh=str(found.mesh),
            axes={axis: found.mesh.size(axis) for axis in AXES if found.mesh.size(axis) > 1},
            batch=found.training.batch,
            remat=str(found.training.remat),
            step_s=found.time.total,
            tokens_s=found.tokens_per_second,
            mfu=found.mfu,
            hourly_cost=found.dollars_per_hour,
            hours=found.hours(body.tokens) if body.tokens else None,
            cost=found.dollars(body.tokens) if body.tokens else None,
            memory=found.memory.parts,
            memory_limit=found.memory.limit,
            time=found.time.parts,
        )

    return page_api.PlanReply(model=body.model, parameters=count(shape), plans=[view(one) for one in search.plans[:40]])
