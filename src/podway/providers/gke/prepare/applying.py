"""Sends the changes in order, each as a server-side apply, and waits where the next ones need it.

The kinds of a release must be served before objects of them can be made, and its controller must run before its webhooks let them
through. Everything can be sent twice: whatever interrupts it, the next run goes on from there.
"""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise

from podway.errors import ProviderError, UserError
from podway.providers.gke.api import KubernetesApi, NotFound
from podway.providers.gke.prepare.changes import CALL_S, Change, Part, applied
from podway.providers.gke.prepare.releases import Release

SERVED_S = 120.0  # for a kind to be served, and for a webhook to answer
AVAILABLE_S = 300.0  # for a controller: its image is pulled first
PAUSE_S = 0.5
_DEFINITION = "CustomResourceDefinition"


def apply_part(api: KubernetesApi, part: Part) -> Iterator[Change]:
    """Each change once it is made."""
    if part.release is None:
        for change in part.changes:
            _send(api, change)
            yield change
        return
    *objects, done = part.changes
    for change, following in pairwise([*objects, done]):
        _send(api, change)
        yield change
        if change.body["kind"] == _DEFINITION and following.body["kind"] != _DEFINITION:
            for one in objects:
                if one.body["kind"] == _DEFINITION:
                    _wait_served(api, one)
    _wait_available(api, part.release)
    _send(api, done)
    yield done


def _send(api: KubernetesApi, change: Change) -> None:
    """Tried again while a kind is not served yet or a webhook does not answer yet."""
    deadline = time.monotonic() + SERVED_S
    while True:
        try:
            applied(api, change.body)
            return
        except (NotFound, ProviderError) as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{change.title} could not be applied: {error}", "run it again: it goes on from there"
                ) from None
            time.sleep(PAUSE_S)


def _wait_served(api: KubernetesApi, change: Change) -> None:
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{change.body['metadata']['name']}"
    _wait(api, path, "Established", SERVED_S, f"{change.title} is not served")


def _wait_available(api: KubernetesApi, release: Release) -> None:
    path = f"/apis/apps/v1/namespaces/{release.namespace}/deployments/{release.deployment}"
    what = f"the controller of {release.name} is not available"
    _wait(api, path, "Available", AVAILABLE_S, what, see=f"kubectl describe pods -n {release.namespace}")


def _wait(api: KubernetesApi, path: str, condition: str, seconds: float, what: str, see: str = "") -> None:
    def holds() -> bool:
        found = (api.call("GET", path, timeout=CALL_S).get("status") or {}).get("conditions") or ()
        return any(one.get("type") == condition and one.get("status") == "True" for one in found)

    if not _until(holds, seconds):
        look = f"see: {see}; then " if see else ""
        raise UserError(f"{what} after {seconds:.0f} s", f"{look}run podway gke prepare again: it goes on from there")


def _until(holds: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if holds():
                return True
        except ProviderError:  # an API server that is busy with new kinds
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE_S)
