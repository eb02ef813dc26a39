"""Buckets on simulated hosts: copied by way of the server, each object once; what cannot be had there is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from podway.errors import UserError
from podway.sandbox.running import Running, running_sandbox
from podway.task.task import Bucket, FileMount
from tests.e2e.harness import Podway, task, without_prefix
from tests.sandbox.clients import credentials_of


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Running]:
    with running_sandbox(tmp_path / "sandbox", hosts="none") as running:
        yield running


def client_of(storage: Running):  # type: ignore[no-untyped-def]
    """Google's own, on the sandbox."""
    from google.cloud import storage as gcs

    options = {"api_endpoint": storage.rest}
    return gcs.Client(project=storage.project, credentials=credentials_of(storage), client_options=options)


def put(storage: Running, bucket: str, name: str, data: bytes) -> None:
    """An object, in a bucket that is made if it is not there."""
    client = client_of(storage)
    there = client.lookup_bucket(bucket) or client.create_bucket(bucket)
    there.blob(name).upload_from_string(data)


def objects(storage: Running, bucket: str) -> dict[str, bytes]:
    """What a bucket holds."""
    return {one.name: one.download_as_bytes() for one in client_of(storage).list_blobs(bucket)}


def copying(*mounts: tuple[str, str], run: str) -> object:
    places = tuple(FileMount(target=target, source=Bucket(uri=uri, mode="COPY")) for target, uri in mounts)
    return task(run, file_mounts=places)


def test_a_bucket_and_an_object_are_copied_to_simulated_hosts(pod: Podway, storage: Running) -> None:
    put(storage, "numbers", "set/a/one.txt", b"one")
    put(storage, "numbers", "set/two.txt", b"two")
    pod.start(STORAGE_EMULATOR_HOST=storage.storage, GOOGLE_CLOUD_PROJECT=storage.project)
    show = "echo $PODWAY_RANK $(cat ~/data/a/one.txt ~/data/two.txt) $(ls ~/data | wc -l) $(cat alone)"
    both = copying(("~/data", "gs://numbers/set"), ("alone", "gs://numbers/set/two.txt"), run=show)
    pod.client.launch(both, cluster="c")  # type: ignore[arg-type]
    assert pod.finished("c", 1) == "SUCCEEDED"
    assert set(without_prefix(pod.log_text("c", 1))) == {"0 onetwo 2 two", "1 onetwo 2 two"}
    put(storage, "numbers", "set/two.txt", b"deux")
    pod.client.launch(both, cluster="c")  # type: ignore[arg-type]
    assert pod.finished("c", 2) == "SUCCEEDED"
    assert set(without_prefix(pod.log_text("c", 2))) == {"0 onedeux 2 deux", "1 onedeux 2 deux"}
    absent = copying(("~/data", "gs://nowhere-at-all"), run="true")
    pod.client.launch(absent, cluster="c")  # type: ignore[arg-type]
    assert pod.finished("c", 3) == "FAILED_DRIVER"
    assert "gs://nowhere-at-all does not exist" in (pod.client.job("c", 3).reason or "")
    pod.down("c")


def test_mounts_need_hosts_of_their_own(pod: Podway) -> None:
    pod.start()
    mount = FileMount(target="~/data", source=Bucket(uri="gs://numbers"))
    with pytest.raises(UserError, match="cannot be mounted here") as caught:
        pod.client.launch(task("true", file_mounts=(mount,)), cluster="c")
    assert "mode: COPY" in caught.value.hint
