"""Names of resources, as Google's APIs write them, and times."""

import re
import zlib
from datetime import UTC, datetime

from podway.sandbox.status import ApiError, invalid

_ID = re.compile(r"^[A-Za-z0-9_.~+%-]+$")  # facts of the API: what an id may be made of
LABEL_LENGTH, MOST_LABELS = 63, 64
_PARENT = re.compile(r"^projects/([^/]+)/locations/([^/]+)$")
_NAME = re.compile(r"^projects/([^/]+)/locations/([^/]+)/([A-Za-z]+)/([^/]+)$")


def parent_of(project: str, zone: str) -> str:
    """`projects/P/locations/Z`."""
    return f"projects/{project}/locations/{zone}"


def split_parent(parent: str) -> tuple[str, str]:
    """Project and zone of a collection's parent."""
    found = _PARENT.match(parent)
    if not found:
        raise invalid(f"Invalid parent: '{parent}'; expected projects/PROJECT/locations/ZONE")
    return found[1], found[2]


def split_name(name: str, collection: str) -> tuple[str, str, str]:
    """Project, zone and id of a resource's name."""
    found = _NAME.match(name)
    if not found or found[3] != collection:
        raise invalid(f"Invalid resource name: '{name}'; expected projects/PROJECT/locations/ZONE/{collection}/ID")
    return found[1], found[2], found[4]


def check_id(field: str, value: str) -> str:
    """An id that a resource may have."""
    if not value:
        raise invalid(f"Missing required field: {field}")
    if not _ID.match(value) or len(value) > 128:
        raise invalid(f"Invalid {field}: '{value}'; it must match {_ID.pattern}")
    return value


def check_labels(labels: object) -> None:
    """Labels as Google allows them ("Requirements for labels"): few, short, of lower-case letters, digits, `_` and `-`."""
    if labels is not None and not isinstance(labels, dict):
        raise invalid("resource labels are invalid: an object is expected")
    for key, value in (labels or {}).items():
        for what, text in (("key", str(key)), ("value", str(value))):
            bad = next((at for at, letter in enumerate(text) if not _fits_label(letter)), None)
            if bad is not None:
                said = f"{what} \"{text}\" contains invalid character '{text[bad]}' at index {bad}"
                raise invalid(f'resource labels are invalid: {said} for key "{key}"')
            if len(text) > LABEL_LENGTH or len(text.encode()) > 2 * LABEL_LENGTH + 2:
                raise invalid(f'resource labels are invalid: {what} "{text}" is longer than {LABEL_LENGTH} characters')
        if not key or not str(key)[0].isalpha():
            raise invalid(f'resource labels are invalid: key "{key}" must begin with a lowercase letter')
    if len(labels or {}) > MOST_LABELS:
        raise invalid(f"resource labels are invalid: {len(labels or {})} labels; at most {MOST_LABELS} are allowed")


def _fits_label(letter: str) -> bool:
    return letter in "_-" or letter.isdecimal() or (letter.isalpha() and letter == letter.lower())


def project_number(project: str) -> str:
    """The number a project has beside its id: always the same one."""
    return project if project.isdigit() else str(100_000_000_000 + zlib.crc32(project.encode()))


def stamp(when: float) -> str:
    """RFC 3339 with microseconds, as the JSON of a Timestamp."""
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def read_stamp(text: str) -> float:
    """The other way round."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        raise invalid(f"Invalid time: '{text}'") from None


def read_duration(text: str) -> float:
    """Seconds of the JSON of a Duration, `21600s`."""
    try:
        if not text.endswith("s"):
            raise ValueError
        return float(text[:-1])
    except ValueError:
        raise ApiError("INVALID_ARGUMENT", f"Invalid duration: '{text}'; expected seconds such as '3600s'") from None
