"""The table of providers: one light row each, which says what a provider is called and needs without importing it.

Task files, hints and views read rows; `podway.providers.open_provider` opens what a row names. A package of somebody else adds a row
by an entry point of the group `podway.providers`, whose value is a `ProviderRow`:

    [project.entry-points."podway.providers"]
    lab = "podway_lab:ROW"

Such packages are looked for when a name is not one of Podway's own, or when all providers are asked. One that cannot be loaded breaks
nothing: its name is an error of one line (`broken_rows`), and everything else goes on.
"""

import os
from functools import cache
from importlib import import_module
from typing import Any, Literal

import msgspec

from podway.errors import UserError

GROUP = "podway.providers"


class ProviderRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a provider before it is opened."""

    name: str
    opens: (
        str  # "package.module:function", called with the Podway home; '' where this version reads the name and no more
    )
    aliases: tuple[str, ...] = ()  # what task files and --infra may call it as well
    simulated: bool = False  # its slices are not real: never taken without a word, and they cost nothing
    on_server: bool = False  # its hosts are processes of the machine that the server runs on
    extra: str = ""  # what it needs is installed with podway[EXTRA]
    # What follows the name in `--infra NAME/…`: a Google Cloud region and zone, a region and zone, or one word of its own
    # (the pool, the context).
    place: Literal["google-zone", "zone", "word"] = "zone"
    # Which of image, python, disk, ports, instance-paths, volumes, buckets, replicas, dev, forwarding and priority-classes it does for
    # real; own-identity: its hosts reach buckets as themselves; hosts-of-image: its hosts are containers of the image already;
    # attached-volumes: a volume is a disk that hosts have from their creation on; attached-buckets: the same of mounts of buckets.
    capabilities: frozenset[str] = frozenset()
    variables: tuple[
        str, ...
    ] = ()  # the environment variables it reads; a server started without them is not the same server
    configured: str = (
        ""  # "package.module:function" (home -> bool): whether it is set up; '' where it is taken by name only
    )
    # "package.module:function" (-> str): why images cannot be used there now, or ''; '' where only a host can tell.
    image_check: str = ""
    # "package.module:function" (home, Placement -> a remark, or ''): a place that it does not have is a UserError.
    check_place: str = ""
    diagnose: str = ""  # "package.module:function" (home -> findings): what `podway doctor` checks
    no_stop: str = "its hosts cannot be stopped"  # why, for a provider that does not implement SupportsStop


_ROWS = (
    ProviderRow(
        name="gcp",
        opens="podway.providers.gcp.opening:open_provider",
        configured="podway.providers.gcp.configured:is_configured",
        diagnose="podway.providers.gcp.diagnose:diagnose",
        check_place="podway.providers.gcp.places:remark_on_place",
        extra="gcp",
        place="google-zone",
        capabilities=frozenset(
            {
                "disk",
                "ports",
                "buckets",
                "instance-paths",
                "volumes",
                "attached-volumes",
                "own-identity",
                "dev",
                "forwarding",
                "image",
                "python",
            }
        ),
        variables=(
            "PODWAY_GCP_PROJECT",
            "PODWAY_GCP_ZONES",
            "PODWAY_GCP_SSH_USER",
            "PODWAY_GCP_ENDPOINT",
            "PODWAY_GCP_GRPC",
            "GOOGLE_CLOUD_PROJECT",
            "GOOGLE_APPLICATION_CREDENTIALS",
            "CLOUDSDK_CONFIG",
            "CLOUDSDK_ACTIVE_CONFIG_NAME",
            "CLOUDSDK_CORE_PROJECT",
            "CLOUDSDK_COMPUTE_ZONE",
            "CLOUDSDK_COMPUTE_REGION",
            "STORAGE_EMULATOR_HOST",
        ),
    ),
    ProviderRow(
        name="gke",
        opens="podway.providers.gke.provider:open_provider",
        configured="podway.providers.gke.settings:is_configured",
        diagnose="podway.providers.gke.diagnose:diagnose",
        aliases=("kubernetes", "k8s"),
        place="word",
        capabilities=frozenset(
            {
                "image",
                "hosts-of-image",
                "python",
                "disk",
                "volumes",
                "attached-volumes",
                "buckets",
                "attached-buckets",
                "dev",
                "forwarding",
                "priority-classes",
            }
        ),
        variables=("KUBECONFIG",),
    ),
    ProviderRow(
        name="local",
        opens="podway.providers.local.provider:open_provider",
        simulated=True,
        on_server=True,
        capabilities=frozenset({"instance-paths", "volumes", "dev", "forwarding", "image", "python"}),
        image_check="podway.providers.local.images:why_no_images",
    ),
    ProviderRow(
        name="ssh",
        opens="podway.providers.ssh.provider:open_provider",
        diagnose="podway.providers.ssh.diagnose:diagnose",
        extra="ssh",
        place="word",
        capabilities=frozenset({"buckets", "instance-paths", "volumes", "dev", "forwarding", "image", "python"}),
        variables=("SSH_AUTH_SOCK",),
        no_stop="its hosts are machines of your own, which Podway does not switch off",
    ),
)
_OWN = {row.name: row for row in _ROWS}


class _ThirdParty(msgspec.Struct, frozen=True, kw_only=True):
    rows: dict[str, ProviderRow]
    broken: dict[str, str]


def provider_rows() -> dict[str, ProviderRow]:
    """Every provider that can be opened, Podway's own first."""
    return {name: row for name, row in (_OWN | _third_party().rows).items() if row.opens}


def find_row(word: str) -> ProviderRow | None:
    """The row of a provider's name or alias."""
    return _in(_OWN, word) or _in(_third_party().rows, word)


def _in(rows: dict[str, ProviderRow], word: str) -> ProviderRow | None:
    return next((row for row in rows.values() if word == row.name or word in row.aliases), None)


def row_of(name: str) -> ProviderRow:
    """The row of a provider that a cluster was made with; an empty one where its package is no longer installed."""
    return find_row(name) or ProviderRow(name=name, opens="")


def register(row: ProviderRow) -> None:
    """Add a provider for the life of this process, as an entry point does for every process."""
    _OWN[row.name] = row


def provider_words() -> list[str]:
    """Every name and alias there is, for suggestions."""
    rows = (_OWN | _third_party().rows).values()
    return sorted(word for row in rows for word in (row.name, *row.aliases))


def simulated_names() -> list[str]:
    """Podway's own simulated providers: what a task is given that names none, where no real one is set up."""
    return [row.name for row in _OWN.values() if row.simulated]


def provider_environment() -> dict[str, dict[str, str | None]]:
    """By provider, the variables it reads and what this process has for them."""
    rows = provider_rows().values()
    return {row.name: {name: os.environ.get(name) for name in row.variables} for row in rows if row.variables}


def broken_rows() -> dict[str, str]:
    """Providers of other packages that cannot be loaded: by name, one line that says which package and why."""
    return _third_party().broken


def load(name: str) -> Any:
    """The object `package.module:attribute`."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


@cache
def _third_party() -> _ThirdParty:
    from importlib.metadata import entry_points  # here: it takes longer to import than most commands take to run

    rows: dict[str, ProviderRow] = {}
    broken: dict[str, str] = {}
    for point in entry_points(group=GROUP):
        package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value
        try:
            row = point.load()
            problem = _problem(point.name, row, rows)
        except (Exception, SystemExit) as error:  # whatever somebody else's package does while it is imported
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if problem:
            broken[point.name] = f"provider {point.name} of the package {package} cannot be loaded: {problem}"
        else:
            rows[point.name] = row
    return _ThirdParty(rows=rows, broken=broken)


def _problem(name: str, row: object, others: dict[str, ProviderRow]) -> str:
    if not isinstance(row, ProviderRow):
        return f"its entry point is a {type(row).__name__}, not a podway.provider_table.ProviderRow"
    if row.name != name:
        return f"its row is named {row.name!r}"
    if name in _OWN or name in others or any(name in own.aliases for own in _ROWS):
        return f"there is a provider {name!r} already"
    return "" if ":" in row.opens else f"its row opens {row.opens!r}, which is not package.module:function"


def why_no_image(row: ProviderRow) -> str:
    """Why a container image cannot be used on this provider's hosts, as far as that is known before they are there; or ''."""
    if "image" not in row.capabilities:
        return f"{row.name} runs no containers"
    return str(load(row.image_check)()) if row.image_check else ""


def unknown_provider(word: str) -> UserError:
    """What is wrong with a name that opens nothing: broken, not in this version, or not known."""
    if word in broken_rows():
        return UserError(broken_rows()[word], "repair or uninstall that package")
    row = find_row(word)
    known = ", ".join(sorted(provider_rows()))
    what = f"there is no provider {word!r}" if row is None else f"provider {row.name!r} is not in this version"
    return UserError(what, f"use one of: {known}")
