"""Podway: from a laptop to a TPU pod in one command.

The Python API (docs/python.md): `Client` and `AsyncClient`, the records they take and give, and `UserError`. Each is imported when
it is first used, since the command line must start in milliseconds.
"""

from typing import TYPE_CHECKING

from podway.version import __version__

if TYPE_CHECKING:
    from podway.errors import UserError
    from podway.launch_options import LaunchOptions, LaunchRequest
    from podway.plan.plans import TrainPlan
    from podway.server.api import ClusterView, Frame, JobView, LaunchReply, OfferView, PreviewReply
    from podway.server.async_client import AsyncClient
    from podway.server.client import Client
    from podway.server.planning import RehearsalResult
    from podway.task.read import read_task
    from podway.task.task import Accelerator, Autostop, Placement, Resources, Task

_HOMES = {
    "podway.errors": ("UserError",),
    "podway.launch_options": ("LaunchOptions", "LaunchRequest"),
    "podway.plan.plans": ("TrainPlan",),
    "podway.server.api": ("ClusterView", "Frame", "JobView", "LaunchReply", "OfferView", "PreviewReply"),
    "podway.server.async_client": ("AsyncClient",),
    "podway.server.client": ("Client",),
    "podway.server.planning": ("RehearsalResult",),
    "podway.task.read": ("read_task",),
    "podway.task.task": ("Accelerator", "Autostop", "Placement", "Resources", "Task"),
}
__all__ = [
    "Accelerator",
    "AsyncClient",
    "Autostop",
    "Client",
    "ClusterView",
    "Frame",
    "JobView",
    "LaunchOptions",
    "LaunchReply",
    "LaunchRequest",
    "OfferView",
    "Placement",
    "PreviewReply",
    "RehearsalResult",
    "Resources",
    "Task",
    "TrainPlan",
    "UserError",
    "__version__",
    "read_task",
]


if not TYPE_CHECKING:  # a type checker sees the imports above, and that nothing else is here

    def __getattr__(name: str) -> object:
        for module, names in _HOMES.items():
            if name in names:
                import importlib  # only a program that uses the API needs it

                return getattr(importlib.import_module(module), name)
        raise AttributeError(f"module 'podway' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
