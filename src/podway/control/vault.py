"""Secrets between the moment a job is submitted and the moment its last rank has started.

A job's secret values must survive a restart of the server, and must not be on its disk in clear: they are sealed with a key
that only the server's user can read (mode 0600, or PODWAY_SECRET_KEY for a team's servers, which share a database).
"""

import base64
import hashlib
import hmac
import os
from pathlib import Path

import msgspec
from cryptography.fernet import Fernet, InvalidToken

from podway.decoding import from_json
from podway.errors import UserError


class SecretVault:
    """Seals and opens the secrets of jobs."""

    def __init__(self, key_file: Path) -> None:
        key = os.environ.get("PODWAY_SECRET_KEY", "").encode() or _key(key_file)
        self._key = key.strip()
        try:
            self._fernet = Fernet(key)
        except ValueError:
            raise UserError(
                "the secret key is not a Fernet key", f"check PODWAY_SECRET_KEY or remove {key_file}"
            ) from None

    def derive(self, purpose: str) -> str:
        """A secret for one purpose, the same on every server that has the key."""
        found = hmac.new(self._key, purpose.encode("utf-8", "surrogateescape"), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(found).decode().rstrip("=")

    def seal(self, values: dict[str, str]) -> bytes:
        """Encrypted; empty for no secrets."""
        return self._fernet.encrypt(msgspec.json.encode(values)) if values else b""

    def open(self, sealed: bytes) -> dict[str, str]:
        """The values back."""
        if not sealed:
            return {}
        try:
            return from_json(self._fernet.decrypt(sealed), dict[str, str])
        except InvalidToken:
            raise UserError("this server cannot open the job's secrets", "submit the job again with --secret") from None


def _key(path: Path) -> bytes:
    if not path.exists():
        temp = path.with_name(f"{path.name}.{os.getpid()}")
        descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(Fernet.generate_key())
        try:
            os.link(temp, path)  # the first of two servers wins; both then read the same key
        except FileExistsError:
            pass
        finally:
            temp.unlink()
    return path.read_bytes()
