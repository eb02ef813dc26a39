"""Podway: from a laptop to a TPU pod in one command."""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`podway.Client`, loaded when it is first asked for: the CLI must start in milliseconds."""
    if name == "Client":
        from podway.server.client import Client

        return Client
    raise AttributeError(f"module 'podway' has no attribute {name!r}")
