"""Holds the shape of the code: which way imports go, what stays out of the CLI, and the limits of files and names."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from podway import crash

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "podway"
FILES = sorted(SOURCE.rglob("*.py"))

# A part may import the parts of its own layer and of those below it; `device` stands on facts alone.
LAYERS = {
    "facts": (
        "errors",
        "certificates",
        "extras",
        "version",
        "crash",
        "decoding",
        "files",
        "home",
        "order",
        "profile_trace",
        "provider_table",
        "quantities",
        "terminal",
        "catalog",
        "task",
        "model.shape",
        "model.layout",
    ),
    "decisions": ("launch", "plan", "gateway"),
    "effects": ("hosts", "images", "providers", "storage"),
    "sequence": ("control",),
    "faces": ("server", "cli", "bench"),
}
DEVICE = ("model", "train", "serve", "rehearse", "simulated_devices")
NO_JAX = (
    "errors",
    "extras",
    "crash",
    "decoding",
    "files",
    "home",
    "profile_trace",
    "quantities",
    "terminal",
    "catalog",
    "task",
    "launch",
    "plan",
    "hosts",
    "images",
    "providers",
    "storage",
    "gateway",
    "control",
    "server",
    "cli",
)
# bench holds one module for each part it measures; those of the device side may import it.
BANNED_NAMES = {"utils", "core", "common", "helpers", "manager", "misc", "base"}
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> list[str]:
    """The podway modules a file imports, type-checking blocks left out."""
    found = []
    tree = ast.parse(path.read_text())
    skip = {id(node) for block in ast.walk(tree) if _is_type_checking(block) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in skip:
            continue
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("podway"):
            base = (node.module or "").removeprefix("podway").lstrip(".")
            names = (
                [alias.name for alias in node.names] if not base or (SOURCE / base.replace(".", "/")).is_dir() else [""]
            )
            found += [".".join(filter(None, [base, name])) for name in names]
        elif isinstance(node, ast.Import):
            found += [alias.name.removeprefix("podway.") for alias in node.names if alias.name.startswith("podway.")]
    return [name for name in found if name]


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def layer_of(module: str) -> str | None:
    for layer, parts in LAYERS.items():
        if any(module == part or module.startswith(part + ".") for part in parts):
            return layer
    if module.split(".")[0] in DEVICE:
        return "device"
    return None


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_one_way(path: Path) -> None:
    here = module_of(path)
    layer = layer_of(here)
    order = list(LAYERS)
    for name in imports(path):
        there = layer_of(name)
        if there is None or layer is None:
            continue
        if here.startswith("bench."):
            continue
        if layer == "device":
            # A rehearsal prices what the compiler made by the planner's model of the chips.
            priced = here.startswith("rehearse.") and name.startswith("plan.")
            assert there in ("facts", "device") or priced, f"{here} imports {name}"
        elif there == "device":
            light = name.split(".")[0] == "model"  # the planner reads shapes and layouts, which import no jax
            assert light or here.startswith("cli.") or here == "server.planning", f"{here} imports {name}"
        else:
            assert order.index(there) <= order.index(layer), f"{here} ({layer}) imports {name} ({there})"


def test_control_side_never_imports_jax() -> None:
    for path in FILES:
        if module_of(path).split(".")[0] in NO_JAX:
            assert not re.search(r"^\s*(import|from) jax\b", path.read_text(), re.M), path


def test_cli_starts_without_heavy_modules() -> None:
    code = "import sys, podway.cli.main; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"jax", "numpy", "sqlalchemy", "starlette", "uvicorn", "rich", "asyncio", "yaml", "http.client", "asyncssh"}
    assert not heavy & set(loaded)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_files_and_functions_are_small_and_documented(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    name = module_of(path)
    assert path.stem not in BANNED_NAMES
    if text.strip():
        assert ast.get_docstring(tree), f"{name} has no docstring"
    assert text.count("\n") <= LONG_FILES.get(name, 450), f"{name} is too long"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno
            limit = LONG_FUNCTIONS.get(f"{name}.{node.name}", 70)
            assert length <= limit, f"{name}.{node.name} has {length} lines"


def test_crash_points_are_those_in_the_source() -> None:
    used = set()
    for path in FILES:
        used |= set(re.findall(r'crash\.point\("([^"]+)"\)', path.read_text()))
    assert used == set(crash.POINTS)


def test_markdown_links_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_types_are_decoded_in_one_place() -> None:
    """msgspec is not safe where two threads meet a type first; `podway.decoding` is."""
    elsewhere = re.compile(r"msgspec\.(json|msgpack)\.(Decoder\(|decode\(.*type=)|msgspec\.convert\(")
    assert [path.name for path in FILES if elsewhere.search(path.read_text())] == ["decoding.py"]
