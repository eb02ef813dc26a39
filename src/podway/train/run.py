"""The parts of a run that is ready for its first step: what the loop drives and hooks look at."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

from podway.train.data import Data
from podway.train.feed import Feed
from podway.train.metrics import Meter, ProgressBar
from podway.train.output import Output
from podway.train.step import Program, State


@dataclass
class Run:
    """A run that is ready for its first step."""

    program: Program
    feed: Feed
    data: Data
    state: State
    meter: Meter
    screen: ProgressBar
    output: Output
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def folder(self) -> Path:
        return self.program.config.folder

    @property
    def steps(self) -> int:
        return self.program.config.schedule.steps
