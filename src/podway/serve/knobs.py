"""The knobs of requests as arrays on their way to the device.

`fill_seats` makes arrays of them; `pack` puts these into one array, since each array is a transfer of its own, and `unpack`
takes them apart again on the device.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

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
        s = _sampling(request)
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


def _sampling(request: Request) -> Sampling:
    owner = request.owner
    found: Sampling = owner if isinstance(owner, Sampling) else getattr(owner, "sampling", Sampling())
    return found


def is_plain(request: Request) -> bool:
    """Whether it wants the most likely token each time, and nothing else."""
    s = _sampling(request)
    knobs = (s.temperature > 0, s.presence, s.frequency, s.repetition != 1, s.logit_bias, s.logprobs)
    return not (any(knobs) or request.min_tokens)


def pack(seats: Seats) -> npt.NDArray[np.int32]:
    """All of it in one array, a row for each seat."""
    count = len(seats.slot)
    leaves = [leaf.astype(np.int32) if leaf.dtype.itemsize == 1 else leaf for leaf in jax.tree.leaves(seats)]
    return np.concatenate([leaf.reshape(count, -1).view(np.int32) for leaf in leaves], axis=1)


def unpack(packed: jax.Array, like: Seats) -> Seats:
    """The reverse, on the device; `like` has the shapes and dtypes."""
    leaves, form = jax.tree.flatten(like)
    found, begin = [], 0
    for leaf in leaves:
        width = leaf.size // leaf.shape[0]
        part = packed[:, begin : begin + width].reshape(leaf.shape)
        exact = leaf.dtype.itemsize == 1
        found.append(part.astype(leaf.dtype) if exact else jax.lax.bitcast_convert_type(part, jnp.dtype(leaf.dtype)))
        begin += width
    return jax.tree.unflatten(form, found)  # type: ignore[no-any-return]
