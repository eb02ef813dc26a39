"""Whether the project can be used at all, by one call, before Google's clients are imported: a misspelt name is told within a second."""

import msgspec
import requests
from google.api_core.exceptions import from_http_response
from google.auth.transport.requests import AuthorizedSession

from podway.decoding import from_json
from podway.providers.gcp.account import Account
from podway.providers.gcp.configured import project_source
from podway.providers.gcp.errors import GcpError, explain, no_such_project
from podway.task.fields import nearest

CHECK_S = 5.0
TPU = "https://tpu.googleapis.com"
RESOURCE_MANAGER = "https://cloudresourcemanager.googleapis.com"


class _Project(msgspec.Struct, frozen=True, rename="camel"):
    project_id: str = ""


class _Projects(msgspec.Struct, frozen=True):
    projects: tuple[_Project, ...] = ()


def check_project(account: Account) -> None:
    """List one TPU of any zone. A `GcpError` where that is refused; one of the project itself names the nearest project there is."""
    session = AuthorizedSession(account.credentials())  # type: ignore[no-untyped-call]
    name, endpoint = account.project, account.settings.endpoint
    try:
        _get(session, f"{endpoint or TPU}/v2/projects/{name}/locations/-/nodes?pageSize=1")
    except GcpError as error:
        if not error.no_project:
            raise
        near = nearest(name, _visible(session, endpoint or RESOURCE_MANAGER))
        guess = f"did you mean `{near}`? " if near else ""
        raise no_such_project(
            name, f"{guess}the name is from {project_source(account.root)}; your projects: gcloud projects list"
        ) from None


def _visible(session: requests.Session, address: str) -> list[str]:
    """The projects that this account sees; none where it may not list them."""
    try:
        found = from_json(_get(session, f"{address}/v1/projects?pageSize=500"), _Projects)
    except (GcpError, msgspec.MsgspecError):
        return []
    return [one.project_id for one in found.projects]


def _get(session: requests.Session, url: str) -> bytes:
    try:
        answer = session.get(url, timeout=CHECK_S)
        if answer.status_code >= 400:
            raise from_http_response(answer)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise explain(error, "it", None) from None
    return answer.content
