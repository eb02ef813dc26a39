"""Measures the structure of the source: import cycles, long files and functions, complexity, `Any`, class names used twice.

    python tools/structure.py            a table of all of them, exit 1 when a limit is passed
    python tools/structure.py --list     and every place behind a number

Every import counts, also those inside functions and under TYPE_CHECKING. `tests/test_architecture.py` holds the limits.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

from radon.complexity import average_complexity as average
from radon.complexity import cc_visit

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "podway"
CONTROL = ("catalog", "cli", "control", "gateway", "hosts", "providers", "server", "storage", "task", "plan")

LONGEST_FILE = 450
LONGEST_FUNCTION = 70
COMPLEXITY = 3.60
ANY = 400


def files() -> list[Path]:
    """Every source file of the package."""
    return sorted(SOURCE.rglob("*.py"))


def module_of(path: Path) -> str:
    """`podway.hosts.logs.merge`, for its file."""
    return ".".join(("podway", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def imports_of(path: Path, known: set[str]) -> set[str]:
    """The modules of the package that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known


def cycles() -> list[list[str]]:
    """Groups of modules that import each other (strongly connected, two or more)."""
    paths = {module_of(path): path for path in files()}
    graph = {name: sorted(imports_of(path, set(paths)) - {name}) for name, path in paths.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            at = stack.index(name)
            group, stack[at:] = stack[at:], []
            if len(group) > 1:
                groups.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for name in graph:
        if name not in index:
            visit(name)
    return groups


def average_complexity() -> float:
    """McCabe's number over classes, functions and methods, by radon (`radon cc -a`)."""
    blocks = [block for path in files() for block in cc_visit(path.read_text())]
    return float(average(blocks))


def functions() -> list[tuple[str, int]]:
    """(name, lines) of every function and method."""
    found = []
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                found.append((f"{module_of(path)}.{node.name}", length))
    return found


def any_uses() -> dict[str, int]:
    """How often each file says `Any`, its imports left out."""
    counts = {}
    for path in files():
        lines = [line for line in path.read_text().splitlines() if not re.match(r"\s*from typing import", line)]
        if count := len(re.findall(r"\bAny\b", "\n".join(lines))):
            counts[module_of(path)] = count
    return counts


def shared_class_names() -> dict[str, list[str]]:
    """Class names that stand for more than one thing in the control world, names with an underscore included."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in files():
        module = module_of(path)
        if module.removeprefix("podway.").split(".")[0] not in CONTROL and module.count(".") > 1:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(module)
    return {name: places for name, places in sorted(homes.items()) if len(places) > 1}


def main() -> int:
    """Print the table; 1 when a limit is passed."""
    detail = "--list" in sys.argv
    circles, work, uses, shared = cycles(), functions(), any_uses(), shared_class_names()
    lengths = {module_of(path): path.read_text().count("\n") for path in files()}
    long_files = {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE}
    long_functions = {name: lines for name, lines in work if lines > LONGEST_FUNCTION}
    rows = [
        ("import cycles (lazy and typing-only ones counted)", len(circles), 0, circles),
        (f"files over {LONGEST_FILE} lines", len(long_files), 0, long_files),
        (f"functions over {LONGEST_FUNCTION} lines", len(long_functions), 0, long_functions),
        (
            f"average complexity of {len(work)} functions and their classes",
            round(average_complexity(), 2),
            COMPLEXITY,
            "",
        ),
        ("uses of Any", sum(uses.values()), ANY - 1, dict(sorted(uses.items(), key=lambda item: -item[1]))),
        ("class names used for two things in the control world", len(shared), 0, shared),
    ]
    bad = 0
    for title, value, limit, places in rows:
        passed = value <= limit
        bad += not passed
        print(f"{'ok ' if passed else 'BAD'}  {value:>6}  (at most {limit})  {title}")
        if (places and (detail or not passed) and title != "uses of Any") or (places and detail):
            items = places.items() if isinstance(places, dict) else enumerate(places, 1)
            for name, what in items:
                print(f"        {name}: {what if not isinstance(what, list) else ', '.join(what)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
