"""Which buckets a task has, what goes into them first, and what is said when a host cannot have one."""

from podway.server.uploading import sources
from podway.storage.attach import bucket_mounts, told
from podway.storage.render import MOUNTED
from podway.task.task import Bucket, FileMount, LocalDir, Task

MOUNTS = (
    FileMount(target="~/code", source=LocalDir(path="/home/me/code")),
    FileMount(target="~/one", source=Bucket(uri="gs://one", create=True, upload=("/home/me/a",))),
    FileMount(target="~/two", source=Bucket(uri="gs://two/x", create=True, upload=("/home/me/a", "/home/me/b.txt"))),
    FileMount(target="~/three", source=Bucket(uri="gs://three", mode="COPY")),
)


def test_buckets_are_told_from_directories() -> None:
    found = bucket_mounts(MOUNTS, "http://127.0.0.1:1")
    assert [(mount.target, str(mount.address)) for mount in found] == [
        ("~/one", "gs://one"),
        ("~/two", "gs://two/x"),
        ("~/three", "gs://three"),
    ]
    assert {mount.endpoint for mount in found} == {"http://127.0.0.1:1"}


def test_one_source_is_the_buckets_content_and_several_keep_their_names() -> None:
    found = [(one.path, one.target) for one in sources(Task(file_mounts=MOUNTS), mounts=True) if one.kind == "bucket"]
    assert found == [
        ("/home/me/a", "gs://one"),
        ("/home/me/a", "gs://two/x/a"),
        ("/home/me/b.txt", "gs://two/x/b.txt"),
    ]
    assert sources(Task(file_mounts=MOUNTS), mounts=False) == []


def test_a_script_that_failed_is_told_with_its_tools_last_word() -> None:
    output = f"{MOUNTED}\nold\nFatal error: fusermount: exit status 1\npodway: the mount of /x ended with code 1\n"
    assert told(output) == "the mount of /x ended with code 1 - Fatal error: fusermount: exit status 1"
    assert told("podway: no /dev/fuse\n") == "no /dev/fuse"
    assert told("  \n") == "it ended without a word"
