"""Whether Google Cloud is set up on this machine, told from files and the environment in milliseconds.

Nothing of Google's is imported, no program is run and nobody is asked over the network: a launch that names no provider needs the answer,
and so does a person whose configuration is missing. What gcloud keeps in its own folder is read as it lies there.
"""

import configparser
import json
import os
from collections.abc import Iterator
from pathlib import Path

from podway.errors import UserError
from podway.extras import require
from podway.providers.gcp.settings import LOG_IN, Settings, read_settings

_DMI = Path(
    "/sys/class/dmi/id/product_name"
)  # "Google Compute Engine" on its machines (Google, "Detect if a VM is running in…")

_FILE = "gcp.yaml"  # below PODWAY_HOME
_GCLOUD = "gcloud: gcloud config set project NAME"


def is_configured(root: Path) -> bool:
    """Whether somebody meant to use Google Cloud from here: settings of Podway, or a project with credentials."""
    if (root / _FILE).exists() or os.environ.get("PODWAY_GCP_PROJECT") or os.environ.get("PODWAY_GCP_ENDPOINT"):
        return True
    return _has_login() and find_project(Settings()) is not None


def check_configured(root: Path) -> None:
    """A UserError that says what is missing, or what is wrong with the settings."""
    require("gcp", "provider gcp")
    settings = read_settings(root)
    if not settings.endpoint:
        file = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        if file and not Path(file).is_file():
            raise UserError(
                f"GOOGLE_APPLICATION_CREDENTIALS: {file}: no such file", "correct the variable, or unset it"
            )
    if not find_project(settings) and not (_on_google() and not settings.endpoint):
        raise no_project(root)
    if not settings.endpoint and not may_have_credentials():
        raise UserError("no Google Cloud credentials are found on this machine", LOG_IN)


def no_project(root: Path) -> UserError:
    """That no project is named anywhere, and where to name one."""
    hint = f"write `project: NAME` into {root / _FILE}, or set PODWAY_GCP_PROJECT"
    return UserError("no Google Cloud project is chosen", hint)


def find_project(settings: Settings) -> str | None:
    """The project that the settings, the environment, the credentials' file or gcloud's configuration name."""
    return next((name for _, name in _named_projects(settings) if name), None)


def project_source(root: Path) -> str:
    """Where the project's name comes from, for those who have to correct it."""
    found = next((source for source, name in _named_projects(read_settings(root)) if name), _GCLOUD)
    return str(root / found) if found == _FILE else found


def _named_projects(settings: Settings) -> Iterator[tuple[str, str | None]]:
    """What may name the project, and what it names; the first that does counts."""
    yield ("PODWAY_GCP_PROJECT" if os.environ.get("PODWAY_GCP_PROJECT") else _FILE), settings.project
    for variable in ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"):
        yield variable, os.environ.get(variable)
    if not settings.endpoint:
        yield "the credentials", _project_of_credentials()
        yield _GCLOUD, gcloud_property("core", "project")


def may_have_credentials() -> bool:
    """Whether looking for credentials can find any."""
    return _has_login() or _on_google()


def preferred_place() -> str | None:
    """The zone or region that gcloud is set to."""
    zone = os.environ.get("CLOUDSDK_COMPUTE_ZONE") or gcloud_property("compute", "zone")
    return zone or os.environ.get("CLOUDSDK_COMPUTE_REGION") or gcloud_property("compute", "region")


def gcloud_property(section: str, name: str) -> str | None:
    """A property of gcloud's active configuration."""
    folder = _gcloud_folder()
    try:
        active = os.environ.get("CLOUDSDK_ACTIVE_CONFIG_NAME") or (folder / "active_config").read_text().strip()
    except (OSError, UnicodeDecodeError):
        active = "default"
    found = configparser.ConfigParser(interpolation=None)
    try:
        found.read(folder / "configurations" / f"config_{active}")
    except (configparser.Error, OSError, UnicodeDecodeError):
        return None
    return found.get(section, name, fallback=None) or None


def _has_login() -> bool:
    folder = _gcloud_folder()
    named = (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE",
        "CLOUDSDK_AUTH_CREDENTIAL_FILE_OVERRIDE",
    )
    if any(os.environ.get(name) for name in named):
        return True
    return (folder / "application_default_credentials.json").exists() or (folder / "credentials.db").exists()


def _project_of_credentials() -> str | None:
    path = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or _gcloud_folder() / "application_default_credentials.json"
    try:
        found = json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        return None
    named = (found.get("project_id") or found.get("quota_project_id")) if isinstance(found, dict) else None
    return named if isinstance(named, str) else None


def _gcloud_folder() -> Path:
    return Path(os.environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud")


def _on_google() -> bool:
    """Whether a metadata server may be there to ask."""
    if os.environ.get("GCE_METADATA_HOST") or os.environ.get("K_SERVICE"):
        return True
    try:
        return _DMI.read_text().startswith("Google")
    except OSError:
        return False
