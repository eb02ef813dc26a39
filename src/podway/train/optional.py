"""Packages that only some data needs: imported when first used, and asked for by name when they are missing."""

import importlib
from typing import Any

from podway.errors import UserError


def require_module(module: str, package: str, what: str) -> Any:
    """The module; `what` is the thing that needs it, and `package` what to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(
            f"{what} needs the package {package}, which is not installed", f"pip install {package}"
        ) from None
