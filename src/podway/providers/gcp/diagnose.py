"""Google Cloud for `podway doctor`: zones, credentials, project, APIs, quota and keys: what is told without waiting first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from podway.errors import UserError
from podway.providers.diagnosis import Finding, ask
from podway.providers.gcp.configured import check_configured

if TYPE_CHECKING:  # Google's clients take a second
    from podway.providers.gcp.account import Account
    from podway.providers.gcp.api import Cloud

REACH_S = 5.0
_NETWORK = "check the network of this machine, and HTTPS_PROXY if it needs one"
QUOTAS = "https://console.cloud.google.com/iam-admin/quotas?service=tpu.googleapis.com&project="


def diagnose(root: Path) -> Iterator[Finding]:
    """Each as soon as it is known. Nothing is made and nothing is changed."""
    try:
        check_configured(root)
    except UserError as error:
        yield Finding(what="credentials and project", ok=False, note=error.what, fix=error.hint)
        return
    # Here, not above: a person whose configuration is wrong need not wait for Google's clients.
    from podway.providers.gcp.account import Account
    from podway.providers.gcp.errors import GcpError

    account = Account(root)

    def called(what: str, look: Callable[[], str]) -> Iterator[Finding]:
        try:
            yield from ask(what, look)
        except GcpError as error:
            yield Finding(what=what, ok=False, note=error.what, fix=error.hint or "try again in a moment")

    yield from called("zones", lambda: _zones(account.settings.zones))
    credentials = next(called("credentials", lambda: _log_in(account)))
    yield credentials
    if not credentials.ok:
        return
    try:
        _reach(account)
    except UserError as error:  # each of the others would wait for as long
        yield Finding(what="network", ok=False, note=error.what, fix=error.hint)
        return
    project = next(called("project", lambda: _project(account)))
    yield project
    if not project.ok:
        return
    from podway.providers.gcp.api import Cloud

    cloud = Cloud(account)
    yield from called("Cloud TPU API", lambda: _listed(len(cloud.look(("node", "queued resource")).resources)))
    yield from called("Compute Engine API", lambda: _listed(len(cloud.look(("firewall rule",)).resources)))
    yield from called("quota", lambda: _quota(cloud, account.project))
    key = account.identity_file
    yield from called("ssh key of the hosts", lambda: str(key) if key.exists() else "made by the first launch")


def _log_in(account: Account) -> str:
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import GoogleAuthError
    from google.auth.transport.requests import Request

    from podway.providers.gcp.settings import LOG_IN

    found = account.credentials()
    if isinstance(found, AnonymousCredentials):
        return f"none needed at {account.settings.endpoint}"
    try:
        if not found.valid:
            found.refresh(Request())  # type: ignore[no-untyped-call]
    except GoogleAuthError as error:
        raise UserError(f"Google refuses these credentials: {error}", LOG_IN) from None
    return str(getattr(found, "service_account_email", "") or "valid")


def _project(account: Account) -> str:
    """Its name, once it is known that it is there; whether the API is enabled is for the checks that follow."""
    from podway.providers.gcp.errors import GcpError
    from podway.providers.gcp.project_check import check_project

    try:
        check_project(account)
    except GcpError as error:
        if error.no_project:
            raise
    return account.project


def _reach(account: Account) -> None:
    """Any answer will do: what it says is for the checks that follow."""
    import requests

    address = account.settings.endpoint or "https://tpu.googleapis.com"
    try:
        requests.head(address, timeout=REACH_S)
    except requests.Timeout:
        raise UserError(f"{address} does not answer within {REACH_S:g} s", _NETWORK) from None
    except requests.RequestException:
        raise UserError(f"{address} cannot be reached", _NETWORK) from None


def _listed(count: int) -> str:
    return f"answers; {count} of what it lists made by this Podway" if count else "answers"


def _quota(cloud: Cloud, project: str) -> str:
    """The generations that the project may hold anything of, anywhere."""
    held: dict[str, bool] = {}
    for one in cloud.quotas():
        limits = [limit for part in one.limits for limit in (part.default, *part.places.values())]
        some = any(limit is None or limit != 0 for limit in limits)
        held[one.generation] = held.get(one.generation, False) or some
    having = sorted(name for name, some in held.items() if some)
    if not having:
        raise UserError("the project has a quota of 0 for every TPU", f"ask for one: {QUOTAS}{project}")
    return f"for {', '.join(having)}"


def _zones(chosen: tuple[str, ...]) -> str:
    from podway.providers.gcp.places import tpu_zones
    from podway.task.fields import did_you_mean

    known = tpu_zones()
    for zone in chosen:
        if zone not in known:
            raise UserError(
                f"no TPU is known in zone {zone}", f"correct zones in gcp.yaml: {did_you_mean(zone, known)}"
            )
    return ", ".join(chosen) if chosen else "all that have the slice"
