"""`podway check`: what a person sees, the JSON, and the schema."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from podway.cli.index import podway
from podway.errors import UserError
from podway.model.families import find_model
from podway.model.layout import MeshShape
from podway.task.explain import explain
from podway.task.read import task_from_command
from podway.task.schema import json_schema
from podway.task.task import Task
from podway.train.checks import check_fit
from podway.train.settings import read_config

from . import golden, page, seeds
from .reading import flags, read

SCHEMA = jsonschema.Draft202012Validator(json_schema())


def check(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(podway, ["check", *arguments], input=stdin, env={"HF_TOKEN": "hf_x"})


def test_check_prints_the_task() -> None:
    result = check(
        "-",
        "--secret",
        "S=hush",
        stdin="name: t\nenvs: {A_TOKEN: hush, B: shown}\nresources: {accelerators: v6e-16}\nrun: echo",
    )
    assert result.exit_code == 0
    assert "v6e-16: 16 chips (4x4) on 4 hosts, 512 GiB HBM" in result.output
    assert "B=shown" in result.output
    assert "hush" not in result.output


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_products_that_the_trainer_refuses_are_refused(kind: str) -> None:
    words = ["model.name=mixtral-8x7b", f"precision.products={kind}"]
    with pytest.raises(UserError) as trainers:
        check_fit(read_config(None, words), find_model("mixtral-8x7b"), MeshShape())
    task = "resources: {accelerators: v6e-16}\nrun: podway train " + " ".join(words)
    result = check("-", stdin=task)
    assert result.exit_code != 0
    assert isinstance(result.exception, UserError)
    assert (result.exception.what, result.exception.hint) == (trainers.value.what, trainers.value.hint)
    assert check("-", stdin=task.replace("mixtral-8x7b", "llama3.1-8b")).exit_code == 0


def test_check_prints_json_without_secrets(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text("run: x\nsecrets: {S: }\n")
    result = check(str(file), "-o", "json", "--secret", "S=hush", "--tpus", "v6e-8", "--num-nodes", "2")
    task = msgspec.json.decode(result.output, type=Task)
    assert task.secrets == {"S": ""} and task.slices == 2
    assert "hush" not in result.output


def test_check_reports_mistakes() -> None:
    result = check("-", stdin="rnu: x")
    assert isinstance(result.exception, UserError)
    assert result.exception.what == "<stdin>:1:1: rnu: unknown key"
    assert check().exit_code == 2


def test_explain_shows_every_part() -> None:
    for name in golden.NAMES:
        shown = explain(golden.read(name))
        for note in golden.read(name).notes:
            assert note in shown
    text = explain(golden.read("full.sky.yaml"))
    for part in (
        "2 x v6e-16",
        "in gcp/us-east5/us-east5-b",
        "$100.5/h",
        "/ckpt <- gs://my-bucket-ckpt",
        "Autostop",
        "Replicas",
        "Probe",
    ):
        assert part in text
    assert "or one of" in explain(read("type: task\ncommands: [x]\nresources: {gpu: tpu}"))


def test_a_command_is_a_task() -> None:
    task = task_from_command("echo hi", flags(tpus="v6e-8", name="n"))
    assert (task.run, task.name) == ("echo hi", "n")
    with pytest.raises(UserError):
        task_from_command("  ", flags())


def as_json(file: Path) -> Any:
    return json.loads(json.dumps(yaml.safe_load(file.read_text()), default=str))


def test_schema_is_valid_and_accepts_every_example() -> None:
    assert json.loads(check("--json-schema").output) == json.loads(json.dumps(json_schema()))
    jsonschema.Draft202012Validator.check_schema(json_schema())
    for file in [*seeds.EXAMPLES.parent.rglob("*.y*ml"), *(golden.FILES / name for name in golden.NAMES)]:
        assert not list(SCHEMA.iter_errors(as_json(file))), file


@pytest.mark.parametrize(
    "text",
    [
        "rnu: x",
        "resources: {acelerators: x}",
        "num_nodes: 0",
        "resources: {use_spot: 3}",
        "pool: {}",
        "type: service\ncommands: [x]",
        "type: fleet",
        "type: task\nspot_policy: never",
        "service: {readiness_probe: {}}",
    ],
)
def test_schema_refuses_what_the_reader_refuses(text: str) -> None:
    assert list(SCHEMA.iter_errors(yaml.safe_load(text)))
    with pytest.raises(UserError):
        read(text)


def test_the_page_holds_every_key() -> None:
    """`python -m tests.task.page` rewrites the tables of the page."""
    assert page.filled(page.PAGE.read_text()) == page.PAGE.read_text()
    assert all(table in page.PAGE.read_text() for table in page.tables().values())
