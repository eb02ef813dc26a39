"""ENTRYPOINT, as launch and exec take it: a task file, a bash command, or nothing at all."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from podway.cli.quoting import command_text
from podway.task.environment import Overrides
from podway.task.job_groups import GroupSpec
from podway.task.read import read_group_file, read_task, read_task_text, read_tasks, task_from_command
from podway.task.task import Task


def read_entrypoint(words: Sequence[str], overrides: Overrides) -> Task:
    """The task that the words describe. Words after a file are arguments for its `${{ run.args }}`."""
    if not words:
        return read_task_text("{}", name="<command line>", overrides=overrides)
    if is_task_file(words[0]):
        return read_task(words[0], overrides=msgspec.structs.replace(overrides, run_args=tuple(words[1:])))
    return task_from_command(command_text(words), overrides)


def read_entrypoints(words: Sequence[str], overrides: Overrides) -> tuple[Task, ...]:
    """As `read_entrypoint`, where a file may be a pipeline of several tasks."""
    if words and is_task_file(words[0]):
        return read_tasks(words[0], overrides=msgspec.structs.replace(overrides, run_args=tuple(words[1:])))
    return (read_entrypoint(words, overrides),)


def read_group(words: Sequence[str], overrides: Overrides) -> GroupSpec | None:
    """The job group of a file; None for anything else."""
    if not words or not is_task_file(words[0]):
        return None
    return read_group_file(words[0], overrides)


def is_task_file(word: str) -> bool:
    """By its name: a missing file is an error to report, not a command to run."""
    if not word.lower().endswith((".yaml", ".yml")):
        return False
    return not any(char.isspace() for char in word) or Path(word).is_file()
