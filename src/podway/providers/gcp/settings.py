"""Which Google Cloud project, how to log in to it, and what every resource there is given.

`PODWAY_HOME/gcp.yaml`, all of it optional:

    project: my-project
    zones: [us-east5-b, us-east1-d]    # where slices may be; none: wherever the catalog knows them
    network: default                   # of the nodes; a subnetwork is looked for in the region of each zone
    subnetwork: tpu-subnet
    external_ips: true                 # false: hosts are reached at their internal addresses
    service_account: tpu@my-project.iam.gserviceaccount.com
    tags: [allow-ssh]
    labels: {team: nlp}
    ssh_user: podway
    owner: team-a                      # one name for several servers on one database; none: made by chance, kept in gcp/owner

The environment goes before the file: PODWAY_GCP_PROJECT, PODWAY_GCP_ZONES, PODWAY_GCP_SSH_USER. With PODWAY_GCP_ENDPOINT (and
PODWAY_GCP_GRPC) the same calls go to an emulator, without credentials. Credentials are the application default ones, a service
account's file (GOOGLE_APPLICATION_CREDENTIALS), or whatever `gcloud auth login` left.
"""

import datetime
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import asyncssh
import google.auth
import msgspec
from google.auth.credentials import AnonymousCredentials, Credentials
from google.auth.exceptions import DefaultCredentialsError, RefreshError
from google.oauth2.credentials import Credentials as UserCredentials

from podway.errors import UserError
from podway.files import write_atomically
from podway.providers.ssh.machine import owner_of
from podway.task.fields import Field, did_you_mean
from podway.task.yamlfile import parse

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
KEYS = (
    "project",
    "zones",
    "network",
    "subnetwork",
    "external_ips",
    "service_account",
    "tags",
    "labels",
    "ssh_user",
    "owner",
)
VARIABLES = (
    "PODWAY_GCP_PROJECT",
    "PODWAY_GCP_ZONES",
    "PODWAY_GCP_SSH_USER",
    "PODWAY_GCP_ENDPOINT",
    "PODWAY_GCP_GRPC",
)
LOG_IN = "run: gcloud auth application-default login"
GCLOUD_S = 30.0
# Google, "Creating and managing projects", and "Requirements for labels"
_PROJECT = re.compile(r"(?:[a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]")
_ZONE = re.compile(r"[a-z]+-[a-z]+[0-9]+-[a-z0-9]+")
_OWNER = re.compile(r"[a-z0-9][a-z0-9_-]{0,30}")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The file and the environment, read."""

    project: str | None = None
    zones: tuple[str, ...] = ()
    network: str | None = None
    subnetwork: str | None = None
    external_ips: bool = True
    service_account: str | None = None
    tags: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    ssh_user: str = "podway"
    owner: str | None = None
    endpoint: str | None = None  # of an emulator: http://127.0.0.1:PORT
    grpc: str | None = None


def read_settings(root: Path) -> Settings:
    """The settings of the Podway home `root`, with the environment's word before the file's."""
    path = root / "gcp.yaml"
    try:
        settings = parse_settings(path.read_bytes(), str(path))
    except FileNotFoundError:
        settings = Settings()
    given = {
        "project": os.environ.get("PODWAY_GCP_PROJECT"),
        "zones": tuple(filter(None, re.split(r"[,\s]+", os.environ.get("PODWAY_GCP_ZONES", "")))),
        "endpoint": (os.environ.get("PODWAY_GCP_ENDPOINT") or "").rstrip("/"),
        "grpc": os.environ.get("PODWAY_GCP_GRPC"),
        "ssh_user": os.environ.get("PODWAY_GCP_SSH_USER"),
    }
    return msgspec.structs.replace(settings, **{key: value for key, value in given.items() if value})


def parse_settings(data: bytes, path: str) -> Settings:
    """The settings from the text of the file."""
    documents = parse(data, path)
    if not documents:
        return Settings()
    if len(documents) > 1:
        raise UserError(f"{path}:1:1: the file holds several documents", "write one mapping")
    root = Field(path, documents[0])
    for key, field in root.entries().items():
        if key not in KEYS:
            raise field.error("unknown key", did_you_mean(key, KEYS))
    found: dict[str, Any] = {key: _word(root, key, None) for key in ("network", "subnetwork", "service_account")}
    found["project"] = _word(root, "project", _PROJECT)
    found["owner"] = _word(root, "owner", _OWNER)
    found["ssh_user"] = _word(root, "ssh_user", _USER) or "podway"
    external = root.get("external_ips")
    found["external_ips"] = external.flag() if external is not None else True
    found["zones"] = tuple(_matching(item, "zone", _ZONE) for item in _items(root, "zones"))
    found["tags"] = tuple(item.words() for item in _items(root, "tags"))
    labels = root.get("labels")
    found["labels"] = {key: value.text() for key, value in labels.entries().items()} if labels else {}
    return Settings(**found)


def _items(root: Field, key: str) -> list[Field]:
    field = root.get(key)
    if field is None:
        return []
    return field.items() if field.is_list else [field]


def _word(root: Field, key: str, shape: re.Pattern[str] | None) -> str | None:
    field = root.get(key)
    if field is None:
        return None
    return field.words() if shape is None else _matching(field, key, shape)


def _matching(field: Field, what: str, shape: re.Pattern[str]) -> str:
    if not shape.fullmatch(field.words()):
        raise field.error(
            f"{field.found} cannot be a {what.replace('_', ' ')}", "write it as the Google Cloud console shows it"
        )
    return field.words()


class Account:
    """Settings that became real: project, credentials, owner and ssh key, each looked for once, when it is first needed."""

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
            self._project = os.environ.get("GOOGLE_CLOUD_PROJECT") or _default_project(self.folder.parent)
        return self._project

    def credentials(self) -> Credentials:
        """What proves to Google who is asking."""
        if self.settings.endpoint:
            return AnonymousCredentials()  # type: ignore[no-untyped-call]
        if self._credentials is None:
            try:
                self._credentials, _ = google.auth.default(scopes=[SCOPE])
            except DefaultCredentialsError:
                self._credentials = _gcloud_credentials()
        return self._credentials

    def check(self) -> None:
        """Say what is missing to ask Google Cloud for anything, before it is asked."""
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
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            key = asyncssh.generate_private_key("ssh-ed25519", comment="podway")
            write_atomically(self.identity_file, key.export_private_key(), mode=0o600)
            write_atomically(public, key.export_public_key())
        return public.read_text().strip()


def _default_project(root: Path) -> str:
    try:
        found = google.auth.default(scopes=[SCOPE])[1]
    except DefaultCredentialsError:
        found = None
    found = found or _gcloud().get("configuration", {}).get("properties", {}).get("core", {}).get("project")
    if not found:
        raise UserError(
            "no Google Cloud project is chosen",
            f"write `project: NAME` into {root / 'gcp.yaml'}, or set PODWAY_GCP_PROJECT",
        )
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
