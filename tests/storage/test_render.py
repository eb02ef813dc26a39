"""What hosts are told to run for a bucket, as it is sent; and that bash reads it."""

import os
import subprocess
from pathlib import Path

import pytest

from podway.errors import UserError
from podway.storage.render import HostMount, flushed, path, script
from podway.task.task import Bucket

GOLDEN = Path(__file__).parent.parent / "golden" / "storage"
CASES = {
    "mount": HostMount(source=Bucket(uri="gs://data"), target="/data"),
    "mount-prefix-read-only": HostMount(
        source=Bucket(
            uri="gs://data/train set/v1", read_only=True, options={"mount_options": "--max-conns-per-host 64"}
        ),
        target="~/my data",
    ),
    "mount-cached": HostMount(source=Bucket(uri="gs://ckpt/run1", mode="MOUNT_CACHED"), target="~/ckpt"),
    "mount-cached-tuned": HostMount(
        source=Bucket(
            uri="gs://ckpt",
            mode="MOUNT_CACHED",
            read_only=True,
            options={"vfs_cache_max_size": "50G", "transfers": "32", "buffer_size": "64M"},
        ),
        target="ckpt",
    ),
    "mount-cached-emulator": HostMount(
        source=Bucket(uri="gs://ckpt", mode="MOUNT_CACHED"), target="~/ckpt", endpoint="http://10.213.0.1:4443"
    ),
    "copy": HostMount(source=Bucket(uri="gs://data/it's here", mode="COPY"), target="~/data"),
}


@pytest.mark.parametrize("name", [*CASES, "flush"])
def test_the_script_is_the_one_that_was_read_and_approved(name: str) -> None:
    text = flushed(CASES["mount-cached"], 900) if name == "flush" else script(CASES[name])
    golden = GOLDEN / f"{name}.sh"
    if os.environ.get("PODWAY_UPDATE_GOLDEN"):
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_the_same_mount_is_one_job_and_another_is_another() -> None:
    again = HostMount(source=Bucket(uri="gs://data"), target="/data")
    assert again.key == CASES["mount"].key
    assert len({mount.key for mount in CASES.values()}) == len(CASES)


@pytest.mark.parametrize(
    ("target", "there"),
    [
        ("/data/a b", "/data/a b"),
        ("~/it's", "/home/me/it's"),
        ("below/$(x)", "/home/me/sky_workdir/below/$(x)"),
        ("~/-rf", "/home/me/-rf"),
    ],
)
def test_a_target_means_the_same_to_bash(target: str, there: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"printf %s {path(target)}"],
        env={"HOME": "/home/me"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == there


def flush(home: Path, seconds: int = 5) -> subprocess.CompletedProcess[str]:
    text = flushed(CASES["mount-cached"], seconds)
    env = {"HOME": str(home), "PATH": os.environ["PATH"]}
    return subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True)


def test_a_flush_waits_for_what_is_dirty_and_names_it(tmp_path: Path) -> None:
    assert flush(tmp_path).returncode == 0  # nothing was ever written
    meta = tmp_path / ".podway" / "mounts" / CASES["mount-cached"].id / "cache" / "vfsMeta" / "gcs" / "ckpt"
    meta.mkdir(parents=True)
    (meta / "step-1").write_text('{\n\t"Size": 3,\n\t"Dirty": false\n}\n')
    assert flush(tmp_path).returncode == 0
    (meta / "step 2").write_text('{\n\t"Size": 3,\n\t"Dirty": true\n}\n')
    late = flush(tmp_path, seconds=1)
    assert late.returncode == 1 and late.stdout.strip() == "not yet written: gcs/ckpt/step 2"
    (meta / "step 2").write_text("")  # its record is just being written
    assert flush(tmp_path, seconds=1).returncode == 1


def test_options_that_make_no_words_are_refused() -> None:
    mount = HostMount(source=Bucket(uri="gs://data", options={"mount_options": "--label 'open"}), target="/data")
    with pytest.raises(UserError, match=r"mount_options of /data: .*No closing quotation"):
        script(mount)
