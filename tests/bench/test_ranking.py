"""How the planner's order of plans is compared with the compiler's."""

from tools.bench.ranking import FIRST, QUESTIONS, TIE, Order, orders, recorded_pairs


def order(*rehearsed: float) -> Order:
    planned = [1.0 + 0.1 * place for place in range(len(rehearsed))]
    return Order(QUESTIONS[0], planned, list(rehearsed), refused=0)


def test_an_order_is_equal_where_no_pair_is_the_other_way_round() -> None:
    assert order(1, 2, 3, 4, 5).is_equal(0) and order(1, 2, 3, 4, 5).pairs(0) == (10, 10)
    assert not order(2, 1, 3, 4, 5).is_equal() and order(2, 1, 3, 4, 5).pairs(TIE) == (9, 10)
    near = order(1 + TIE / 2, 1, 3, 4, 5)
    assert near.is_equal() and not near.is_equal(0)


def test_ties_do_not_add_up() -> None:
    """Each pair is compared for itself: five steps that each are a little faster than the one before are not in order."""
    step = 1 - 0.8 * TIE
    assert not order(1, step, step**2, step**3, step**4).is_equal()


def test_regret_and_correlation() -> None:
    assert order(1, 2, 3).regret == 0 and order(3, 2, 1).regret == 2
    assert order(1, 2, 3).kendall == 1 and order(3, 2, 1).kendall == -1 and order(3, 2, 1).spearman == -1


def test_recorded_steps_are_in_the_compilers_order() -> None:
    """The first plans of each question, and every pair of recorded steps of the same model, slice and length."""
    found = orders()
    assert all(len(one.planned) + one.refused == FIRST for one in found)
    assert sum(one.is_equal() for one in found) >= 0.9 * len(found)
    same, every = recorded_pairs()
    assert every >= 80 and same >= 0.9 * every
