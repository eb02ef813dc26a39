"""The order of rows: a permutation of each epoch, and mixtures that keep their proportions."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from podway.train.shuffle import Mixture, Permutation


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 50))
def test_a_permutation_has_every_index_once(size: int, seed: int, epoch: int) -> None:
    found = Permutation(size, seed, epoch).many(np.arange(size))
    assert sorted(found) == list(range(size))


def test_epochs_and_seeds_differ_and_are_fixed() -> None:
    indices = np.arange(1000)
    first = Permutation(1000, 0, 0).many(indices)
    assert (first == Permutation(1000, 0, 0).many(indices)).all()
    assert (first != Permutation(1000, 0, 1).many(indices)).mean() > 0.95
    assert (first != Permutation(1000, 1, 0).many(indices)).mean() > 0.95
    assert Permutation(1000, 0, 0)(17) == first[17]
    assert first[:8].tolist() == [995, 662, 970, 79, 926, 881, 826, 827], "a run that resumes finds its old order"


def test_a_permutation_looks_random() -> None:
    size = 10_000
    found = Permutation(size, 3, 0).many(np.arange(size))
    assert abs(np.corrcoef(np.arange(size), found)[0, 1]) < 0.05
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.05


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=5), st.integers(0, 1000))
def test_a_mixture_counts_each_source_on_without_gaps(weights: list[float], seed: int) -> None:
    mixture = Mixture(weights, seed)
    following = [0] * len(weights)
    for row in range(300):
        source, place = mixture.locate(row)
        assert place == following[source]
        following[source] += 1


def test_a_mixture_keeps_its_weights() -> None:
    mixture = Mixture([0.7, 0.2, 0.1], 0)
    counts = Counter(mixture.locate(row)[0] for row in range(40_000))
    assert np.allclose([counts[i] / 40_000 for i in range(3)], [0.7, 0.2, 0.1], atol=0.01)
    assert np.allclose(mixture.shares, [0.7, 0.2, 0.1], atol=1e-3)
    assert np.isclose(sum(mixture.shares), 1)


def test_a_tiny_weight_still_gives_rows() -> None:
    mixture = Mixture([1, 1e-9], 0)
    assert mixture.shares[1] > 0
