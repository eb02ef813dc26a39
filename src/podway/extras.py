"""Packages that come with an extra, and the one error that names the extra to install.

`pip install podway` alone runs every verb up to the point where a package of an extra is needed. A verb that becomes another
program asks beforehand (`require`); an import that is put off until it is needed goes through `load`; anything else that fails
to import is explained where all errors end (`explain`, called by the CLI and by the server).
"""

import importlib
import importlib.util
from types import ModuleType

from podway.errors import UserError

# extra -> the modules that must be there to use it; the first extra that lists a module is the one suggested for it.
EXTRAS = {
    "train": ("numpy", "jax", "optax", "orbax.checkpoint", "safetensors", "tokenizers", "jinja2"),
    "serve": ("numpy", "jax", "safetensors", "tokenizers", "jinja2"),
    "rehearse": ("numpy", "jax", "libtpu"),
    "data": ("pyarrow", "array_record"),
    "plot": ("matplotlib",),
    "ssh": ("asyncssh",),
    "gcp": ("google.cloud.tpu_v2", "google.auth", "google.cloud.storage", "asyncssh"),
    "gke": ("google.cloud.container_v1", "google.auth", "asyncssh"),
    "sandbox": ("grpc", "google.cloud.tpu_v2", "google_crc32c"),
    "postgres": ("psycopg",),
    "s3": ("boto3",),
    "hub": ("huggingface_hub",),
}
# Modules that only some uses of an extra need, so that `require` does not ask for them.
OPTIONAL = {"gcsfs": "gcp", "google": "gcp", "llguidance": "serve", "huggingface_hub": "serve"}


def installed(extra: str) -> bool:
    """Whether all packages of an extra are there."""
    return all(_installed(name) for name in EXTRAS[extra])


def require(extra: str, purpose: str) -> None:
    """A UserError that names the extra, unless all its packages are installed."""
    if missing := [name for name in EXTRAS[extra] if not _installed(name)]:
        raise _not_installed(purpose, missing, extra)


def load(module: str, extra: str, purpose: str) -> ModuleType:
    """The module, imported now; a UserError that names the extra where it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _not_installed(purpose, [error.name or module], extra) from None


def explain(error: BaseException, purpose: str = "this command", extra: str = "", where: str = "") -> UserError | None:
    """The error as the user's to fix, where a package of an extra is missing; None for any other error."""
    name = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    parts = [name, *(name.rsplit(".", cut)[0] for cut in range(1, name.count(".") + 1))]
    if parts[-1] in ("", "podway"):
        return None
    listing = [known for known, modules in EXTRAS.items() if any(_covers(module, parts) for module in modules)]
    found = extra or next(iter(listing), "") or next((OPTIONAL[part] for part in parts if part in OPTIONAL), "")
    return _not_installed(purpose, [name], found, where) if found else None


def _covers(module: str, parts: list[str]) -> bool:
    """`google.cloud.tpu_v2` fails as `google` where nothing of Google is installed."""
    return module in parts or module.startswith(f"{parts[0]}.")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def _not_installed(purpose: str, modules: list[str], extra: str, where: str = "") -> UserError:
    listed = ", ".join(modules[:-1]) + (" and " if len(modules) > 1 else "") + modules[-1]
    verb = "are" if len(modules) > 1 else "is"
    place = f" {where}" if where else ""
    return UserError(f"{purpose} needs {listed}, which {verb} not installed{place}", f"pip install 'podway[{extra}]'")
