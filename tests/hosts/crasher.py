"""A process that applies files and is gone at its n-th step. It is a program of its own, without threads: a test's process may have
many (jax starts them), and what is forked from it may wait for ever for a lock that one of them held."""

import io
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from podway.hosts.agent import apply, files, packs, place, records

STEPS = ("rename", "unlink", "mkdir", "rmdir", "symlink", "link", "chmod", "fchmod", "utime", "fdopen")
MODULES = (apply, place, records, packs)
GONE = 9


class Faulty:
    """`os`, in which the n-th change of the disk is where something happens."""

    def __init__(self, at: int, happen: Callable[[], None]) -> None:
        self.left = at
        self._happen = happen

    def __getattr__(self, name: str) -> Any:
        true = getattr(os, name)
        if name not in STEPS:
            return true

        def step(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                self._happen()
            return true(*args, **kwargs)

        return step


def main() -> None:
    """For each line of standard input, [step, state folder, fields]: apply in a child, print its exit code."""
    for line in sys.stdin:
        at, state, fields = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                faulty = Faulty(at, lambda: os._exit(GONE))
                for module in MODULES:
                    module.os = faulty  # type: ignore[attr-defined]
                files.OPS["files.apply"](state, fields, io.BytesIO())
                os._exit(0)
            finally:
                os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
