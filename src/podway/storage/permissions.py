"""From what Google's storage says when it refuses to what a person has to be given. Pure.

A refusal names the permission most of the time, in one of several wordings; where it does not, the action that was refused tells which
one it takes. Each permission is given by a role, and the hint is the command that gives it.
"""

import re

from podway.errors import UserError
from podway.storage.address import Address

# What each action takes: cloud.google.com/storage/docs/access-control/iam-json
NEEDS = {
    "list": "storage.objects.list",
    "read": "storage.objects.get",
    "write": "storage.objects.create",
    "replace": "storage.objects.delete",
    "look at": "storage.buckets.get",
    "create": "storage.buckets.create",
}
# The narrowest usual role with it: cloud.google.com/storage/docs/access-control/iam-roles
ROLES = {
    "storage.objects.list": "roles/storage.objectViewer",
    "storage.objects.get": "roles/storage.objectViewer",
    "storage.objects.create": "roles/storage.objectCreator",
    "storage.objects.delete": "roles/storage.objectUser",
    "storage.objects.update": "roles/storage.objectUser",
    "storage.buckets.get": "roles/storage.legacyBucketReader",
    "storage.buckets.create": "roles/storage.admin",
}
_PERMISSION = re.compile(r"storage\.(?:buckets|objects|folders|managedFolders|multipartUploads)\.[A-Za-z]+")
_MEMBER = re.compile(r"[\w.+-]+@[\w.-]+\.[a-z]{2,}")
_LOGIN = "log in where the Podway server runs: gcloud auth application-default login"


def refused(said: str, action: str, address: Address, *, who: str = "") -> UserError:
    """`said` is the refusal; `who` asked, where that is known better than the refusal tells."""
    anonymous = "anonymous caller" in said.lower()
    named = _MEMBER.search(said)
    member = "" if anonymous else (named[0] if named else "")
    caller = who or member or ("nobody is logged in, and the public" if anonymous else "the account in use")
    found = _PERMISSION.search(said)
    permission = found[0] if found else NEEDS[action]
    what = f"{address}: {caller} may not {action} it: the permission {permission} is missing"
    if anonymous:
        return UserError(what, _LOGIN, status=403)
    return UserError(what, grant(permission, address, member), status=403)


def grant(permission: str, address: Address, member: str) -> str:
    """The command with which the owner of a bucket gives a permission."""
    role = ROLES.get(permission, "roles/storage.objectUser")
    kind = "serviceAccount" if member.endswith("gserviceaccount.com") else "user"
    whom = f"{kind}:{member}" if member else "MEMBER"
    if permission == "storage.buckets.create":
        return f"have {role} granted on the project: gcloud projects add-iam-policy-binding PROJECT --member={whom} --role={role}"
    return (
        f"have {role} granted: gcloud storage buckets add-iam-policy-binding gs://{address.bucket} "
        f"--member={whom} --role={role}"
    )


def is_refusal(text: str) -> bool:
    """Whether a tool's output says that it was not allowed to."""
    return "403" in text and (_PERMISSION.search(text) is not None or "forbidden" in text.lower())
