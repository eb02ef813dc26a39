"""Four processes of four devices train the losses and the model of one with one device, through `python -m podway.train`."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import free_port, wait_until
from tests.train.running import EXACT, environment, journal, train

WORDS = (
    *EXACT, "batch.sequences=16", "batch.length=32", "schedule.steps=3", "schedule.kind=constant",
    "checkpoint.save=false", "checkpoint.export=true", "checkpoint.export_dtype=float32", "logging.tensorboard=false",
)  # fmt: skip
HOSTS = 4


def start(folder: Path, hosts: int, devices: int, *words: str) -> list[subprocess.Popen[str]]:
    """One process for each host, found as on a simulated slice."""
    port = free_port()
    processes = []
    for rank in range(hosts):
        found = {
            "PODWAY_NUM_HOSTS": str(hosts),
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "OMPI_MCA_orte_hnp_uri": f"1.0;tcp://127.0.0.1:{port}",
            "OMPI_COMM_WORLD_SIZE": str(hosts),
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        }
        command = [sys.executable, "-m", "podway.train", *words, f"output={folder}"]
        pipe = subprocess.PIPE
        env = environment(devices, **found)
        processes.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    return processes


def ends(processes: list[subprocess.Popen[str]]) -> list[subprocess.CompletedProcess[str]]:
    """Wait for all of them; none is left behind."""
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=600)
            ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return ended


@pytest.mark.long
@pytest.mark.timeout(900)  # half a minute of two cores; much more where others use them too
def test_four_hosts_train_as_one(tmp_path: Path) -> None:
    alone = train(*WORDS, f"output={tmp_path / 'one'}")
    assert alone.returncode == 0, alone.stderr[-2000:]
    losses = [row["loss"] for row in journal(tmp_path / "one")]
    # Pairs of hosts hold the same rows here, so the feed must bring both the same ones.
    ended = ends(start(tmp_path / "four", HOSTS, 4, *WORDS, "mesh.shape=fsdp=2,context=2,tensor=4"))
    assert [one.returncode for one in ended] == [0] * HOSTS, ended[0].stderr[-2000:]
    assert [row["loss"] for row in journal(tmp_path / "four")] == pytest.approx(losses, rel=2e-5)
    for line in ("***** train metrics *****", "completed step: 0", "exported to"):
        assert sum(line in one.stdout for one in ended) == 1  # one host speaks for all
    assert not any("[Gloo]" in one.stdout or "peer ranks" in one.stdout for one in ended)
    # One host writes the model, of pieces that lie on all of them.
    mine, theirs = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("four", "one"))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        np.testing.assert_allclose(tensor, theirs[name], atol=1e-4, err_msg=name)
    assert (tmp_path / "four" / "model" / "config.json").read_text() == (tmp_path / "one/model/config.json").read_text()


@pytest.mark.timeout(900)
def test_the_others_name_the_rank_that_was_lost(tmp_path: Path) -> None:
    words = (*EXACT, "batch.sequences=3", "batch.length=16", "schedule.steps=100000", "logging.tensorboard=false")
    processes = start(tmp_path / "out", 3, 1, *words, "checkpoint.save=false")
    try:
        metrics = tmp_path / "out" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, 300, "the first steps")
        processes[1].kill()
    finally:
        ended = ends(processes)
    assert ended[1].returncode == -9
    for survivor in (ended[0], ended[2]):
        assert survivor.returncode == 1
        assert "Error: rank 1 of 3 was lost" in survivor.stderr
        assert "Traceback" not in survivor.stderr and "*** Check failure" not in survivor.stderr
