"""Requests as arrays on their way into slots of the device: their tokens and sampling parameters.

`slot_inputs` makes the arrays; `pack` puts these into one array, since each array is a transfer of its own, and `unpack`
takes them apart again on the device.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from podway.serve.batcher import Limits, Request
from podway.serve.sampling import SamplingState
from podway.serve.sampling_params import BIASES, STOP_IDS, SamplingParams


class SlotInputs(NamedTuple):
    """Requests on their way into slots."""

    slot: Any
    tokens: Any
    length: Any
    sampling: SamplingState


def empty_slot_inputs(count: int, limits: Limits) -> SlotInputs:
    """Arrays for so many requests, all for the dummy slot."""
    f, i = np.float32, np.int32
    sampling: dict[str, Any] = {
        "temperature": np.zeros(count, f), "top_k": np.zeros(count, i), "top_p": np.ones(count, f), "min_p": np.zeros(count, f),
        "presence": np.zeros(count, f), "frequency": np.zeros(count, f), "repetition": np.ones(count, f),
        "seed": np.zeros(count, np.uint32), "prompt_len": np.zeros(count, i), "limit": np.zeros(count, i),
        "min_tokens": np.zeros(count, i), "reports": np.zeros(count, np.bool_), "adapter": np.zeros(count, i),
        "stop_ids_ZA": np.full((count, STOP_IDS), -1, i),
        "bias_ids_ZC": np.full((count, BIASES), -1, i), "bias_ZC": np.zeros((count, BIASES), f),
    }  # fmt: skip
    return SlotInputs(
        np.full(count, limits.slots, i),
        np.zeros((count, limits.max_len + 1), i),
        np.ones(count, i),
        SamplingState(**sampling),
    )


def slot_inputs(requests: list[Request], count: int, limits: Limits) -> SlotInputs:
    """Arrays for these requests; `request.owner` is their `SamplingParams` or has it as `sampling`."""
    inputs = empty_slot_inputs(count, limits)
    sampling: Any = inputs.sampling
    for at, request in enumerate(requests):
        s = _sampling(request)
        inputs.slot[at] = request.slot
        inputs.tokens[at, : len(request.tokens)] = request.tokens
        inputs.length[at] = len(request.tokens)
        for name in ("temperature", "top_k", "top_p", "min_p", "presence", "frequency", "repetition"):
            getattr(sampling, name)[at] = getattr(s, name)
        sampling.seed[at] = s.seed & 0xFFFFFFFF
        sampling.prompt_len[at], sampling.limit[at] = request.prompt_len, request.limit
        sampling.min_tokens[at], sampling.reports[at] = request.min_tokens, s.logprobs
        sampling.adapter[at] = request.adapter
        stops = sorted(request.stop_ids)[:STOP_IDS]
        sampling.stop_ids_ZA[at, : len(stops)] = stops
        for place, (token, value) in enumerate(s.logit_bias[:BIASES]):
            sampling.bias_ids_ZC[at, place], sampling.bias_ZC[at, place] = token, value
    return inputs


def _sampling(request: Request) -> SamplingParams:
    owner = request.owner
    found: SamplingParams = owner if isinstance(owner, SamplingParams) else getattr(owner, "sampling", SamplingParams())
    return found


def is_plain(request: Request) -> bool:
    """Whether it wants the most likely token each time, and nothing else."""
    s = _sampling(request)
    changes = (s.temperature > 0, s.presence, s.frequency, s.repetition != 1, s.logit_bias, s.logprobs)
    return not (any(changes) or request.min_tokens)


def pack(inputs: SlotInputs) -> npt.NDArray[np.int32]:
    """All of it in one array, a row for each request."""
    count = len(inputs.slot)
    leaves = [leaf.astype(np.int32) if leaf.dtype.itemsize == 1 else leaf for leaf in jax.tree.leaves(inputs)]
    return np.concatenate([leaf.reshape(count, -1).view(np.int32) for leaf in leaves], axis=1)


def unpack(packed: jax.Array, like: SlotInputs) -> SlotInputs:
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
