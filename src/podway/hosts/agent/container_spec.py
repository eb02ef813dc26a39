"""What a runner is told of a phase that runs in an image: who enters it, and with what (enter.py)."""

from __future__ import annotations

import os

from . import processes
from .phase import RequestRefused, is_word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .wire import Fields

IN_USE = "containers"  # in the agent's state: a container was, or was about to be, made on this host
# How Docker and podman are found where they are not in the usual place.
VARIABLES = ("DOCKER_HOST", "CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF", "CONTAINERS_REGISTRIES_CONF")


def container_spec(request: Fields, home: str, base: Fields, env: Fields, secrets: Fields) -> Fields:
    """`base` is the host's own environment, of which nothing goes into the container; `env` is what the job gets there."""
    container = request["container"]
    if not isinstance(container, dict) or not is_word(container.get("image")):
        raise RequestRefused("container must name an image")
    password = (container.get("registry") or {}).get("password")
    marks = {name: env[name] for name in (processes.JOB_ID_VARIABLE, processes.HOST_ID_VARIABLE) if name in env}
    cwd = _expanded(request["cwd"], home) if request.get("cwd") else ""
    shell = (request.get("interpreter") or ["bash"])[0]
    return {
        "env": {**base, **{name: os.environ[name] for name in VARIABLES if name in os.environ}, **marks},
        "secrets": {**secrets, "registry": password} if password else secrets,
        "cwd": cwd if cwd.startswith(home + "/") else home,  # made on the host, whose user's it must be
        "enter": {
            "container": {**container, **{key: _mounts(container.get(key), home) for key in ("mounts", "volumes")}},
            "env": env,
            "cwd": cwd,
            "shell": shell,
            "script": request.get("script") or "",
            "home": home,
            "host": os.environ.get(processes.HOST_ID_VARIABLE) or home,
        },
    }


def _mounts(mounts: object, home: str) -> list[list[object]]:
    if not isinstance(mounts, (list, type(None))):
        raise RequestRefused("the mounts of a container must be a list")
    return [
        [_expanded(source, home), _expanded(target, home), bool(read_only)]
        for source, target, read_only in mounts or ()
    ]


def _expanded(path: object, home: str) -> str:
    if not is_word(path):
        raise RequestRefused("a path in a container must be a text without NUL")
    text = str(path)
    text = home + text[1:] if text == "~" or text.startswith("~/") else text
    return os.path.normpath(os.path.join(home, text))
