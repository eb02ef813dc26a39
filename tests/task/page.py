"""The tables of keys on docs/task-files.md, from the tables the readers use: `python -m tests.task.page` writes them."""

import re
from collections.abc import Iterator

from podway.task import dstack_keys, skypilot_keys
from podway.task.shapes import Either, Key, ListOf, MapOf, Shape, Table

from .seeds import REPOSITORY

PAGE = REPOSITORY / "docs" / "task-files.md"
_AGAIN = ("any_of", "ordered", "groups", "replicas")  # their items hold keys that stand elsewhere on the page


def tables() -> dict[str, str]:
    """Each block of the page by its name."""
    task, dev = dstack_keys.TASK.keys, dstack_keys.DEV_ENVIRONMENT.keys
    shared = {name: key for name, key in task.items() if name in dev and name in dstack_keys.SERVICE.keys}
    blocks = {"skypilot": skypilot_keys.TASK.keys, "dstack, all types": shared}
    for kind, table in dstack_keys.TABLES.items():
        blocks[f"dstack, {kind}"] = {name: key for name, key in table.keys.items() if name not in shared}
    return {name: _table(keys) for name, keys in blocks.items()}


def _table(keys: dict[str, Key]) -> str:
    rows = ["| key | what it says | here |", "|---|---|---|"]
    for path, key in _flat(keys, ""):
        effect = (
            f"refused: {key.refuse[0]}; {key.refuse[1]}" if key.refuse else f"noted: {key.note}" if key.note else ""
        )
        rows.append(f"| `{path}` | {key.about} | {effect} |")
    return "\n".join(rows)


def _flat(keys: dict[str, Key], prefix: str) -> Iterator[tuple[str, Key]]:
    for name, key in keys.items():
        if name.startswith("_"):
            continue
        yield prefix + name, key
        below = None if name in _AGAIN or key.refuse else _below(key.shape)
        if below:
            yield from _flat(below[1].keys, f"{prefix}{name}{below[0]}.")


def _below(shape: Shape) -> tuple[str, Table] | None:
    match shape:
        case Table():
            return "", shape
        case ListOf(item=item):
            found = _below(item)
            return ("[]" + found[0], found[1]) if found else None
        case MapOf(value=value):
            found = _below(value)
            return (".*" + found[0], found[1]) if found else None
        case Either(options=options):
            return next((found for option in options if (found := _below(option))), None)
        case _:
            return None


def filled(page: str) -> str:
    """The page with each block between its markers written again."""
    for name, table in tables().items():
        begin, end = f"<!-- keys: {name} -->\n", "\n<!-- end -->"
        page = re.sub(f"{re.escape(begin)}.*?{end}", lambda _, b=begin, t=table, e=end: b + t + e, page, flags=re.S)
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
