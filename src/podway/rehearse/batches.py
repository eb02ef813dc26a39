"""The largest batch that fits, found by asking the compiler as rarely as possible (pure)."""

from collections.abc import Callable


def largest(fits: Callable[[int], bool], guess: int, most: int = 1 << 20) -> int:
    """The largest n in 1..most with `fits(n)`, 0 if there is none; `fits` must not come true again once it is false.

    It starts at `guess`, doubles or halves until the answer lies between two numbers, and cuts that interval in half.
    """
    low, high = 0, most + 1  # fits(low) holds, fits(high) does not
    step = min(max(1, guess), most)
    while high - low > 1 and low < step < high:
        if fits(step):
            low, step = step, step * 2
        else:
            high, step = step, step // 2
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
