"""Speculative decoding: the same tokens, in fewer passes, whatever is asked for."""

import random

import jax.numpy as jnp
import numpy as np
import pytest

from podway.errors import UserError
from podway.serve.batcher import Request
from podway.serve.engine import Engine
from podway.serve.options import draft_size, parser
from podway.serve.sampling_params import SamplingParams
from podway.serve.speculative import NGRAM, propose
from tests.serve.tiny import LLAMA, Runner, engine_for


def expected_draft(tokens: list[int], size: int) -> list[int] | None:
    """The longest run of last tokens that stood before, its latest place, and what followed, in circles."""
    for n in range(NGRAM, 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:] and len(tokens) > n:
                return [tokens[end + j % (len(tokens) - end)] for j in range(size)]
    return None


def test_drafts_are_what_followed_the_last_tokens_before() -> None:
    chance = random.Random(0)
    texts = [[chance.randrange(3) for _ in range(chance.randrange(1, 24))] for _ in range(200)]
    texts += [[7], [7, 7], [7, 7, 7], list(range(20)), [1, 2, 3, 4] * 5]
    padded = np.full((len(texts), 32), 1, np.int32)  # what lies behind the text must not matter
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    drafts, found = propose(jnp.asarray(padded), jnp.asarray([len(text) for text in texts]), 5)
    for text, draft, was_found in zip(texts, np.asarray(drafts).tolist(), np.asarray(found).tolist(), strict=True):
        expected = expected_draft(text, 5)
        assert was_found == (expected is not None), text
        assert not was_found or draft == expected, text


def mixed_requests(runner: Runner, seed: int) -> list[Request]:
    """Greedy and drawn, with logprobs, penalties, biases, stops, shortest lengths, and some that are read back one by one."""
    chance, made = random.Random(seed), []
    for number in range(14):
        phrase = [chance.randrange(97) for _ in range(chance.randrange(1, 6))]
        prompt = (phrase * 12)[: chance.randrange(1, 36)]
        sampling = chance.choice(
            [
                SamplingParams(),
                SamplingParams(),
                SamplingParams(logprobs=True),
                SamplingParams(temperature=0.3, seed=number),
                SamplingParams(temperature=0.7, top_p=0.9, top_k=30, seed=number, logprobs=True),
                SamplingParams(repetition=1.3),
                SamplingParams(logit_bias=((phrase[0], 5.0),)),
            ]
        )
        stops = frozenset(chance.sample(range(97), chance.choice([0, 0, 5])))
        made.append(
            runner.submit(
                prompt, chance.randrange(1, 26), sampling, stop_ids=stops, min_tokens=chance.choice([0, 0, 1]),
                guided=chance.random() < 0.2,
            )
        )  # fmt: skip
        for _ in range(chance.randrange(2)):
            runner.turn()
    return made


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    sizes = {"pages": 20, "max_seqs": 3, "prompt_tokens": 16}
    return engine_for(LLAMA, **sizes), engine_for(LLAMA, **sizes, speculate=3)


def test_tokens_and_logprobs_are_those_without_drafts(engines: tuple[Engine, Engine]) -> None:
    runners = [(Runner(engines[0]), Runner(engines[1])) for _ in range(6)]
    for seed, (plain, drafting) in enumerate(runners):
        expected, found = (mixed_requests(runner, seed) for runner in (plain, drafting))
        plain.finish()
        drafting.finish()
        assert [(one.answer, one.finish) for one in found] == [(one.answer, one.finish) for one in expected]
        told, wanted = logprobs(drafting), logprobs(plain)
        assert told.keys() == wanted.keys()
        for number, values in wanted.items():
            np.testing.assert_allclose(told[number], values, atol=2e-5)
    assert sum(drafting.batcher.preemptions for _, drafting in runners) > 2
    flights = [flight for _, drafting in runners for flight in drafting.flights]
    drafts, proposed, accepted = np.sum([flight.drafts() for flight in flights], axis=0)
    assert 0 < accepted < proposed and drafts <= proposed


def logprobs(runner: Runner) -> dict[int, list[float]]:
    """Of every token of the requests that asked for them."""
    found: dict[int, list[float]] = {}
    for flight in runner.flights:
        numbers, tokens = flight.logprobs()[0], flight.tokens()
        for index, row in enumerate(flight.step.rows):
            owner = row.request.owner
            if isinstance(owner, SamplingParams) and owner.logprobs:
                found.setdefault(row.request.number, []).extend(numbers[: len(tokens[index]), index].tolist())
    return found


def test_text_that_repeats_needs_fewer_passes(engines: tuple[Engine, Engine]) -> None:
    """What is taken without a pass of its own is most of a text that goes in circles."""
    runner = Runner(engines[1])
    request = runner.submit([5, 9, 5, 9, 5, 9], 40, SamplingParams(logit_bias=((9, 100.0),)))
    runner.finish()
    assert request.answer == [9] * 40
    assert sum(flight.drafts()[2] for flight in runner.flights) >= 25


def test_the_flag_and_the_spelling_of_vllm_mean_the_same() -> None:
    def asked(*arguments: str) -> int:
        return draft_size(parser().parse_args(["model", *arguments]))

    config = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    assert asked() == 0 and asked("--speculate", "5") == asked("--speculative-config", config) == 5
    for wrong, words in (
        (("--speculate", "16"), "between 0 and 15"),
        (("--speculate", "-1"), "between 0 and 15"),
        (("--speculative-config", "{"), "not a JSON object"),
        (("--speculative-config", "[]"), "not a JSON object"),
        (("--speculative-config", '{"method": "eagle"}'), "eagle"),
        (("--speculative-config", '{"method": "ngram"}'), "num_speculative_tokens"),
        (("--speculative-config", '{"method": "ngram", "num_speculative_tokens": "5"}'), "num_speculative_tokens"),
        (("--speculate", "5", "--speculative-config", config), "give one of them"),
    ):
        with pytest.raises(UserError) as caught:
            asked(*wrong)
        assert words in f"{caught.value.what} {caught.value.hint}", wrong
