"""Paths on the machine the command is typed on: made absolute, and looked at before anything is paid for."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from podway.errors import UserError
from podway.task.fields import Field
from podway.task.yamlfile import MAX_BYTES, too_large


def read_file(path: str, what: str, shown: str) -> bytes:
    """The bytes of a small file a person named, as `shown`; `what` says what it should be ("a task file")."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
            size = max(len(data), os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        raise UserError(f"{shown}: no such file", f"give the path of {what}") from None
    except IsADirectoryError:
        raise UserError(f"{shown}: a directory, not a file", f"give the path of {what}") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{shown}: cannot be read: {why}", f"give the path of {what} you may read") from None
    if len(data) > MAX_BYTES:
        raise too_large(shown, size)
    return data


def absolute(text: str, base: Path, local_env: Mapping[str, str]) -> str:
    """The path with `~` expanded and relative ones taken from `base`; it need not exist."""
    if text == "~" or text.startswith("~/"):
        text = local_env.get("HOME", str(Path.home())) + text[1:]
    return os.path.normpath(base / text)


class LocalMachine(msgspec.Struct, frozen=True):
    """What relative paths and `~` mean on the machine the command is typed on."""

    bases: tuple[Path, ...]  # relative paths start from the first of these under which they exist
    env: Mapping[str, str]

    def existing(self, field: Field, text: str, *, directory: bool = False) -> str:
        """The absolute path of a file or directory that must be there."""
        paths = [absolute(text, base, self.env) for base in self.bases]
        for path in paths:
            if _exists(path, directory):
                return path
        kind = "directory" if directory else "file or directory"
        raise field.error(f"no such {kind} on this machine: {paths[0]}", "correct the path, or create it")


def _exists(path: str, directory: bool) -> bool:
    try:
        return Path(path).is_dir() if directory else os.path.lexists(path)
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False
