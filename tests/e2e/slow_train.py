"""`python -m podway.train`, with a pause after each step that is logged: a run that a test can meet in its middle."""

import os
import sys
import time

from podway.train.__main__ import main
from podway.train.metrics import MetricsWriter, StepReport

write_step = MetricsWriter.step


def slowly(writer: MetricsWriter, report: StepReport) -> None:
    write_step(writer, report)
    time.sleep(float(os.environ["PODWAY_TEST_PAUSE"]))


if __name__ == "__main__":
    MetricsWriter.step = slowly  # type: ignore[method-assign, assignment]
    sys.exit(main(sys.argv[1:]))
