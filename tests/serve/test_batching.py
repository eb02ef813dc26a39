"""Many requests at once are answered as each would be alone: mixed lengths and arrivals, stops, seeds, shared beginnings, cancels,
and too few pages for all."""

import random

import jax
import pytest

from podway.model.layout import MeshShape
from podway.model.mesh import make_mesh
from podway.model.shape import ModelShape
from podway.serve.engine import Engine
from podway.serve.sampling_params import SamplingParams
from tests.long import every
from tests.serve.tiny import GEMMA, LLAMA, MIXTRAL, Runner, engine_for, greedy, run

AdmittedRequest = tuple[list[int], int, frozenset[int], SamplingParams]


def wishes(count: int, chance: random.Random) -> list[AdmittedRequest]:
    """Half begin as another does; a third may stop early; one in five is drawn by a seed."""
    base = [chance.randrange(97) for _ in range(36)]
    made = []
    for number in range(count):
        shared = base[: chance.randrange(30)] if chance.random() < 0.5 else []
        prompt = shared + [chance.randrange(97) for _ in range(chance.randrange(1, 40 - len(shared)))]
        stops = frozenset(chance.sample(range(97), chance.choice([0, 0, 6])))
        hot = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, presence=0.2, seed=number)
        made.append((prompt, chance.randrange(1, 20), stops, hot if chance.random() < 0.2 else SamplingParams()))
    return made


def all_at_once(engine: Engine, wanted: list[AdmittedRequest], chance: random.Random) -> None:
    """Send them while others run, cancel some, and compare each with what it gets alone."""
    runner = Runner(engine)
    made = []
    for prompt, count, stops, sampling in wanted:
        made.append(runner.submit(prompt, count, sampling, stop_ids=stops))
        for _ in range(chance.randrange(3)):
            runner.turn()
        if chance.random() < 0.1:
            runner.batcher.cancel(chance.choice(made))
        runner.batcher.check()
    runner.finish()
    finishes = [request.finish for request in made]
    assert {"stop", "length", "cancelled"} <= set(finishes)
    assert runner.batcher.preemptions and any(request.cached for request in made)
    for request, (prompt, count, stops, sampling) in zip(made, wanted, strict=True):
        plain = sampling == SamplingParams()
        alone = greedy(LLAMA, prompt, count, stops) if plain else run(engine, prompt, count, sampling, stop_ids=stops)
        assert request.answer == alone[: len(request.answer)]
        assert request.finish == "cancelled" or request.answer == alone


@pytest.mark.long
def test_150_requests_equal_one_by_one() -> None:
    chance = random.Random(0)
    all_at_once(engine_for(LLAMA, pages=40), wishes(150, chance), chance)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_500_requests_equal_one_by_one() -> None:
    chance = random.Random(1)
    all_at_once(engine_for(LLAMA, pages=40), wishes(500, chance), chance)


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize("shape", every(3, [GEMMA, LLAMA, MIXTRAL]), ids=lambda shape: shape.family)
def test_four_devices_equal_one(shape: ModelShape) -> None:
    """Key/value heads on several devices (2 and 1 over 4), windows, experts; greedy and drawn, together."""
    chance = random.Random(4)
    mesh = make_mesh(MeshShape(tensor=4), jax.devices()[:4])
    alone, split = (engine_for(shape, mesh=m, max_seqs=2, prompt_tokens=16) for m in (None, mesh))
    answers = []
    for engine in (alone, split):
        runner = Runner(engine)
        requests = [
            runner.submit(prompt, count, sampling) for prompt, count, _, sampling in wishes(12, random.Random(4))
        ]
        runner.finish()
        answers.append([request.answer for request in requests])
    assert answers[0] == answers[1]
    prompt = [chance.randrange(97) for _ in range(20)]
    assert run(split, prompt, 8) == greedy(shape, prompt, 8)
