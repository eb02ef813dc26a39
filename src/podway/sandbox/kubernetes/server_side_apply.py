"""Server-side apply, as far as one manager's objects go: fields that are sent win, those that are not stay, and what is gone from what
the same manager sent before goes. Lists of named things are merged by name, others are replaced.

What the real control plane does next is done at once: the kinds of a CustomResourceDefinition are served, and a Deployment is available.
"""

import copy
from typing import Any

from podway.sandbox.kubernetes.objects import Fields

_KEYS = ("name", "uid")
MANAGER = "f:applied"  # what was sent last, kept as the real server keeps its field sets


def applied(old: Fields | None, body: Fields, manager: str) -> Fields:
    """The object after `manager` applied `body`."""
    sent = copy.deepcopy(body)
    if old is None:
        merged: Fields = sent
    else:
        before: Fields = next((one[MANAGER] for one in _managers(old) if one["manager"] == manager), {})
        merged = _merge(_without(old, before, sent), sent)
    others = [one for one in _managers(old or {}) if one["manager"] != manager]
    entry = {"manager": manager, "operation": "Apply", MANAGER: copy.deepcopy(body)}
    merged["metadata"]["managedFields"] = [*others, entry]
    return merged


def established(body: Fields) -> tuple[str, str]:
    """The group that a CustomResourceDefinition serves, and the version preferred: the newest served."""
    spec = body["spec"]
    return spec["group"], max(one["name"] for one in spec["versions"] if one.get("served", True))


def with_status(plural: str, body: Fields) -> Fields:
    """As the control plane leaves it a moment later."""
    kind = {"customresourcedefinitions": "Established", "deployments": "Available"}.get(plural)
    return {**body, "status": {"conditions": [{"type": kind, "status": "True"}]}} if kind else body


def _managers(found: Fields) -> list[Fields]:
    listed: list[Fields] = found["metadata"].get("managedFields") or [] if found else []
    return [one for one in listed if MANAGER in one]


def _merge(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merge(old.get(key), value) for key, value in new.items()}}
    if isinstance(old, list) and isinstance(new, list) and (key := _key(old + new)):
        known = {one[key]: one for one in old}
        return [
            *(_merge(one, next((each for each in new if each[key] == one[key]), one)) for one in old),
            *(one for one in new if one[key] not in known),
        ]
    return new


def _without(old: Any, before: Any, new: Any) -> Any:
    """Without what was sent before and is not sent now."""
    if isinstance(old, dict) and isinstance(before, dict) and isinstance(new, dict):
        return {
            key: _without(value, before[key], new[key]) if key in before and key in new else value
            for key, value in old.items()
            if key not in before or key in new
        }
    if (
        isinstance(old, list)
        and isinstance(before, list)
        and isinstance(new, list)
        and (key := _key(old + before + new))
    ):
        gone = {one[key] for one in before} - {one[key] for one in new}
        return [one for one in old if one[key] not in gone]
    return old


def _key(items: list[Any]) -> str | None:
    if not items or not all(isinstance(one, dict) for one in items):
        return None
    return next((key for key in _KEYS if all(key in one for one in items)), None)
