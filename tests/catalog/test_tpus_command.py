"""`podway tpus` as people see it: golden output of its three pages, and the same facts as JSON.

After a wanted change of the output: `PODWAY_REWRITE_GOLDEN=1 pytest tests/catalog/test_tpus_command.py`, and read the diff.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from podway.cli.index import podway
from podway.errors import UserError

GOLDEN = Path(__file__).parent / "golden"


def run(*args: str) -> str:
    result = CliRunner().invoke(podway, ["tpus", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("args", "golden"),
    [
        ([], "generations.txt"),
        (["v6e"], "v6e.txt"),
        (["tpu7x"], "tpu7x.txt"),
        (["v6e-16"], "v6e-16.txt"),
        (["v5e-8"], "v5litepod-8.txt"),
        (["v3-32"], "v3-32.txt"),
        (["tpu7x-8"], "tpu7x-8.txt"),
    ],
)
def test_page(args: list[str], golden: str) -> None:
    shown = run(*args)
    file = GOLDEN / golden
    if os.environ.get("PODWAY_REWRITE_GOLDEN"):
        file.write_text(shown, encoding="utf-8")
    assert shown == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("alias", ["v5litepod", "V5E", "tpu-v5e"])
def test_a_generation_by_any_name(alias: str) -> None:
    assert run(alias) == run("v5e")


def test_json_of_all_generations() -> None:
    records = {record["name"]: record for record in json.loads(run("-o", "json"))}
    assert records["v6e"]["price_per_chip_hour"] == 2.7
    assert records["tpu7x"]["price_per_chip_hour"] is None
    assert records["v5e"]["sizes"][0] == "v5litepod-1"
    assert records["v5e"]["default_runtime"] == "v2-alpha-tpuv5-lite"


def test_json_of_a_generation_has_all_its_rows() -> None:
    records = json.loads(run("v5p", "-o", "json"))
    assert len(records) == 94
    assert records[0]["accelerator_type"] == "v5p-8"
    assert records[0]["topology"] == "2x2x1"


def test_json_of_a_slice() -> None:
    record = json.loads(run("v4-4x4x16", "-o", "json"))
    assert (record["accelerator_type"], record["topology"], record["hosts"]) == ("v4-512", "4x4x16", 64)
    assert record["offers"][0]["zone"] == "us-central2-b"
    assert record["offers"][0]["on_demand"] == pytest.approx(256 * 3.22)


def test_an_unknown_price_is_a_dash_and_comes_last() -> None:
    lines = run("v6e-16").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("ZONE"))
    prices = [line.split()[1] for line in lines[start + 1 : lines.index("", start)]]
    assert "-" in prices
    assert prices == sorted(prices, key=lambda text: (text == "-", float(text) if text != "-" else 0))
    assert "0.00" not in prices


def test_an_impossible_size_is_a_user_error() -> None:
    with pytest.raises(UserError, match="There is no v6e-9"):
        run("v6e-9")


def test_it_imports_neither_jax_nor_rich() -> None:
    code = "import sys, podway.cli.tpus; print([m for m in ('jax', 'rich', 'yaml', 'sqlalchemy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
