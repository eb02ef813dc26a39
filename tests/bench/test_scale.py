"""The benchmark of scale, small: it measures what it says, and leaves nothing behind."""

import re
from pathlib import Path

import psutil
from tools.bench import endpoints, growth, report, scale


def test_the_control_plane_over_endpoints_of_one_process(tmp_path: Path) -> None:
    rows = endpoints.measure(40)
    assert [key for key, *_ in rows] == ["endpoints", "endpoints-run", "endpoints-cancel", "endpoints-many"]
    assert all(0 < took < 60 for _, _, took, _ in rows)
    assert re.search(r"server: \d+\.\d s of CPU", rows[0][3]) and "2 launches of 20 each" in rows[3][1]
    assert left_behind() == []


def left_behind() -> list[list[str]]:
    """Of this process alone: other tests run endpoints of their own."""
    found = [process.cmdline() for process in psutil.Process().children(recursive=True)]
    return [words for words in found if "tools.bench.endpoints" in words]


def test_the_cost_of_a_host_is_measured(tmp_path: Path) -> None:
    found = growth.measure(40, cluster_hosts=20, watched_s=0.5)
    assert (found.hosts, found.clusters) == (40, 2) and found.launch_cpu_s > 0 and found.status_s > 0
    text = growth.page([found])
    assert "| 40 in 2 |" in text and text.startswith("## Growth")
    assert left_behind() == []


def test_the_working_directory_is_as_large_as_it_says_and_the_same_each_time(tmp_path: Path) -> None:
    first, second = (scale.make_workdir(tmp_path / name, 12) for name in ("a", "b"))
    assert scale.size_of(first).startswith("12 MB in ")
    for path in first.rglob("*.py"):
        assert path.read_bytes() == (second / path.relative_to(first)).read_bytes()
    scale.change(second)
    assert (first / "data0.bin").read_bytes() != (second / "data0.bin").read_bytes()


def test_the_page_sets_podway_beside_rsync(tmp_path: Path) -> None:
    rows = [
        scale.seconds("sync", "Podway", 50.0),
        scale.seconds("sync-one", "Podway: one", 6.0),
        scale.seconds("rsync", "rsync", 1050.0),
        scale.seconds("rsync-one", "rsync: one", 12.0),
    ]
    text = scale.page([("Files", rows)])
    assert "| Podway | 65 s | 50.0 s |  |" in text and "| rsync | 1,070 s | 1,050.0 s |  |" in text
    assert (
        "rsync takes 21.0 times as long as Podway for all of it (goal: 5), 2.0 times as long after one change" in text
    )
    page = tmp_path / "page.md"
    report.write_section("scale", text, page)
    report.write_section("scale", "## again", page)
    assert page.read_text().count("<!-- begin scale -->") == 1 and "again" in page.read_text()
