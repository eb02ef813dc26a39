"""Four processes of four devices train the losses and the model of one with one device, through `python -m podway.train`."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import free_port
from tests.train.running import EXACT, environment, journal, train

WORDS = (
    *EXACT, "batch.sequences=16", "batch.length=32", "schedule.steps=3", "schedule.kind=constant",
    "checkpoint.save=false", "checkpoint.export=true", "checkpoint.export_dtype=float32", "logging.tensorboard=false",
)  # fmt: skip
HOSTS = 4


def gang(folder: Path, *words: str) -> list[subprocess.CompletedProcess[str]]:
    """One process for each host, found as on a simulated slice."""
    port = free_port()
    processes = []
    for rank in range(HOSTS):
        found = {
            "PODWAY_NUM_HOSTS": str(HOSTS),
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "OMPI_MCA_orte_hnp_uri": f"1.0;tcp://127.0.0.1:{port}",
            "OMPI_COMM_WORLD_SIZE": str(HOSTS),
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        }
        command = [sys.executable, "-m", "podway.train", *words, f"output={folder}"]
        processes.append(
            subprocess.Popen(
                command, env=environment(4, **found), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
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


@pytest.mark.timeout(900)  # half a minute of two cores; much more where others use them too
def test_four_hosts_train_as_one(tmp_path: Path) -> None:
    alone = train(*WORDS, f"output={tmp_path / 'one'}")
    assert alone.returncode == 0, alone.stderr[-2000:]
    losses = [row["loss"] for row in journal(tmp_path / "one")]
    # Pairs of hosts hold the same rows here, so the feed must bring both the same ones.
    ended = gang(tmp_path / "four", *WORDS, "mesh.shape=fsdp=2,context=2,tensor=4")
    assert [one.returncode for one in ended] == [0] * HOSTS, ended[0].stderr[-2000:]
    assert [row["loss"] for row in journal(tmp_path / "four")] == pytest.approx(losses, rel=2e-5)
    assert all("***** train metrics *****" in one.stdout for one in ended)
    assert sum("completed step: 0" in one.stdout for one in ended) == 1  # one host tells the steps
    # One host writes the model, of pieces that lie on all of them.
    mine, theirs = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("four", "one"))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        np.testing.assert_allclose(tensor, theirs[name], atol=1e-4, err_msg=name)
    assert (tmp_path / "four" / "model" / "config.json").read_text() == (tmp_path / "one/model/config.json").read_text()
