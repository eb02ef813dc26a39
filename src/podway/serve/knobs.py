"""The knobs of requests as arrays on their way to the device."""

from typing import Any, NamedTuple

import numpy as np

from podway.serve.asked import BIASES, STOP_IDS, Sampling
from podway.serve.batcher import Limits, Request
from podway.serve.sampling import Knobs


class Seats(NamedTuple):
    """Requests on their way into slots."""

    slot: Any
    tokens: Any
    length: Any
    knobs: Knobs


def empty_seats(count: int, limits: Limits) -> Seats:
    """As many seats, all for the dummy slot."""
    f, i = np.float32, np.int32
    knobs: dict[str, Any] = {
        "temperature": np.zeros(count, f), "top_k": np.zeros(count, i), "top_p": np.ones(count, f), "min_p": np.zeros(count, f),
        "presence": np.zeros(count, f), "frequency": np.zeros(count, f), "repetition": np.ones(count, f),
        "seed": np.zeros(count, np.uint32), "prompt_len": np.zeros(count, i), "limit": np.zeros(count, i),
        "min_tokens": np.zeros(count, i), "reports": np.zeros(count, np.bool_), "stop_ids_ZA": np.full((count, STOP_IDS), -1, i),
        "bias_ids_ZC": np.full((count, BIASES), -1, i), "bias_ZC": np.zeros((count, BIASES), f),
    }  # fmt: skip
    return Seats(
        np.full(count, limits.slots, i), np.zeros((count, limits.max_len + 1), i), np.ones(count, i), Knobs(**knobs)
    )


def fill_seats(requests: list[Request], count: int, limits: Limits) -> Seats:
    """Arrays for these requests; `request.owner` is their `Sampling` or has it as `sampling`."""
    seats = empty_seats(count, limits)
    knobs: Any = seats.knobs
    for at, request in enumerate(requests):
        owner = request.owner
        s: Sampling = owner if isinstance(owner, Sampling) else getattr(owner, "sampling", Sampling())
        seats.slot[at] = request.slot
        seats.tokens[at, : len(request.tokens)] = request.tokens
        seats.length[at] = len(request.tokens)
        for name in ("temperature", "top_k", "top_p", "min_p", "presence", "frequency", "repetition"):
            getattr(knobs, name)[at] = getattr(s, name)
        knobs.seed[at] = s.seed & 0xFFFFFFFF
        knobs.prompt_len[at], knobs.limit[at] = request.prompt_len, request.limit
        knobs.min_tokens[at], knobs.reports[at] = request.min_tokens, s.logprobs
        stops = sorted(request.stop_ids)[:STOP_IDS]
        knobs.stop_ids_ZA[at, : len(stops)] = stops
        for place, (token, value) in enumerate(s.logit_bias[:BIASES]):
            knobs.bias_ids_ZC[at, place], knobs.bias_ZC[at, place] = token, value
    return seats
