"""Container images in task files: their names, who pulls them, and the flags that change them.

Both dialects end in `docker:NAME` (`task.CONTAINER`). SkyPilot takes the credentials of a private registry from three variables; they
become the task's `Registry`, and the password a secret, wherever the file or the flags put it.
"""

import re
from collections.abc import Sequence

import msgspec

from podway.task.environment import Overrides
from podway.task.fields import Field, FlagField
from podway.task.task import CONTAINER, Registry, Resources, Task, change_resources, container_image, without_image

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,500}")  # as hosts/agent/container.py takes it
_USERNAME, _PASSWORD, _SERVER = (f"SKYPILOT_DOCKER_{word}" for word in ("USERNAME", "PASSWORD", "SERVER"))


def read_image(field: Field, *, container: bool) -> str:
    """An image as a file names it; `container`: a plain name is a container's."""
    text = field.words()
    name = container_image(text) if text.startswith(CONTAINER) else text if container else None
    if name is not None and not _NAME.fullmatch(name):
        raise field.error(
            f"{field.found} is not the name of an image", "write it as NAME, NAME:TAG or REGISTRY/NAME:TAG"
        )
    return text if name is None else f"{CONTAINER}{name}"


def skypilot_registry(
    root: Field, env: dict[str, str], secrets: dict[str, str], resources: Sequence[Resources]
) -> tuple[Registry | None, tuple[Resources, ...]]:
    """The registry of SkyPilot's three variables, which are taken out of `env`; the resources with its images named in full."""
    given = env | secrets
    if not any(container_image(one.image) for one in resources) or _USERNAME not in given:
        return None, tuple(resources)
    if _PASSWORD not in given:
        raise root.error(f"{_USERNAME} is set, and {_PASSWORD} is not", f"add --secret {_PASSWORD}")
    server = given.get(_SERVER, "").removeprefix("https://").rstrip("/")
    secrets[_PASSWORD] = given[_PASSWORD]
    for name in (_USERNAME, _PASSWORD, _SERVER):
        env.pop(name, None)
    registry = Registry(username=given[_USERNAME], password_secret=_PASSWORD, server=server or None)
    return registry, tuple(_named_in_full(one, server) for one in resources)


def _named_in_full(resources: Resources, server: str) -> Resources:
    name = container_image(resources.image)
    if not name or not server or name.startswith(f"{server}/"):
        return resources
    return msgspec.structs.replace(resources, image=f"{CONTAINER}{server}/{name}")


def with_image_flags(task: Task, overrides: Overrides) -> Task:
    """The task as `--image` and `--ignore-image` change it."""
    if overrides.image is not None:
        image = read_image(FlagField("--image", overrides.image), container=True)
        task = change_resources(task, lambda one: msgspec.structs.replace(one, image=image))
    return without_image(task) if overrides.ignore_image else task
