"""What a request may ask of the sampler (no jax, no numpy)."""

import msgspec

MAX_ALTERNATIVES = 20  # what the OpenAI API allows for top_logprobs
STOP_IDS = 16
BIASES = 300  # what the OpenAI API allows


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. The default is the most likely one."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: bool = False
