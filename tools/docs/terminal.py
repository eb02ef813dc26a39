"""A real terminal (tmux) to type into, and what is on its screen: for the newcomer's test and for pictures.

The shell appends its exit code to a file each time it is about to show its prompt, so a command's end is known and not guessed.
Questions that a person would answer with Enter are answered with Enter.
"""

import contextlib
import os
import re
import secrets
import subprocess
import time
from pathlib import Path

PROMPT = "$"
QUESTION = re.compile(r"\[[Yy]/[Nn]\]:?$")
RC = 'PS1="$ "\nunset HISTFILE\nPROMPT_COMMAND=\'echo $? >> "$CODES"\'\nbind "set enable-bracketed-paste off" 2>/dev/null\n'


class Terminal:
    """One window of tmux, on a server of its own."""

    def __init__(self, place: Path, directory: Path, environment: dict[str, str], columns: int, rows: int = 48) -> None:
        self.socket = f"podway-{secrets.token_hex(4)}"
        self.codes = place / "codes"
        (place / "shellrc").write_text(RC)
        # As wide as asked for, and a screen of history beyond it.
        env = {**environment, "CODES": str(self.codes), "TERM": "screen-256color", "SHELL": "/bin/bash"}
        command = f"exec bash --noprofile --rcfile {place / 'shellrc'} -i"
        words = ["new-session", "-d", "-x", str(columns), "-y", str(rows), "-c", str(directory), command]
        self._tmux(*words, env=env)
        self._tmux("set-option", "-g", "history-limit", "5000")
        self._wait(1, 60)

    def type(self, command: str, seconds: float) -> int:
        """Clear the screen, run one command to its end, and give its exit code."""
        self._run("clear", 30)
        self._tmux("clear-history")
        return self._run(command, seconds)

    def _run(self, command: str, seconds: float) -> int:
        before = len(self._codes())
        self._tmux("send-keys", "-l", command)
        self._tmux("send-keys", "Enter")
        self._wait(before + 1, seconds)
        return self._codes()[-1]

    def screen(self, *, joined: bool = False, colours: bool = False) -> str:
        """What stands there from the first line on, without the prompt that waits; `joined`: wrapped lines as one."""
        options = [*(["-J"] if joined else []), *(["-e"] if colours else [])]
        text = self._tmux("capture-pane", "-p", "-S", "-", *options)
        lines = [line.rstrip() for line in text.rstrip().splitlines()]
        return "\n".join(lines[:-1] if lines and lines[-1] == PROMPT else lines)

    def close(self) -> None:
        """End the window and what runs in it."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self._tmux("kill-server")

    def _wait(self, codes: int, seconds: float) -> None:
        deadline, answered = time.monotonic() + seconds, [""]
        while time.monotonic() < deadline:
            lines = self._tmux("capture-pane", "-p").rstrip().splitlines()
            last = lines[-1].rstrip() if lines else ""
            if len(self._codes()) >= codes and last == PROMPT:
                return
            if QUESTION.search(last) and lines != answered:
                self._tmux("send-keys", "Enter")
                answered = lines  # as long as nothing else stands there, the answer is on its way
            time.sleep(0.1)
        raise TimeoutError(f"no prompt within {seconds:.0f} s:\n{self.screen()}")

    def _codes(self) -> list[int]:
        return [int(line) for line in self.codes.read_text().split()] if self.codes.exists() else []

    def _tmux(self, *words: str, env: dict[str, str] | None = None) -> str:
        command = ["tmux", "-L", self.socket, "-f", os.devnull, *words]
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60).stdout
