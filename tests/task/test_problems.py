"""All mistakes of a file are shown at once."""

from pathlib import Path

import pytest

from podway.cli.main import main
from podway.errors import UserError
from podway.task.problems import MOST_SHOWN, Problems

from .reading import refused


def every(error: UserError) -> list[str]:
    return [one.what for one in (error, *error.others)]


def test_shapes_of_a_skypilot_file() -> None:
    found = every(refused("nme: x\nnum_nodes: many\nresources: {foo: 1, use_spot: perhaps}\nrun: echo\n"))
    places = {what.split(": ", 1)[1].split(":")[0] for what in found}
    assert places == {"nme", "num_nodes", "resources.foo", "resources.use_spot"}


def test_sections_of_a_skypilot_file() -> None:
    found = every(
        refused(
            "resources: {accelerators: v6e-7, infra: aws}\nenvs: {A: , B: }\nworkdir: nowhere\n"
            "nme: x\nfile_mounts: {~/x: missing}\nrun: echo\n"
        )
    )
    text = "\n".join(found)
    for part in ("variable A", "variable B", "resources.accelerators", "nowhere", "nme", "missing"):
        assert part in text
    assert len(found) == 6


def test_sections_of_a_dstack_file() -> None:
    found = every(
        refused(
            "type: task\nenv: [A, B]\nresources: {gpu: H100}\nname: Not A Name\nidle_time: 5m\n"
            "commands: [echo]\nfiles: [missing]\n"
        )
    )
    text = "\n".join(found)
    for part in ("variable A", "variable B", "H100", "name", "idle_time", "missing"):
        assert part in text


def test_each_mistake_once_and_not_endlessly() -> None:
    problems = Problems()
    for number in range(100):
        problems.read(lambda number=number: _raise(f"mistake {number // 2}"), None)
    with pytest.raises(UserError) as caught:
        problems.raise_any()
    found = every(caught.value)
    assert found[:3] == ["mistake 0", "mistake 1", "mistake 2"]
    assert len(found) == MOST_SHOWN
    assert found[-1] == f"and {50 - MOST_SHOWN + 1} more mistakes in this file"


def test_nothing_wrong_is_nothing_raised() -> None:
    problems = Problems()
    assert problems.read(lambda: 3, 4) == 3
    problems.raise_any()


def _raise(what: str) -> None:
    raise UserError(what, "")


def test_the_command_prints_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("nme: x\nrn: echo\n")
    assert main(["check", str(file)]) == 1
    said = capsys.readouterr().err
    assert said.count("Error:") == 2
    assert "did you mean `name`?" in said and "did you mean `run`?" in said
