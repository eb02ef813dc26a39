"""Holds what is sent against the schema of JobSet's CRD (schemas/jobsets.json: the published one without its prose).

Structural schemas as Kubernetes uses them: types, required fields, enumerations, patterns, limits. A field that the schema does not
have is refused too, where the real server would drop it in silence: nothing Podway sends may be without effect. CEL rules are the
real server's alone.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

Fields = dict[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


@cache
def schema(kind: str) -> Fields | None:
    """The schema of a kind, where there is one."""
    path = Path(__file__).parent / "schemas" / f"{kind}.json"
    found: Fields | None = json.loads(path.read_text()) if path.exists() else None
    return found


def problems(value: Any, against: Fields, path: str = "") -> list[str]:
    """What of a value its schema does not allow, in the real server's words."""
    if against.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) else [f"{path}: Invalid value: must be an integer or a string"]
    kind = against.get("type")
    if kind in _TYPES and (not isinstance(value, _TYPES[kind]) or (kind != "boolean" and isinstance(value, bool))):
        return [f'{path}: Invalid value: "{type(value).__name__}": must be of type {kind}']
    if "enum" in against and value not in against["enum"]:
        allowed = ", ".join(f'"{one}"' for one in against["enum"])
        return [f'{path}: Unsupported value: "{value}": supported values: {allowed}']
    found: list[str] = []
    if isinstance(value, dict):
        found += _object(value, against, path)
    elif isinstance(value, list):
        if len(value) > against.get("maxItems", len(value)):
            found.append(f"{path}: Too many: {len(value)}: must have at most {against['maxItems']} items")
        for index, item in enumerate(value):
            found += problems(item, against.get("items") or {}, f"{path}[{index}]")
    elif isinstance(value, str):
        if "pattern" in against and not re.search(against["pattern"], value):
            found.append(f'{path}: Invalid value: "{value}": should match {against["pattern"]}')
        if len(value) > against.get("maxLength", len(value)):
            found.append(f"{path}: Too long: may not be more than {against['maxLength']} bytes")
    elif isinstance(value, int | float) and not against.get("minimum", value) <= value <= against.get("maximum", value):
        found.append(f"{path}: Invalid value: {value}: out of range")
    return found


def _object(value: Fields, against: Fields, path: str) -> list[str]:
    found = [f"{_below(path, key)}: Required value" for key in against.get("required") or () if key not in value]
    properties, others = against.get("properties"), against.get("additionalProperties")
    for key, item in value.items():
        if properties and key in properties:
            found += problems(item, properties[key], _below(path, key))
        elif isinstance(others, dict):
            found += problems(item, others, f"{path}[{key}]")
        elif properties is not None and not against.get("x-kubernetes-preserve-unknown-fields"):
            found.append(f'unknown field "{_below(path, key)}"')
    return found


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
