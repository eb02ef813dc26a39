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
PODWAY_GCP_GRPC) the same calls go to an emulator, with credentials only where GOOGLE_APPLICATION_CREDENTIALS names a file of
them, as `podway sandbox env` does. Otherwise credentials are the application default ones, a service account's file
(GOOGLE_APPLICATION_CREDENTIALS), or whatever `gcloud auth login` left.
"""

import os
import re
from pathlib import Path
from typing import Any

import msgspec

from podway.task.fields import Field, read_mapping

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
    near: str | None = None  # the zone or region that gcloud is set to: of two offers at one price the nearer is taken


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
    root = read_mapping(data, path, KEYS)
    if root is None:
        return Settings()
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
