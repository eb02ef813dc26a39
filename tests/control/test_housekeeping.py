"""Housekeeping removes what nobody needs and nothing else."""

import os
from pathlib import Path

import msgspec

from podway.control.archive import Archive
from podway.control.housekeeping import CONTENTS_KEPT_S, LOGS_KEPT_S, tidy
from podway.control.records import ClusterState, JobState
from podway.control.schedule_store import ScheduleRecord
from podway.control.store import open_store, sqlite_url
from podway.hosts.blobs import BlobStore
from podway.hosts.manifest import FileTree
from podway.hosts.tree import scan
from podway.launch_options import LaunchRequest
from podway.task.task import Task
from tests.control.samples import cluster, job


def test_contents_of_open_jobs_and_recent_logs_stay(tmp_path: Path) -> None:
    store, blobs = open_store(sqlite_url(tmp_path / "p.db")), BlobStore(tmp_path / "blobs")
    archive = Archive(tmp_path / "logs")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "f").write_text("needed")
    found = scan(tmp_path / "work")
    blobs.put_pack(found.pack(found.manifest.sizes))
    manifest, stray = blobs.put(found.manifest.encode()), blobs.put(b"nobody needs this")
    for path in (tmp_path / "blobs").iterdir():
        os.utime(path, (1.0, 1.0))
    store.add_cluster(cluster())
    made = store.add_job(job(files=(FileTree(target="~/w", manifest=manifest),)))
    (archive.root / "c0ffee" / "1").mkdir(parents=True)
    (archive.root / "unknown").mkdir()
    task = Task(schedule=("0 0 * * *",))
    later = blobs.put(b"for a run that starts by the clock")
    os.utime(tmp_path / "blobs" / later, (1.0, 1.0))
    kept = LaunchRequest(task=task, files=(FileTree(target="~/w", manifest=later),))
    store.schedules.put(ScheduleRecord(name="s", user="ann", request=kept, created=1.0, next_at=1e10))
    now = 2 * CONTENTS_KEPT_S
    assert tidy(store, blobs, archive, now) == (1, 1)
    assert blobs.missing([manifest, stray, later, *found.manifest.sizes]) == [stray]
    store.schedules.delete("s")
    assert (archive.root / "c0ffee").exists() and not (archive.root / "unknown").exists()

    store.save_job(msgspec.structs.replace(made, state=JobState.SUCCEEDED))
    gone = store.find("demo")
    assert gone
    store.save_cluster(msgspec.structs.replace(gone, state=ClusterState.GONE, ended=1000.0))
    for path in (tmp_path / "blobs").iterdir():
        os.utime(path, (1.0, 1.0))
    assert tidy(store, blobs, archive, 1000.0 + LOGS_KEPT_S + 1) == (3, 1)
    store.engine.dispose()
