"""Following a job: its progress before the log, the log, and its end with an exit code for scripts.

Ctrl-C stops watching, never the job, and says how to follow it again and how to cancel it.
"""

from typing import Unpack

from podway.cli.screen import LAST, MORE, Screen
from podway.errors import UserError
from podway.server.api import Frame
from podway.server.client import Client, LogKeywords

# As SkyPilot's `logs --status` has them.
SUCCEEDED, FAILED, NOT_FINISHED, NOT_FOUND, CANCELLED = 0, 100, 101, 102, 103


def exit_code(state: str) -> int:
    """What a command about one job exits with."""
    if state.startswith("FAILED"):
        return FAILED
    return {"SUCCEEDED": SUCCEEDED, "CANCELLED": CANCELLED}.get(state, NOT_FINISHED)


class ProgressPrinter:
    """What happens to a job before and around its log, a line for each step. `waiting_for_cluster`: it is new. `follows`: another
    job, with which what happened to the cluster until now was shown.
    """

    def __init__(
        self, screen: Screen, cluster: str, job: int, *, waiting_for_cluster: bool, follows: bool = False
    ) -> None:
        self.screen = screen
        self.cluster = cluster
        self.job = job
        self.streaming = False
        self.submitted = False
        self.shown_before = follows
        if waiting_for_cluster:
            screen.wait(f"Launching cluster {cluster}")
        else:
            self._submitted()

    def show(self, frame: Frame) -> None:
        """One event."""
        text, state = frame.text, frame.state
        self.shown_before = self.shown_before and state not in ("SETTING_UP", "RUNNING", "CANCELLING")
        if self.shown_before:
            return
        if state == "UP":
            self.screen.done(f"Cluster up: {self.cluster}.")
            if not self.submitted:
                self._submitted()
        elif state == "RUNNING":
            self.start()
        elif state == "CANCELLING":
            self.screen.step(f"Cancelling job {self.job}: {text}")
        elif state == "RECOVERING":
            self.screen.step(f"Job {self.job} {text}")
        elif state == "SETTING_UP":
            self.screen.wait("" if self.streaming else f"Job {self.job} {text}")
        elif not state or state in ("INIT", "STOPPING", "TERMINATING"):
            text = f"Cluster {self.cluster} {text}" if text[:1].islower() else text
            self.screen.line(text if self.streaming else f"{MORE} {text}")

    def start(self) -> None:
        """The log begins, or the job does, whichever is seen first."""
        if not self.streaming:
            self.streaming = True
            self.screen.wait("")
            self.screen.line(
                f"{LAST} Job started. Streaming logs... (Ctrl-C to exit log streaming; job will not be killed)"
            )

    def _submitted(self) -> None:
        self.submitted = True
        self.screen.step(f"Job submitted, ID: {self.job}")
        self.screen.wait(f"Waiting for job {self.job} to start")


def follow(
    client: Client,
    screen: Screen,
    cluster: str,
    job: int,
    printer: ProgressPrinter | None = None,
    **keywords: Unpack[LogKeywords],
) -> Frame:
    """Show a job until it ends (or, with follow=False, until what is there is shown); the end."""
    try:
        for frame in client.watch(cluster, job, colour=screen.colour, **keywords):
            if frame.kind == "log":
                if printer:
                    printer.start()
                screen.wait("")
                screen.line(frame.text.removesuffix("\n"))
            elif frame.kind == "event" and printer:
                printer.show(frame)
            elif frame.kind == "end":
                screen.wait("")
                return frame
    except KeyboardInterrupt:
        screen.wait("")
        raise KeyboardInterrupt(going_on(cluster, job)) from None
    raise UserError("the server closed the log stream early", f"follow it again: podway logs {cluster} {job}")


def going_on(cluster: str, job: int) -> str:
    """The message after Ctrl-C."""
    return f"Job {job} keeps running. Follow it: podway logs {cluster} {job}   Cancel it: podway cancel {cluster} {job}"


def show_end(screen: Screen, job: int, end: Frame) -> int:
    """Show how a job ended; its exit code."""
    if not end.state:
        raise UserError(end.reason or "the outcome of the job is not known", "see: podway queue")
    if end.state == "SUCCEEDED":
        screen.done(f"Job finished (status: {end.state}).")
    elif end.state == "CANCELLED":
        screen.line(f"{screen.paint('Job', 'yellow')} {job} was cancelled" + (f": {end.reason}" if end.reason else "."))
    else:
        label = screen.paint("ERROR:", "red", bold=True)
        screen.line(f"{label} Job {job} failed: {end.reason or end.state} (status: {end.state})")
        if end.tail:
            screen.line("Last lines of output:")
            screen.line("\n".join(f"  {line}" for line in end.tail.splitlines()))
    return exit_code(end.state)
