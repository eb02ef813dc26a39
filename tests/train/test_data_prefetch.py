"""The thread that makes batches ahead: in order, bounded, honest about failures, and gone when it should be."""

import gc
import threading

import pytest

from podway.train.prefetch import Prefetch
from tests.conftest import wait_until


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "podway-prefetch"]


def test_in_order_from_a_step() -> None:
    with Prefetch(lambda step: step * step, 3) as ahead:
        assert [next(ahead) for _ in range(4)] == [9, 16, 25, 36]
    assert not running()


def test_no_further_ahead_than_asked() -> None:
    made: list[int] = []
    with Prefetch(lambda step: made.append(step) or step, 0, depth=2) as ahead:
        wait_until(lambda: len(made) >= 3, what="two batches in the queue and one in hand")
        assert not wait_more(made, 3)
        next(ahead)
        wait_until(lambda: len(made) == 4, what="one more")


def wait_more(made: list[int], than: int) -> bool:
    try:
        wait_until(lambda: len(made) > than, 0.3)
    except AssertionError:
        return False
    return True


def test_a_failure_is_raised_where_the_batch_is_asked_for() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise ValueError("shard 7")
        return step

    with Prefetch(make, 0) as ahead:
        assert [next(ahead), next(ahead)] == [0, 1]
        for _ in range(2):
            with pytest.raises(ValueError, match="shard 7"):
                next(ahead)


def test_a_forgotten_one_ends() -> None:
    ahead = Prefetch(lambda step: step, 0)
    next(ahead)
    del ahead
    gc.collect()
    wait_until(lambda: not running(), what="the end of the thread")


def test_after_close_there_is_nothing() -> None:
    ahead = Prefetch(lambda step: step, 0)
    ahead.close()
    ahead.close()
    assert list(ahead) == []
