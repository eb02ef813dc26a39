"""Short ways to read a text in tests, and to look at what a file is refused for."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import settings

from podway.errors import UserError
from podway.task.environment import Overrides
from podway.task.read import read_task_text
from podway.task.task import Accelerator, Task

# The same cases on every run, however busy the machine is; `fuzz` explores.
steady = settings(derandomize=True)

NOWHERE = Path("/nonexistent")


def flags(**given: Any) -> Overrides:
    """Overrides whose local environment is that of nobody."""
    return Overrides(**{"local_env": {"HOME": str(NOWHERE)}, "cwd": str(Path(__file__).parent), **given})


def read(text: str, **given: Any) -> Task:
    return read_task_text(dedent(text), name="f.yaml", overrides=flags(**given))


def refused(text: str | bytes, **given: Any) -> UserError:
    """The error a text is refused with; it must say where, and have a hint."""
    with pytest.raises(UserError) as caught:
        body = dedent(text) if isinstance(text, str) else text
        read_task_text(body, name="f.yaml", overrides=flags(**given))
    assert caught.value.hint
    assert "\n" not in caught.value.what
    return caught.value


def types(task: Task) -> list[str]:
    """The slices of the alternatives."""
    return [one.accelerator.type for one in task.resources if one.accelerator]


def only(task: Task) -> Accelerator:
    """The one slice a task asks for."""
    (one,) = task.resources
    assert one.accelerator is not None
    return one.accelerator
