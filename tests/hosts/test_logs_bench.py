"""The benchmark of the logs, small: it measures what it says it measures."""

from tools.bench.logmerge import Case, Row, report, run


def test_it_shows_each_log_as_it_should() -> None:
    row = run(ranks=8, lines=400)
    assert [(case.name, case.lines, case.shown) for case in row.cases] == [
        ("alike", 3200, 400),
        ("different", 3200, 3200),
        ("mixed", 3200, 200 + 8 * 200),
    ]
    assert all(case.lines_per_s > 1000 and 5 < case.peak_mb < 150 for case in row.cases)
    assert "LINES/CPU S" in report(row) and "mixed" in report(row)


def test_the_goals_are_met_by_the_worst() -> None:
    def row(*results: tuple[float, float]) -> Row:
        cases = [Case(name="x", lines=1, shown=1, lines_per_s=speed, peak_mb=peak) for speed, peak in results]
        return Row(name="x", cases=tuple(cases))

    assert row((300_000, 60), (200_000, 149)).met
    assert not row((300_000, 60), (199_999, 60)).met
    assert not row((300_000, 150), (300_000, 60)).met
