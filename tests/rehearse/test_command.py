"""`podway rehearse` as a person sees it; what the compiler says is recorded, the command is real."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from podway.cli import rehearse as verb
from podway.cli.index import podway
from podway.errors import UserError
from podway.rehearse.memory import Buffer, Hbm
from podway.rehearse.program import Op
from podway.rehearse.reading import read_program
from podway.rehearse.rehearsal import CompileReport, Rehearsal
from tests.rehearse.recorded import fabric, text

GIB = 2**30


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Rehearsal]:
    """What would be compiled; every answer is the recorded program, 1 GiB for each 8 sequences over a limit of 4."""
    seen: list[Rehearsal] = []
    recorded = read_program(text("scan_v5e"), fabric("v5litepod-4"))
    # Turned often enough to be as slow as a step of the model could be.
    again = Op(name="layers", kind="loop", turns=2000, blocks=(recorded.ops,))
    program = msgspec.structs.replace(recorded, ops=(again,))

    def rehearse(
        wanted: Any, *, jobs: int, fresh: bool, progress: Any, limit_s: float | None = None
    ) -> list[CompileReport]:
        found = []
        for number, one in enumerate(wanted):
            progress(number, "compiling")
            seen.append(one)
            batch = int(one.setting("batch.sequences") or 8)
            buffer = Buffer(bytes=GIB, name="trained/layers/q", shape="f32[2,16]", made=False)
            memory = Hbm(arguments=GIB * batch // 8, temporary=0, limit=4 * GIB, buffers=(buffer,))
            found.append(
                CompileReport(
                    jax="0.10.2", libtpu="0.0.51", key="k", memory=memory, program=program, compile_seconds=3.0
                )
            )
        return found

    monkeypatch.setattr(verb, "rehearse", rehearse)
    monkeypatch.setattr(verb, "check_installed", lambda: None)
    return seen


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(podway, ["rehearse", *words], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def refused(*words: str) -> UserError:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(podway, ["rehearse", *words], catch_exceptions=False)
    assert "\n" not in caught.value.what and caught.value.hint
    return caught.value


TRAIN = ("train", "llama3.2-1b", "--tpu", "v5e-4", "--seq", "2048", "--mesh", "fsdp=4")


def test_a_step_as_it_is_asked_for(asked: list[Rehearsal]) -> None:
    page = run(*TRAIN, "--batch", "16", "--remat", "full", "--microbatches", "2")
    assert len(asked) == 1 and asked[0].fast
    words = asked[0].settings
    assert {"batch.sequences=16", "batch.microbatches=2", "remat.policy=full", "mesh.shape=fsdp=4"} <= set(words)
    for part in ("HBM a device   2.00 of 4.00 GiB", "tokens/s, MFU", "–", "LARGEST AT THE FULLEST MOMENT",
                 "MOST OF THE TIME", "collective-permute 5 of 5", "schedule"):  # fmt: skip
        assert part in page or part == "schedule", part


def test_an_estimate_above_the_peak_is_reported_and_not_shown(asked: list[Rehearsal]) -> None:
    page = run("train", "llama3.1-8b", "--tpu", "v5e-4", "--seq", "8192", "--mesh", "fsdp=4", "--batch", "32")
    assert "internal error: this estimate is above the peak" in page and "MFU" not in page


def test_what_does_not_fit_says_what_would(asked: list[Rehearsal]) -> None:
    page = run(*TRAIN, "--batch", "64", "--remat", "minimal", "--microbatches", "1", code=1)
    assert "OOM by 4.00 GiB" in page and "What would make it fit:" in page and "GiB" in page.split("fit:")[1]


def test_the_largest_batch(asked: list[Rehearsal]) -> None:
    page = run(*TRAIN, "--batch", "8", "--remat", "full", "--microbatches", "1", "--largest-batch")
    assert asked[-1].setting("batch.sequences") == "32", "1 GiB for each 8 sequences, and 4 GiB are there"
    assert "4.00 of 4.00 GiB" in page


def test_json_is_one_document(asked: list[Rehearsal]) -> None:
    found = json.loads(run(*TRAIN, "--batch", "16", "-o", "json"))[0]
    assert found["memory"]["fits"] and found["estimate"]["low"] <= found["estimate"]["point"]
    assert found["collectives"]["collective-permute"] == {"asynchronous": 5, "waited_for": 0}
    assert found["planned"]["bytes"] > 0 and found["mfu"] > 0 and found["versions"]["libtpu"] == "0.0.51"


def test_the_planner_fills_in_what_is_left_open(asked: list[Rehearsal]) -> None:
    run("train", "llama3.1-8b", "--tpu", "v6e-16", code=1)
    assert asked[0].slice == "v6e-16" and asked[0].setting("mesh.shape") and asked[0].setting("remat.policy")


def test_full_mode_is_asked_for(asked: list[Rehearsal]) -> None:
    run(*TRAIN, "--batch", "8", "--full")
    assert not asked[0].fast


def test_a_task_file(asked: list[Rehearsal], tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(
        "resources:\n  accelerators: tpu-v6e-8\nenvs:\n  HF_TOKEN:\n  ROWS: '16'\nnum_nodes: 2\nrun: |\n"
        "  cd x && podway train model.name=llama3.2-1b batch.sequences=$ROWS batch.length=1024 \\\n"
        "    data.paths=$HOME/x output=$HOME/out lora.rank=4\n"
    )
    run(str(file))
    one = asked[0]
    assert (one.model, one.slice, one.slices) == ("llama3.2-1b", "v6e-8", 2)
    assert set(one.settings) == {"batch.sequences=16", "batch.length=1024", "lora.rank=4"}
    run(str(file), "--tpu", "v5e-8")
    assert asked[1].slice == "v5litepod-8"


def test_a_serving_task(asked: list[Rehearsal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "engine_parts", lambda whole: ["fill slots", "decode 8 rows"])
    file = tmp_path / "serve.yaml"
    file.write_text(
        "resources: {accelerators: tpu-v6e-8}\nrun: podway serve llama3.1-8b --random --tp 8 --max-seqs 32 --kv int8\n"
    )
    page = run(str(file))
    assert [one.part for one in asked] == ["fill slots", "decode 8 rows"]
    assert asked[0].options["max_seqs"] == 32 and asked[0].options["kv"] == "int8" and asked[0].tensor == 8
    assert "decode 8 rows" in page and "HBM A DEVICE" in page


def test_nonsense_gets_one_line(asked: list[Rehearsal], tmp_path: Path) -> None:
    assert "unknown model" in refused("train", "lama", "--tpu", "v6e-8").what
    assert "v6e-9" in refused("train", "llama3.1-8b", "--tpu", "v6e-9").what
    assert "batch is 0" in refused(*TRAIN, "--batch", "0").what
    assert "slices" in refused("serve", "llama3.1-8b", "--tpu", "v6e").what
    other = tmp_path / "other.yaml"
    other.write_text("run: echo hello\n")
    assert "runs no `podway train`" in refused(str(other)).what
    other.write_text("run: podway train model.name=llama3.2-1b\n")
    assert "asks for no TPU" in refused(str(other)).what
    assert "no such file" in refused("nowhere.yaml").what
    assert not asked


def test_a_program_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, asked: list[Rehearsal]) -> None:
    monkeypatch.setattr(
        verb, "rehearse", lambda wanted, **_: [CompileReport(jax="", libtpu="", key="", failed="it aborted")]
    )
    assert "does not compile: it aborted" in run(*TRAIN, "--batch", "8", code=1)


def test_the_only_step_of_maxtext_is_what_is_compiled(asked: list[Rehearsal]) -> None:
    """The planner would keep more and compute less again; there is one program of MaxText's, and its plan stands beside it."""
    run(*TRAIN, "--batch", "8", "--program", "maxtext-2023")
    assert asked[0].program == "maxtext-2023"
    assert {"remat.policy=full", "batch.microbatches=1"} <= set(asked[0].settings)


def test_a_record_can_be_kept() -> None:
    one = Rehearsal(model="m", slice="v6e-8", options={"kv": "int8"}, part="fill slots", what="serve")
    assert msgspec.json.decode(msgspec.json.encode(one), type=Rehearsal) == one
    assert one.title == "m fill slots on v6e-8"


PLAN = ("plan", "train", "llama3.2-1b", "--tpu", "v5e-4", "--seq", "2048", "--batch", "64", "--top", "30")


def test_plans_are_ranked_again_by_the_compiler(asked: list[Rehearsal], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every recorded answer needs 8 of 4 GiB at 64 sequences: what is compiled is rejected, and the next comes first."""
    monkeypatch.setattr("podway.rehearse.running.check_installed", lambda: None)
    planned = CliRunner().invoke(podway, [*PLAN, "-o", "json", "--no-rehearse"], catch_exceptions=False)
    before = json.loads(planned.stdout)["plans"]
    assert not asked and all(plan["rehearsed"] is None for plan in before)
    result = CliRunner().invoke(podway, [*PLAN, "-o", "json", "--rehearse", "2"], catch_exceptions=False)
    after = json.loads(result.stdout)
    assert len(asked) == 6, "the two best, and twice what came after them"
    assert [plan["mesh"] for plan in after["plans"]] == [plan["mesh"] for plan in before[6:]]
    assert [one["reason"].partition(":")[0] for one in after["rejected"]][-6:] == ["compiled"] * 6
    assert "ranked again by rehearsal: 6 compiled" in after["notes"][-1]


def test_the_order_of_the_best_is_the_compilers(asked: list[Rehearsal], monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler turns the planner's order round: what it has not seen and comes among the best then, it is asked as well."""
    monkeypatch.setattr("podway.rehearse.running.check_installed", lambda: None)
    recorded, told = verb.rehearse, dict[tuple[str, ...], int]()

    def slower_first(wanted: Any, **kwargs: Any) -> list[CompileReport]:
        """The first that is asked takes longest; each fits."""
        found = []
        for one, report in zip(wanted, recorded(wanted, **kwargs), strict=True):
            told.setdefault(one.settings, len(told))
            (loop,) = report.program.ops
            longer = msgspec.structs.replace(loop, turns=12000 - 500 * told[one.settings])
            program = msgspec.structs.replace(report.program, ops=(longer,))
            memory = msgspec.structs.replace(report.memory, arguments=GIB)
            found.append(msgspec.structs.replace(report, program=program, memory=memory))
        return found

    monkeypatch.setattr(verb, "rehearse", slower_first)
    result = CliRunner().invoke(podway, [*PLAN, "-o", "json", "--rehearse", "5"], catch_exceptions=False)
    after = json.loads(result.stdout)
    first = after["plans"][:5]
    assert all(plan["rehearsed"] is not None for plan in first), "each of the best five is compiled"
    seconds = [plan["rehearsed"]["seconds"] for plan in first]
    assert seconds == sorted(seconds), "and they are in the order of their programs"
    compiled = [plan["rehearsed"]["seconds"] for plan in after["plans"] if plan["rehearsed"] is not None]
    assert sorted(compiled)[:5] == seconds, "nothing that was compiled and is faster stands after them"
    assert "the order of the first 5 is the compiler's" in after["notes"][-1]


def test_what_fits_gets_the_figures_of_its_program(asked: list[Rehearsal], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podway.rehearse.running.check_installed", lambda: None)
    words = ["plan", "train", "llama3.2-1b", "--tpu", "v5e-4", "--seq", "2048", "--batch", "16", "--mesh", "fsdp=4"]
    words += ["--microbatches", "1", "--remat", "full"]
    page = CliRunner().invoke(podway, [*words, "--rehearse", "1"], catch_exceptions=False).stdout
    assert "s*" in page and "compiled: " in page and "2.00 GiB a device" in page
    both = CliRunner().invoke(podway, [*words, "-o", "json", "--rehearse", "1"], catch_exceptions=False).stdout
    (best,) = json.loads(both)["plans"]
    assert best["seconds"] == best["rehearsed"]["seconds"] and best["rehearsed"]["bytes"] == 2 * GIB


def test_nobody_who_does_not_watch_waits_for_the_compiler(asked: list[Rehearsal]) -> None:
    page = CliRunner().invoke(podway, list(PLAN), catch_exceptions=False).stdout
    assert "SLICE" in page and not asked
    with pytest.raises(UserError, match="both given"):
        CliRunner().invoke(podway, [*PLAN, "--rehearse", "1", "--no-rehearse"], catch_exceptions=False)
    for words, what in (
        (["t5-11b", "--tpu", "v4-512", "--seq", "512", "--batch", "896"], "no program of it to compile"),
        (["deepseek-v3", "--tpu", "v5p-1024"], "does not run it"),
    ):
        with pytest.raises(UserError, match=what):
            CliRunner().invoke(podway, ["plan", "train", *words, "--rehearse", "1"], catch_exceptions=False)
