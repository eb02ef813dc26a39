"""What Google Cloud answers when something is wrong, as what to do about it.

`explain` reads an exception of the official clients (or the error of an operation) once, here, and says which of five it is:

    absent      there is no such resource
    exists      it is there already
    elsewhere   not here, but perhaps in another zone: no capacity, no quota, not offered, not allowed there
    never       not as asked: log in, enable the API, correct the name; a `UserError`
    again       it may pass: a lost connection, a busy service, a limit of requests for each minute
"""

import re
import urllib.parse
from typing import Literal

import requests
from google.api_core import exceptions
from google.auth.exceptions import GoogleAuthError

from podway.errors import ProviderError, UserError
from podway.providers.gcp.settings import LOG_IN

DEADLINE_EXCEEDED = 4  # google.rpc.Code, of a queue that expired
Kind = Literal["absent", "exists", "elsewhere", "never", "again"]

_QUOTA = re.compile(
    r"[Qq]uota(?: limit)? '(?P<quota>[^']+)' (?:has been )?exceeded\.?(?:\s+Limit: (?P<limit>[0-9.]+))?"
)
_PER_MINUTE = re.compile(r"per minute|per 100 seconds|rate.?limit", re.IGNORECASE)
_NO_CAPACITY = re.compile(
    r"no more capacity|not enough (?:resources|capacity)|stockout|ZONE_RESOURCE_POOL", re.IGNORECASE
)
_API_OFF = re.compile(
    r"(?P<api>[a-z]+\.googleapis\.com|Cloud TPU API|Compute Engine API).{0,40}(?:has not been used|is not enabled|disabled)",
    re.IGNORECASE,
)
_DENIED = re.compile(r"[Pp]ermission '?([a-z]+\.[A-Za-z.]+)'? denied|Required '([a-z]+\.[A-Za-z.]+)' permission")
# What the services say of a project that does not exist or is somebody else's; which of the two they do not tell.
_NO_PROJECT = re.compile(
    r"Permission denied on resource project \[?(?P<a>[^\s\]]+?)\]?\.?$|Project '(?P<b>[^']+)' not found or permission denied"
    r"|[Rr]ead access to project '(?P<c>[^']+)' was denied|The resource 'projects/(?P<d>[^'/]+)' was not found"
)
_PROJECT = re.compile(r"(?:\bprojects/|\bin project )'?([a-z0-9](?:[a-z0-9.:-]*[a-z0-9])?)")
_IN_USE = re.compile(r"already being used|resourceInUse|in use by", re.IGNORECASE)
_OF_THE_ZONE = re.compile(r"\bzone\b|\blocation|\bregion|accelerator ?type|subnetwork", re.IGNORECASE)


class GcpError(Exception):
    """What went wrong in one call, and of which of the five kinds it is.

    `sure`: the call certainly had no effect. `no_quota`: the project has a quota of 0, which no waiting changes.
    `no_project`: there is no such project, or this account may not use it.
    """

    def __init__(
        self,
        kind: Kind,
        what: str,
        hint: str = "",
        *,
        sure: bool = True,
        no_quota: bool = False,
        no_project: bool = False,
    ) -> None:
        super().__init__(what)
        self.kind = kind
        self.what = what
        self.hint = hint
        self.sure = sure
        self.no_quota = no_quota
        self.no_project = no_project

    def as_error(self) -> Exception:
        """The same, as the rest of Podway knows it."""
        if self.kind == "never":
            return UserError(self.what, self.hint)
        return ProviderError(self.what)


def explain(error: BaseException, wanted: str, zone: str | None) -> GcpError:
    """An exception of a call about `wanted` (an accelerator type, or a resource) in `zone`."""
    place = f" in {zone}" if zone else ""
    match error:
        case GcpError():
            return error
        case GoogleAuthError():
            return GcpError("never", f"Google Cloud did not accept the credentials: {_line(error)}", LOG_IN)
        case exceptions.NotFound() | exceptions.Forbidden() if named := _NO_PROJECT.search(_line(error)):
            return no_such_project(next(name for name in named.groups() if name))
        case exceptions.NotFound():
            return GcpError("absent", _line(error))
        case exceptions.Aborted():
            return GcpError("again", _line(error), sure=False)
        case exceptions.Conflict() if _IN_USE.search(str(error)):
            return GcpError("again", _line(error))
        case exceptions.Conflict():  # AlreadyExists over gRPC is one too
            return GcpError("exists", _line(error))
        case exceptions.TooManyRequests():  # and ResourceExhausted
            return exhausted(_line(error), wanted, place)
        case exceptions.Forbidden():  # and PermissionDenied
            return _forbidden(_line(error), wanted, place)
        case exceptions.Unauthorized():
            return GcpError("never", f"Google Cloud did not accept the credentials: {_line(error)}", LOG_IN)
        case exceptions.BadRequest():  # InvalidArgument, FailedPrecondition, OutOfRange
            return _bad(_line(error), wanted, place)
        case exceptions.GoogleAPICallError() if error.code in (408, 500, 502, 503, 504):
            return GcpError("again", f"Google Cloud did not do it: {_line(error)}", sure=False)
        case exceptions.GoogleAPICallError():
            return GcpError("again", f"Google Cloud answered: {_line(error)}", sure=False)
        case exceptions.RetryError() | requests.RequestException() | OSError():
            return GcpError("again", f"Google Cloud cannot be reached: {_cause(error)}", sure=False)
        case _:
            raise error


def no_such_project(name: str, hint: str = "your projects: gcloud projects list") -> GcpError:
    """A project that cannot be used, whatever is asked of it."""
    what = f"Google Cloud project {name} does not exist, or this account may not use it"
    return GcpError("never", what, hint, no_project=True)


def failed_operation(code: int, message: str, wanted: str, zone: str | None) -> GcpError:
    """The error an operation ended with; `code` is of google.rpc.Code."""
    if code == DEADLINE_EXCEEDED:
        return GcpError("elsewhere", f"no capacity for {wanted}{f' in {zone}' if zone else ''} came in time")
    kinds: dict[int, type[exceptions.GoogleAPICallError]] = {
        3: exceptions.InvalidArgument,
        5: exceptions.NotFound,
        6: exceptions.AlreadyExists,
        7: exceptions.PermissionDenied,
        8: exceptions.ResourceExhausted,
        9: exceptions.FailedPrecondition,
    }
    made = explain(kinds.get(code, exceptions.InternalServerError)(message), wanted, zone)
    # What was accepted and then failed is not worth the same try in the same place.
    return made if made.kind == "never" else GcpError("elsewhere", made.what, no_quota=made.no_quota)


def exhausted(message: str, wanted: str, place: str) -> GcpError:
    """Nothing left: of the machines, of the project's quota, or of its requests for this minute."""
    if _PER_MINUTE.search(message):
        return GcpError("again", f"too many requests to Google Cloud: {message}")
    quota = _QUOTA.search(message)
    if quota:
        limit = (quota["limit"] or "").rstrip(".")
        told = f" is {limit}" if limit else " is used up"
        return GcpError("elsewhere", f"quota {quota['quota']}{told}{place}", no_quota=bool(limit) and float(limit) == 0)
    if _NO_CAPACITY.search(message):
        return GcpError("elsewhere", f"no capacity for {wanted}{place}")
    return GcpError("elsewhere", f"{wanted}{place}: {message}")


def _forbidden(message: str, wanted: str, place: str) -> GcpError:
    api = _API_OFF.search(message)
    if api:
        name = {"cloud tpu api": "tpu.googleapis.com", "compute engine api": "compute.googleapis.com"}.get(
            api["api"].lower(), api["api"]
        )
        what = f"{api['api']} is not enabled in {_project_in(message)}"
        return GcpError("never", what, f"run: gcloud services enable {name}")
    if "quota" in message.lower():  # Compute Engine answers 403 for it
        return exhausted(message, wanted, place)
    denied = _DENIED.search(message)
    permission = (denied[1] or denied[2]) if denied else ""
    if permission and "/locations/" in message and "/locations/-" not in message:
        return GcpError("elsewhere", f"permission {permission} is missing{place} of {_project_in(message)}")
    if permission:
        return GcpError(
            "never",
            f"permission {permission} is missing in {_project_in(message)}",
            "ask for the role roles/container.admin"
            if permission.startswith("container.")
            else "ask for the role roles/tpu.admin (and roles/compute.admin for disks and ports)",
        )
    return GcpError("elsewhere", f"not allowed{place}: {message}")


def _project_in(message: str) -> str:
    """The project that a message of Google's is about."""
    named = _PROJECT.search(message)
    return f"project {named[1]}" if named else "the project"


def _bad(message: str, wanted: str, place: str) -> GcpError:
    if _NO_CAPACITY.search(message) or _QUOTA.search(message):
        return exhausted(message, wanted, place)
    if _IN_USE.search(message):
        return GcpError("again", message)
    if _OF_THE_ZONE.search(message):
        return GcpError("elsewhere", f"{wanted} is refused{place}: {message}")
    return GcpError("never", f"Google Cloud refuses {wanted}{place}: {message}", "correct it, then launch again")


def _cause(error: BaseException) -> str:
    """What the operating system said, which the clients wrap many times, and whom it was about."""
    asked = getattr(getattr(error, "request", None), "url", None)
    place = f"{urllib.parse.urlsplit(asked).netloc}: " if asked else ""
    if isinstance(error, requests.Timeout):
        return f"{place}no answer in time"
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return f"{place}{inner.strerror}"
        inner = inner.__cause__ or inner.__context__
    return _line(error)


def _line(error: BaseException) -> str:
    """The message alone, on one line: the clients put the URL or the code before it."""
    text = str(getattr(error, "message", "") or error).strip()
    text = re.sub(r"^(?:GET|POST|PUT|PATCH|DELETE) \S+: ", "", text)
    return " ".join(text.split())[:400]
