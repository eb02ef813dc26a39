"""`podway plan` as a person sees it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from podway.cli.index import podway
from podway.errors import UserError


def plan(*words: str) -> str:
    result = CliRunner().invoke(podway, ["plan", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: str) -> UserError:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(podway, ["plan", *words], catch_exceptions=False)
    assert "\n" not in caught.value.what and caught.value.hint
    return caught.value


def test_train_shows_a_table_the_best_plan_and_the_reasons() -> None:
    page = plan("train", "llama3.1-8b", "--tpu", "v6e", "--top", "3")
    lines = page.splitlines()
    assert lines[0] == "llama3.1-8b: 8.03 B parameters"
    assert lines[1].split()[:4] == ["SLICE", "N", "MESH", "TILE"]
    assert lines[2].startswith("v6e-") and "±11%" in lines[2]
    for word in (
        "saved activations",
        "ICI fsdp gather",
        "bound by",
        "in 80% of cases: calibrated on",
        "not modelled:",
        "DOES NOT WORK",
        "OOM by",
    ):
        assert word in page
    assert "(--top 6)" in page


def test_train_with_a_target() -> None:
    page = plan("train", "llama3.1-8b", "--tpu", "v6e", "--tokens", "15T", "--days", "30", "--top", "2")
    assert "COST $" in page and "15T tokens:" in page and "slowest slice" in page


def test_a_fixed_configuration() -> None:
    words = ["train", "128b", "--seq", "2048", "--tpu", "v5e-256", "--mesh", "fsdp=*,tensor=16", "--batch", "256"]
    page = plan(*words, "--microbatches", "1", "--remat", "full", "--program", "maxtext-2023")
    assert "57.7%" in page and "16x1" in page


def test_json_has_every_part() -> None:
    document = json.loads(plan("train", "llama3.1-8b", "--tpu", "v6e-16", "--tokens", "1B", "-o", "json"))
    best = document["plans"][0]
    assert best["slice"] == "v6e-16" and best["mesh"]["fsdp"] >= 1
    part = best["memory"]
    assert part["total"] == pytest.approx(
        part["weights"] + part["optimizer"] + part["saved"]
        + max(part["early"] + part["logits"], part["gradients"] + part["temp"])
    )  # fmt: skip
    assert sum(best["time"]["parts"].values()) == pytest.approx(best["time"]["total"])
    assert best["hours"] > 0 and best["dollars"] > 0 and 0 < best["mfu"] < 1


def test_t5_is_planned_by_its_tile() -> None:
    words = ["train", "t5-11b", "--seq", "512", "--tpu", "v4-512", "--batch", "896", "--microbatches", "4"]
    page = plan(*words, "--tile", "4,2,2,1")
    assert page.startswith("t5-1.1-xxl (t5x): 11.13 B parameters")
    assert "4x2x2x1" in page and "308k" in page
    assert refused(*words, "--tile", "2,2,2,1").what.startswith("t5-1.1-xxl does not fit: v4-512: OOM by")


def test_finetune() -> None:
    page = plan("finetune", "llama3.1-8b", "--lora", "16", "--int8-base", "--tpu", "v5e", "--top", "9")
    assert "fine-tuning LoRA of rank 16" in page and "LoRA 16 (int8)" in page and "v5litepod-1 " in page


def test_serve() -> None:
    page = plan("serve", "llama3.1-70b", "--in", "1000", "--out", "250", "--rps", "4", "--ttft", "500ms")
    assert page.splitlines()[2].startswith("v6e-8 ")
    assert "HBM: weights" in page and "DOES NOT WORK" in page
    document = json.loads(plan("serve", "llama3.1-8b", "--tpu", "v5e", "--weights", "int8", "-o", "json"))
    assert document["plans"][0]["slice"]["accelerator_type"] == "v5litepod-1"


@pytest.mark.parametrize("topic", ["core", "tile", "mfu", "remat", "dcn"])
def test_explain(topic: str) -> None:
    text = plan("explain", topic)
    assert text.lower().startswith(topic) and len(text) > 300
    assert topic in plan("explain")


def test_explain_core_answers_the_question() -> None:
    text = plan("explain", "core")
    assert "core must be 1" in text and "megacore" in text and "(1,1,1,2)" in text


def test_a_config_json_is_planned_like_its_name(tmp_path: Path) -> None:
    from podway.model.families import find_model
    from podway.model.hf import shape_to_hf

    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape_to_hf(find_model("llama3.1-8b"))))
    words = ["--tpu", "v6e-16", "-o", "json", "--top", "1"]
    ours, theirs = (json.loads(plan("train", name, *words))["plans"] for name in (str(path), "llama3.1-8b"))
    assert ours == theirs


@pytest.mark.parametrize("verb", ["train", "finetune", "serve"])
def test_a_config_json_of_another_architecture(verb: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 768}))
    assert "BertForMaskedLM" in str(refused(verb, str(path)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "lama3.1-8b"), "unknown model"),
        (("train", "llama3.1-8b", "--batch", "0"), "batch is 0"),
        (("train", "llama3.1-8b", "--tpu", "v6e-9"), "There is no v6e-9"),
        (("train", "llama3.1-8b", "--tokens", "many"), "is not a number above 0"),
        (("train", "llama3.1-8b", "--mesh", "fsdp=8"), "--mesh needs one slice"),
        (("train", "llama3.1-8b", "--tpu", "v6e-8", "--mesh", "rows=8"), "an axis 'rows'"),
        (("train", "llama3.1-8b", "--tpu", "v6e-8", "--mesh", "fsdp=4"), "there are 8"),
        (("train", "llama3.1-405b", "--tpu", "v6e-8"), "does not fit on v6e-8: OOM by"),
        (("train", "llama3.1-8b", "--plot", "plan.gif"), "cannot draw"),
        (("train", "llama3.1-8b", "--plot", "nowhere/plan.png"), "no such directory"),
        (("finetune", "llama3.1-8b", "--int8-base"), "int8 weights cannot be trained"),
        (("serve", "llama3.1-405b", "--tpu", "v5e-8"), "none of 1 slices can serve llama3.1-405b"),
        (("serve", "llama3.1-8b", "--rps", "0"), "rate is 0"),
        (("serve", "llama3.1-8b", "--ttft", "soon"), "is not a duration above 0"),
        (("explain", "love"), "unknown topic 'love'"),
    ],
)
def test_mistakes_get_one_clear_line(words: tuple[str, ...], message: str) -> None:
    assert message in refused(*words).what


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    plan("train", "llama3.2-1b", "--tpu", "v6e", "--plot", str(path))
    text = path.read_text()
    assert (text.lstrip().startswith("<?xml") and "saved activations" in text) or "<path" in text
