"""The functions of the routes about services."""

from podway.server import service_api as api
from podway.server import views
from podway.server.routing import ApiCall
from podway.server.service_views import preview_view, service_view, services_for


def preview_service(call: ApiCall) -> api.ServicePreviewReply:
    """What an apply would do: the difference to the service there is, and the offers for a new replica. Nothing is done."""
    return preview_view(call.services.service_verbs.preview(call.body, call.caller))


def apply(call: ApiCall) -> api.ApplyReply:
    """Make a service, or bring the one of that name to what the task says: in place, or by a rolling update."""
    body: api.ApplyBody = call.body
    service, change = call.services.service_verbs.apply(body.request, call.caller, body.canary)
    return api.ApplyReply(service=service_view(call.services.store, service), change=change)


def services(call: ApiCall) -> api.ServicesReply:
    """Every live service the caller may see."""
    return api.ServicesReply(services=services_for(call.services.store, call.caller))


def service(call: ApiCall) -> api.ServiceView:
    """One service, alive or the latest of that name; with `past`, replicas that ended too."""
    return service_view(call.services.store, call.find_service(), ended=call.query.get("past", False))


def scale(call: ApiCall) -> api.ServiceView:
    """Keep another number of replicas."""
    body: api.ScaleBody = call.body
    low, high = body.min_replicas, body.max_replicas
    done = call.services.service_verbs.scale(call.path["service"], low, high, body.group or "")
    return service_view(call.services.store, done)


def canary(call: ApiCall) -> api.ServiceView:
    """Give the canary another share of the traffic, or all of it."""
    verbs, name, body = call.services.service_verbs, call.path["service"], call.body
    done = verbs.promote(name) if body.share is None else verbs.set_share(name, body.share)
    return service_view(call.services.store, done)


def rollback(call: ApiCall) -> api.ServiceView:
    """Go back to an earlier revision, or from a canary."""
    done = call.services.service_verbs.rollback(call.path["service"], call.body.revision)
    return service_view(call.services.store, done)


def share_service(call: ApiCall) -> api.ServiceView:
    """Let a person view or use a service."""
    done = call.services.service_verbs.share(call.path["service"], call.path["user"], call.body.right)
    return service_view(call.services.store, done)


def unshare_service(call: ApiCall) -> api.ServiceView:
    """Take back what was granted to a person."""
    done = call.services.service_verbs.share(call.path["service"], call.path["user"], None)
    return service_view(call.services.store, done)


def end_service(call: ApiCall) -> api.ServiceView:
    """End a service and delete all its replicas."""
    return service_view(call.services.store, call.services.service_verbs.down(call.path["service"]))


def service_events(call: ApiCall) -> api.ServiceEventsReply:
    """A service's history after an event id."""
    found = call.services.store.events(call.find_service().id, call.query.get("after", 0))
    return api.ServiceEventsReply(events=[views.event_view(event) for event in found])
