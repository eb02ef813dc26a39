"""`python -m podway.train`, with a pause after each step that is told: a run that a test can meet in its middle."""

import os
import sys
import time

from podway.train.__main__ import main
from podway.train.metrics import Journal, StepReport

told = Journal.step


def slowly(journal: Journal, report: StepReport) -> None:
    told(journal, report)
    time.sleep(float(os.environ["PODWAY_TEST_PAUSE"]))


if __name__ == "__main__":
    Journal.step = slowly  # type: ignore[method-assign, assignment]
    sys.exit(main(sys.argv[1:]))
