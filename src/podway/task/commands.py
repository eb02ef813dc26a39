"""dstack's list of commands, as one script for one shell.

dstack joins commands with `&&`, so that a failing one stops the rest, and all run in the same shell. Joining the *text*
with `&&` goes wrong with comments, here-documents and `a || b`, and `set -e` inside a block loses its effect; a check after
each command does not.
"""

import re
import shlex

# One plain command on one line, to which `|| exit` can be added and still be read.
_PLAIN = re.compile(r"(?:\$\{\w+\}|[^\n#&|;<(){}`\\])*")


def join_commands(commands: list[str]) -> str:
    """A script that stops at the first command that fails, with its exit code."""
    steps = [command.strip() for command in commands if command.strip()]
    lines = []
    for step in steps[:-1]:
        lines += [f"{step} || exit"] if _PLAIN.fullmatch(step) else [step, "(exit $?) || exit"]
    return "\n".join([*lines, *steps[-1:]]) + ("\n" if steps else "")


def join_words(entrypoint: str, arguments: list[str]) -> str:
    """A docker-like entrypoint and its arguments as one command line; raises ValueError for an open quote."""
    return shlex.join([*shlex.split(entrypoint), *arguments]) + "\n"
