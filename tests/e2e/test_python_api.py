"""The Python API as a stranger uses it: every example of docs/python.md under `mypy --strict` and against a simulated slice."""

import asyncio
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import podway
from tests.conftest import wait_until
from tests.e2e.harness import Podway, task
from tests.long import every

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.M | re.S)
PRINTS = [
    ("hello from 0 of 4", "hello from 3 of 4", "SUCCEEDED"),
    ("SUCCEEDED", "(task, pid="),
    ("local v6e-16 4",),
    ("v6e-", "tokens/s", "a step takes"),
    ("404", "no-such-cluster"),
    ("from one", "from two", "['SUCCEEDED', 'SUCCEEDED']"),
]
STRANGER = """
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import assert_type

import podway


def launch(client: podway.Client, task: podway.Task) -> podway.LaunchReply:
    assert_type(client.launch("task.yaml", cluster="c", env={"A": "1"}), podway.LaunchReply)
    client.launch(Path("task.yaml"), autostop=podway.Autostop(idle_minutes=5), retry_until_up=True)
    client.exec("c", {"run": "hostname"}, name="again")
    return client.launch(task)


def read(client: podway.Client) -> None:
    assert_type(client.clusters(), list[podway.ClusterView])
    assert_type(client.wait("c", timeout=5), podway.JobView)
    assert_type(client.logs("c", 1, tail=5, follow=False), Iterator[str])
    plans = client.plan("llama3.1-8b", seq=8192, tpu="v6e", mesh="fsdp=*")
    assert_type(plans, list[podway.TrainPlan])
    assert_type(client.rehearse("llama3.1-8b", plans[0]).fits, bool)
    assert_type(client.cancel("c", every=True), list[int])
    for metrics in client.metrics("c", 1):
        assert_type(metrics.steps[0].loss, float | None)
    for frame in client.watch("c", 1, raw=True):
        assert_type(frame, podway.Frame)


async def read_async(client: podway.AsyncClient) -> None:
    assert_type(await client.launch("task.yaml", cluster="c"), podway.LaunchReply)
    assert_type(client.logs("c", 1, tail=5), AsyncIterator[str])
    assert_type(await client.clusters(), list[podway.ClusterView])
    async for frame in client.watch("c", 1):
        assert_type(frame.text, str)


def explain(error: podway.UserError) -> str:
    return f"{error.what} {error.hint} {error.status} {podway.__version__}"
"""
WRONG = """
import podway

client = podway.Client()
client.launch(5)
client.launch("task.yaml", clutser="c")
client.exec("c", "task.yaml", autostop=None)
client.wait("c", timeout="soon")
client.nothing()
podway.nothing
"""


def mypy(folder: Path, **scripts: str) -> "subprocess.CompletedProcess[str]":
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    words = [
        "--strict",
        "--no-error-summary",
        "--cache-dir",
        str(folder / "cache"),
        *(f"{name}.py" for name in scripts),
    ]
    return subprocess.run([sys.executable, "-m", "mypy", *words], cwd=folder, capture_output=True, text=True)


def test_a_strangers_script_passes_mypy_strict(tmp_path: Path) -> None:
    examples = {f"example{number}": text for number, text in enumerate(EXAMPLES)}
    checked = mypy(tmp_path, stranger=STRANGER, **examples)
    assert (checked.returncode, checked.stdout) == (0, "")
    wrong = mypy(tmp_path, wrong=WRONG).stdout.splitlines()
    assert {int(line.split(":")[1]) for line in wrong if ": error:" in line} == {5, 6, 7, 8, 9, 10}


@pytest.mark.parametrize("number", every(3, range(len(EXAMPLES))))
def test_the_examples_of_the_page_run(pod: Podway, tmp_path: Path, number: int) -> None:
    (tmp_path / "task.yaml").write_text("run: echo hello from $PODWAY_RANK of $PODWAY_NUM_HOSTS\n")
    words = [sys.executable, "-c", EXAMPLES[number]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    for text in PRINTS[number]:
        assert text in done.stdout
    wait_until(lambda: not podway.Client().clusters(), 120, "the end of the clusters")


def test_every_example_is_tested() -> None:
    assert len(EXAMPLES) == len(PRINTS) == 6


def test_import_is_light() -> None:
    code = "import sys, podway; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in loaded if name.startswith("podway")} == {"podway", "podway.version"}
    code = "import sys, podway; podway.Client; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"asyncio", "yaml", "sqlalchemy", "http.client", "subprocess"} & set(loaded)


def test_all_that_is_promised_is_there() -> None:
    assert set(podway.__all__) <= set(dir(podway))
    for name in podway.__all__:
        assert getattr(podway, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        podway.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_the_async_client_has_every_method_of_the_client() -> None:
    ours = {"close", "fork"}  # what a client does to itself
    verbs = {name for name in dir(podway.Client) if not name.startswith("_")} - ours
    assert verbs == {name for name in dir(podway.AsyncClient) if not name.startswith("_")} - ours


def test_files_of_the_task_are_uploaded(pod: Podway, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "data.txt").write_text("from the laptop\n")
    with podway.Client() as client:
        client.launch({"run": "cat data.txt"}, cluster="c", tpus="v4-8", workdir=tmp_path / "work")
        assert "from the laptop" in "".join(client.logs("c"))
        assert client.wait("c").state == "SUCCEEDED"
    pod.down("c")


def test_what_cannot_be_a_task_is_one_clear_error(podway_home: Path, tmp_path: Path) -> None:
    client = podway.Client()
    with pytest.raises(podway.UserError, match=r"no\.yaml"):
        client.request("no.yaml")
    with pytest.raises(podway.UserError, match="<dict>:1:"):
        client.request({"runn": "hostname"})
    with pytest.raises(podway.UserError, match="holds what a task file cannot"):
        client.request({"run": object()})
    with pytest.raises(podway.UserError, match="as it is"):
        client.request(podway.Task(run="hostname"), tpus="v6e-8")
    with pytest.raises(TypeError, match="clutser"):
        client.request({"run": "hostname"}, clutser="c")  # type: ignore[call-arg]


def test_close_ends_a_stream_and_not_the_job(pod: Podway) -> None:
    client = podway.Client()
    client.launch(task("echo begun; sleep 1000", tpu="v4-8"), cluster="c")
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.extend(client.logs("c", 1)), daemon=True)
    reader.start()
    wait_until(lambda: pod.client.job("c", 1).state == "RUNNING", 60, "the job")
    client.close()
    reader.join(60)
    assert not reader.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        client.clusters()
    assert pod.client.job("c", 1).state == "RUNNING"
    with pytest.raises(TimeoutError, match="RUNNING"):
        pod.client.wait("c", timeout=0.1)
    pod.down("c")


def test_cancelling_an_async_call_ends_its_thread(pod: Podway) -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("podway-")]

    async def first_line(client: podway.AsyncClient) -> str:
        async for line in client.logs("c", 1):
            return line
        raise AssertionError("no line came")

    async def main() -> None:
        async with podway.AsyncClient() as client:
            await client.launch(task("echo begun; sleep 1000", tpu="v4-8"), cluster="c")
            assert "begun" in await first_line(client)
            waits = [asyncio.create_task(client.wait("c", 1)) for _ in range(20)]  # more than asyncio's pool has
            await asyncio.sleep(0.5)
            assert (await client.job("c", 1)).state == "RUNNING"
            for waiting in waits[:10]:
                waiting.cancel()
            assert await client.cancel("c", [1]) == [1]
            ended = await asyncio.gather(*waits, return_exceptions=True)
            assert all(isinstance(one, asyncio.CancelledError) for one in ended[:10])
            assert {one.state for one in ended[10:] if isinstance(one, podway.JobView)} == {"CANCELLED"}

    asyncio.run(main())
    deadline = time.monotonic() + 60
    while threads() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threads() == []
    pod.down("c")


def test_the_metrics_of_a_run_are_read(pod: Podway) -> None:
    lines = "; ".join(
        f"echo completed step: {step}, seconds: 0.5, TFLOP/s/device: 9, Tokens/s/device: 100, total_weights: 8, loss: {9 - step}"
        for step in range(3)
    )
    with podway.Client() as client:
        launched = client.launch(
            {"resources": {"accelerators": "tpu-v6e-1"}, "run": lines}, cluster="run", provider="local"
        )
        frames = list(client.metrics("run", launched.job))
        assert [one.loss for frame in frames for one in frame.steps] == [9.0, 8.0, 7.0]
        assert frames[0].devices == 1 and frames[-1].ended
        last = next(frame.cursor for frame in reversed(frames) if frame.cursor)
        assert not any(frame.steps for frame in client.metrics("run", launched.job, follow=False, cursor=last))
        assert client.runs() == [] and client.planned("run", launched.job).code == "not_training"
        assert [one.name for one in client.costs().clusters] == ["run"]
        assert client.wait("run", launched.job, timeout=60).state == "SUCCEEDED"
