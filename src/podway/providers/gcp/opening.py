"""Opens the provider: what is missing is told before Google's clients, which take a second, are imported."""

from pathlib import Path

from podway.providers import Provider
from podway.providers.gcp.configured import check_configured


def open_provider(root: Path) -> Provider:
    """The provider with its settings, keys and records under `root`."""
    check_configured(root)
    # Here, not above: a person whose configuration is wrong need not wait for it.
    from podway.providers.gcp.provider import GcpProvider

    return GcpProvider(root)
