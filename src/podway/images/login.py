"""Logins to registries, where docker and podman keep them: `auth.json` or `config.json`, and the helpers that these name."""

import base64
import binascii
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from podway.errors import UserError
from podway.images.reference import DOCKER_HUB, parse_reference

HELPER_S = 60.0
# Names under which a login to Docker Hub is kept, the one that tools write first.
HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "registry-1.docker.io", DOCKER_HUB)
_TOKEN_USER = "<token>"  # a helper's word for: the secret is an identity token


class RegistryLogin(msgspec.Struct, frozen=True, kw_only=True):
    """User and password."""

    user: str
    password: str

    @property
    def basic(self) -> str:
        """The header's value."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def login_key(server: str | None, image: str) -> str:
    """The name that a login is kept under: of this registry, or of the one that the image names."""
    found = server or parse_reference(image).registry
    return HUB_KEYS[0] if found in HUB_KEYS else found


def find_login(registry: str) -> RegistryLogin | None:
    """The first that is found; None: ask without one."""
    keys = HUB_KEYS if registry == DOCKER_HUB else (registry, f"https://{registry}", f"http://{registry}")
    for path, document in _documents():
        helper = next((name for key in keys if (name := (document.get("credHelpers") or {}).get(key))), None)
        if helper or document.get("credsStore"):
            found = _from_helper(str(helper or document["credsStore"]), keys[0])
            if found is not None or helper:
                return found
        for key in keys:
            entry = (document.get("auths") or {}).get(key)
            if isinstance(entry, dict) and (found := _from_entry(path, entry)) is not None:
                return found
    return None


def _documents() -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in _paths():
        try:
            document = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read: {error}", "log in to the registry again, or remove the file"
            ) from None
        if isinstance(document, dict):
            yield path, document


def _paths() -> list[Path]:
    if named := os.environ.get("REGISTRY_AUTH_FILE"):
        return [Path(named)]
    docker = Path(os.environ.get("DOCKER_CONFIG") or Path("~/.docker").expanduser()) / "config.json"
    podman = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}") / "containers" / "auth.json"
    return [docker, podman]


def _from_entry(path: Path, entry: dict[str, Any]) -> RegistryLogin | None:
    if not entry.get("auth"):
        return None
    try:
        user, colon, password = base64.b64decode(str(entry["auth"]), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        colon = user = password = ""
    if not colon:
        raise UserError(f"{path}: a login in it cannot be read", "log in to the registry again")
    return RegistryLogin(user=user, password=password)


def _from_helper(name: str, registry: str) -> RegistryLogin | None:
    """docker-credential-NAME; None where it has no login for the registry."""
    command = [f"docker-credential-{name}", "get"]
    try:
        done = subprocess.run(command, input=registry.encode(), capture_output=True, timeout=HELPER_S)
        answer = json.loads(done.stdout) if done.returncode == 0 else {}
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    if not isinstance(answer, dict) or not answer.get("Secret") or answer.get("Username") == _TOKEN_USER:
        return None
    return RegistryLogin(user=str(answer.get("Username") or ""), password=str(answer["Secret"]))
