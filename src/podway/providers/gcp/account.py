"""Settings that became real: the project, its credentials, this Podway's owner mark, and the ssh key of the hosts."""

import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import google.auth
from google.auth.credentials import AnonymousCredentials, Credentials
from google.auth.exceptions import DefaultCredentialsError, RefreshError
from google.oauth2.credentials import Credentials as UserCredentials

from podway.errors import UserError
from podway.files import write_atomically
from podway.providers.gcp.configured import check_configured, find_project, may_have_credentials, no_project
from podway.providers.gcp.settings import LOG_IN, SCOPE, VARIABLES, Settings, read_settings
from podway.providers.owner import owner_of

GCLOUD_S = 30.0


class Account:
    """Each is looked for once, when it is first needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "gcp"
        self._project: str | None = None
        self._credentials: Credentials | None = None
        self._read: tuple[tuple[object, ...], Settings] | None = None

    @property
    def settings(self) -> Settings:
        """Read again when the file or the environment has changed, so that a change takes effect at once."""
        path = self.root / "gcp.yaml"
        stamp = path.stat().st_mtime_ns if path.exists() else 0
        key = (stamp, *(os.environ.get(name) for name in VARIABLES))
        if self._read is None or self._read[0] != key:
            self._read = (key, read_settings(self.root))
        return self._read[1]

    @property
    def owner(self) -> str:
        """Marks what this Podway makes in the project."""
        return self.settings.owner or owner_of(self.folder)[:8]

    @property
    def project(self) -> str:
        """From the settings, or from where the credentials come."""
        settings = self.settings
        if settings.project:
            return settings.project
        if self._project is None:
            self._project = find_project(settings) or _default_project(self.root)
        return self._project

    def credentials(self) -> Credentials:
        """What proves to Google who is asking."""
        if self.settings.endpoint and not os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
            return AnonymousCredentials()  # type: ignore[no-untyped-call]
        if self._credentials is None:
            if not may_have_credentials():  # else google.auth looks for a metadata server, for many seconds
                raise UserError("no Google Cloud credentials are found on this machine", LOG_IN)
            try:
                self._credentials, _ = google.auth.default(scopes=[SCOPE])
            except DefaultCredentialsError:
                self._credentials = _gcloud_credentials()
        return self._credentials

    def check(self) -> None:
        """Say what is missing to ask Google Cloud for anything, before it is asked."""
        check_configured(self.root)
        _ = self.project
        self.credentials()

    @property
    def identity_file(self) -> Path:
        """The private key that logs in to the hosts."""
        return self.folder / "id_ed25519"

    def public_key(self) -> str:
        """The key that hosts are given; the pair is made when it is first asked for."""
        public = self.identity_file.with_suffix(".pub")
        if not public.exists():
            import asyncssh  # it takes a third of a second, and only a first launch needs it

            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            key = asyncssh.generate_private_key("ssh-ed25519", comment="podway")
            write_atomically(self.identity_file, key.export_private_key(), mode=0o600)
            write_atomically(public, key.export_public_key())
        return public.read_text().strip()


def _default_project(root: Path) -> str:
    """What the credentials say of themselves: only where there are any, since google.auth looks long for them."""
    found = None
    if may_have_credentials():
        try:
            found = google.auth.default(scopes=[SCOPE])[1]
        except DefaultCredentialsError:
            found = _gcloud().get("configuration", {}).get("properties", {}).get("core", {}).get("project")
    if not found:
        raise no_project(root)
    return str(found)


def _gcloud_credentials() -> Credentials:
    """The credentials of gcloud's own login, asked of gcloud whenever the token is over."""

    def refresh(request: object, scopes: object) -> tuple[str, datetime.datetime]:
        credential = _gcloud().get("credential") or {}
        if not credential.get("access_token"):
            raise RefreshError("gcloud has no credentials")  # type: ignore[no-untyped-call]
        expiry = datetime.datetime.fromisoformat(credential["token_expiry"].replace("Z", "+00:00"))
        return credential["access_token"], expiry.replace(tzinfo=None)  # google-auth wants naive UTC

    if not _gcloud().get("credential", {}).get("access_token"):
        raise UserError("no Google Cloud credentials are found on this machine", LOG_IN)
    return UserCredentials(token=None, refresh_handler=refresh)  # type: ignore[no-untyped-call]


def _gcloud() -> dict[str, Any]:
    """What gcloud knows of its login and its configuration; nothing where there is no gcloud."""
    command = ["gcloud", "config", "config-helper", "--format=json"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GCLOUD_S, stdin=subprocess.DEVNULL)
        found = json.loads(done.stdout) if done.returncode == 0 else {}
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
