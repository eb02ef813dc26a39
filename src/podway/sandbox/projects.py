"""Which projects there are, and what Google's services answer for one that does not exist or that the caller may not use.

A service must not tell strangers which projects exist, so most answer 403 for both; what differs is the text, which is each service's
own, and the reason in `details`.
"""

import re

from podway.sandbox.jsons import JsonObject
from podway.sandbox.names import project_number
from podway.sandbox.status import ApiError

_METHOD = re.compile(r"(Get|List|Create|Delete|Update|Stop|Start|Reset)([A-Za-z]+)")
_KIND = "type.googleapis.com/google.rpc.ErrorInfo"


class Projects:
    """By name, whether the caller may use it."""

    def __init__(self, own: str) -> None:
        self.known = {own: True}

    def usable(self) -> list[str]:
        """Those that a caller sees."""
        return sorted(name for name, usable in self.known.items() if usable)

    def check(self, service: str, project: str, method: str, resource: str = "") -> None:
        """Refuse a call of `service` for a project, as that service does; `resource` is what the call is about."""
        named = next((name for name in self.known if project in (name, project_number(name))), None)
        if named is not None and self.known[named]:
            return
        exists = named is not None
        match service:
            case "compute" if not exists:
                raise ApiError("NOT_FOUND", f"The resource 'projects/{project}' was not found")
            case "compute":
                raise ApiError("PERMISSION_DENIED", f"Required 'compute.{method}' permission for 'projects/{project}'")
            case "cloudresourcemanager":
                raise ApiError("PERMISSION_DENIED", "The caller does not have permission")
            case "serviceusage":
                raise ApiError("PERMISSION_DENIED", f"Project '{project}' not found or permission denied.")
            case "storage" if not exists:
                raise ApiError("INVALID_ARGUMENT", f"Unknown project id: {project}")
            case _ if not exists:
                said = f"Permission denied on resource project {project}."
                asked = {"consumer": f"projects/{project}", "service": f"{service}.googleapis.com"}
                raise ApiError("PERMISSION_DENIED", said, details=(_info("CONSUMER_INVALID", "googleapis.com", asked),))
        permission, about = f"{service}.{_permission(method)}", resource or f"projects/{project}"
        info = _info("IAM_PERMISSION_DENIED", "iam.googleapis.com", {"permission": permission, "resource": about})
        raise ApiError("PERMISSION_DENIED", f"Permission '{permission}' denied on '{about}'", details=(info,))


def _permission(method: str) -> str:
    """`ListNodes` and `GetNode` are nodes.list and nodes.get; methods of Storage are called like their permissions."""
    found = _METHOD.fullmatch(method)
    if not found:
        return method
    noun = found[2][0].lower() + found[2][1:]
    return f"{noun.removesuffix('s')}s.{found[1].lower()}"


def _info(reason: str, domain: str, metadata: dict[str, str]) -> JsonObject:
    return {"@type": _KIND, "reason": reason, "domain": domain, "metadata": metadata}
