"""The functions of the routes that the page needs beside those of the CLI: sessions, changes as they happen, the catalog, a plan."""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
from starlette.responses import Response, StreamingResponse

from podway.catalog.prices import offers_for, price_of
from podway.catalog.slices import Slice, all_slices, find_slice
from podway.control.access import right_on
from podway.errors import UserError
from podway.extras import installed, require
from podway.home import home
from podway.model.params import count
from podway.provider_table import ProviderRow, load, provider_rows
from podway.server import page_api
from podway.server.costs import costs_since
from podway.server.routing import ApiCall
from podway.server.service_load import load_points
from podway.server.sessions import cookie_name
from podway.version import __version__

CHANGES_S = 20.0  # a sign of life
LONGEST_S = 3600.0  # then the page asks again, and its session is looked at again
MOST_PLANS = 40
USUAL_LOAD_S, LONGEST_LOAD_S = 900.0, 7 * 86400.0
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
    call.services.sessions.close(call.request.cookies.get(cookie_name(call.request.headers.get("host", "")), ""))
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
    from podway.plan.picking import slices_named
    from podway.plan.search import PlanOptions, plan_train
    from podway.server.plan_views import plan_view, shape_of

    body: page_api.PlanBody = call.body
    options = PlanOptions(
        seq=body.seq, batch=body.batch, tokens=body.tokens, days=body.days, budget=body.budget, spot=body.spot
    )
    shape = shape_of(body.model, body.config)
    search = plan_train(shape, options, slices_named(body.tpu))
    plans = [plan_view(one, body.tokens) for one in search.plans[:MOST_PLANS]]
    return page_api.PlanReply(model=body.model or "config.json", parameters=count(shape), plans=plans)


def availability(call: ApiCall) -> page_api.AvailabilityReply:
    """What failover has learned: of TPUs only, and recent attempts count more than old ones."""
    now = time.time()
    places = []
    for (provider, kind, zone, spot), record in sorted(call.services.store.tries().items(), key=str):
        if kind is not None:
            then = record.later(now)
            places.append(
                page_api.AvailabilityView(
                    provider=provider,
                    type=kind,
                    place=zone or "",
                    spot=spot,
                    good=then.good,
                    bad=then.bad,
                    at=record.at,
                )
            )
    return page_api.AvailabilityReply(places=places)


def _whose(call: ApiCall) -> str | None:
    """Administrators see everybody's rehearsals, others their own."""
    return None if call.caller.admin else call.caller.user


async def rehearsals(call: ApiCall) -> page_api.RehearsalsReply:
    """Those that this server has run or will run."""
    return page_api.RehearsalsReply(rehearsals=call.services.rehearsals.list(_whose(call)))


async def rehearse(call: ApiCall) -> page_api.RehearsalView:
    """Ask for one; what it names is looked at first."""
    body: page_api.RehearsalBody = call.body
    await asyncio.get_running_loop().run_in_executor(call.services.slow, _check_rehearsal, body)
    return call.services.rehearsals.begin(call.caller.user, body)


def _check_rehearsal(body: page_api.RehearsalBody) -> None:
    """The person is told at once what would fail in the command; a name is one of a model, never of a file here."""
    from podway.model.layout import parse_mesh  # the planner takes a while to import
    from podway.server.plan_views import shape_of

    shape_of(body.model, body.config)
    tpu = find_slice(body.slice, body.topology)
    parse_mesh(body.mesh, chips=tpu.devices)
    require("rehearse", "a rehearsal")


async def follow_rehearsal(call: ApiCall) -> Response:
    """One rehearsal as it goes on, to its end."""
    found = call.services.rehearsals.follow(call.path["rehearsal"], _whose(call))
    first = await anext(found)

    async def lines() -> AsyncIterator[bytes]:
        yield msgspec.json.encode(first) + b"\n"
        async for view in found:
            yield msgspec.json.encode(view) + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def cancel_rehearsal(call: ApiCall) -> page_api.RehearsalView:
    """End one."""
    return await call.services.rehearsals.cancel(call.path["rehearsal"], _whose(call))


def costs(call: ApiCall) -> page_api.CostsReply:
    """What clusters cost, of those the caller may see that live or were created since `past`."""
    store, since = call.services.store, call.query.get("past", time.time() - 30 * 86400)
    clusters = [*store.past_clusters(since), *store.live_clusters()]
    seen = [one for one in clusters if right_on(one, call.caller) is not None]
    return costs_since([(one, store.jobs(one.id)) for one in seen], since)


def clouds(call: ApiCall) -> page_api.CloudsReply:
    """The providers of this server, and what came of asking them."""
    used, report = set(call.services.store.providers_used()), call.services.orphans.last
    found = []
    for name, row in provider_rows().items():
        here = not row.extra or installed(row.extra)
        ready = here and _is_set_up(row)
        found.append(
            page_api.CloudView(
                name=name,
                simulated=row.simulated,
                installed=here,
                configured=ready,
                used=name in used,
                note=_cloud_note(row.extra if not here else "", ready, report.unreachable.get(name, "")),
            )
        )
    return page_api.CloudsReply(clouds=found)


def _is_set_up(row: ProviderRow) -> bool:
    try:
        return not row.configured or bool(load(row.configured)(home()))
    except Exception:  # somebody else's code; a launch there tells more
        return False


def _cloud_note(extra: str, ready: bool, trouble: str) -> str:
    if extra:
        return f"install podway[{extra}] on the server"
    return trouble or ("" if ready else "not set up on the server")


def service_load(call: ApiCall) -> page_api.ServiceLoadReply:
    """Requests and latencies of a service over the last `seconds`, as gateways reported them."""
    now = time.time()
    since = now - min(LONGEST_LOAD_S, call.query.get("seconds", USUAL_LOAD_S))
    samples = call.services.store.services.loads(call.find_service().name, since)
    return page_api.ServiceLoadReply(points=load_points(samples, since, now))
