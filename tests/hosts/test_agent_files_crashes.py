"""An apply that dies, or finds the disk full, at each of its steps: nothing half-done is seen, and the next one ends it."""

import contextlib
import errno
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import crasher
import pytest
from file_trees import MEMORY, Host, Tree, build, expected, one_file, scanned, snapshot

from podway.hosts.agent.phase import RequestRefused
from podway.hosts.tree import Scan

OLD: Tree = {
    b"keep": ("file", 0o644, b"keep"),
    b"edit": ("file", 0o644, b"before"),
    b"gone": ("file", 0o644, b"gone"),
    b"move": ("file", 0o644, b"moved content"),
    b"dir": ("dir", 0o755),
    b"dir/f": ("file", 0o644, b"in dir"),
    b"swap": ("dir", 0o755),
    b"swap/f": ("file", 0o644, b"in swap"),
    b"link": ("link", b"keep"),
}
NEW: Tree = {
    b"keep": ("file", 0o755, b"keep"),
    b"edit": ("file", 0o644, b"after!"),
    b"moved": ("file", 0o644, b"moved content"),
    b"swap": ("file", 0o600, b"now a file"),
    b"link": ("link", b"edit"),
    b"fresh": ("dir", 0o700),
    b"fresh/1": ("file", 0o644, b"twin"),
    b"fresh/2": ("file", 0o644, b"twin"),
    b"fresh/l": ("link", b"../keep"),
}
THIRD: Tree = {b"keep": ("file", 0o644, b"keep"), b"other": ("file", 0o644, b"moved content")}
JOB: Tree = {b"out": ("file", 0o640, b"a job's"), b"dir/log": ("file", 0o640, b"a job's log")}


Crash = Callable[[Host, Scan, str, int], bool]


@pytest.fixture(scope="module")
def crash() -> Iterator[Crash]:
    """Apply in another process that is gone at its n-th step; whether it came that far."""
    with subprocess.Popen(
        [sys.executable, crasher.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def crash(host: Host, scan: Scan, dest: str, at: int) -> bool:
            assert process.stdin and process.stdout
            fields = {"dest": dest, "manifest_id": scan.manifest.id}
            print(json.dumps([at, str(host.state), fields]), file=process.stdin, flush=True)
            code = int(process.stdout.readline())
            assert code in (0, crasher.GONE)
            return code == crasher.GONE

        yield crash


@pytest.mark.parametrize("disk", ["same", "other"])
@pytest.mark.parametrize("then", ["again", "another"])
def test_killed_at_every_step_and_brought_on(tmp_path: Path, crash: Crash, disk: str, then: str) -> None:
    elsewhere = MEMORY if disk == "same" else str(tmp_path)
    if disk == "other" and (MEMORY is None or Path(MEMORY).stat().st_dev == tmp_path.stat().st_dev):
        pytest.skip("there is no second disk here")
    old, new, third = (scanned(tmp_path / n, tree) for n, tree in (("1", OLD), ("2", NEW), ("3", THIRD)))
    whole = {item[2] for tree in (OLD, NEW, JOB) for item in tree.values() if item[0] == "file"}
    for at in range(1000):
        with tempfile.TemporaryDirectory(dir=MEMORY) as home, tempfile.TemporaryDirectory(dir=elsewhere) as folder:
            host, dest = Host(Path(home)), Path(folder, "w")
            host.bring(old, str(dest))
            build(dest, JOB)
            host.call("files.put", b"".join(new.pack(host.missing(new, str(dest)))))
            crashed = crash(host, new, str(dest), at)
            seen = {item[2] for path, item in snapshot(dest).items() if item[0] == "file" and b".podway." not in path}
            assert seen <= whole
            host.bring(new if then == "again" or not crashed else third, str(dest))
            target = NEW if then == "again" or not crashed else THIRD
            assert snapshot(dest) == expected(OLD, JOB, target), f"after a crash at step {at}"
            if then == "again":
                assert [p.name for p in (host.state / "incoming").iterdir() if not p.name.startswith(".")] == []
        if not crashed:
            break
    assert at > 30


def test_a_crash_before_a_change_of_kind_costs_nobody_a_file(tmp_path: Path, crash: Crash) -> None:
    """Of a directory's crashed apply, nothing may be cleaned up beside the one file that takes its place."""
    folder = scanned(tmp_path / "t", {b"a": ("file", 0o644, b"lookalike"), b"b": ("file", 0o644, b"b")})
    for at in range(100):
        host = Host(tmp_path / f"home{at}")
        (host.home / "a").write_bytes(b"lookalike")
        host.call("files.put", b"".join(folder.pack(host.missing(folder, "~/x"))))
        crashed = crash(host, folder, "~/x", at)
        with contextlib.suppress(RequestRefused):  # what the crash left is in the way: nothing is removed unasked
            host.bring(one_file(tmp_path, b"one"), "~/x")
        assert (host.home / "a").read_bytes() == b"lookalike"
        if not crashed:
            break
    assert at > 5


def test_a_full_disk_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = tempfile.mkdtemp(dir=MEMORY)
    request.addfinalizer(lambda: shutil.rmtree(folder))
    old, new = scanned(tmp_path / "1", OLD), scanned(tmp_path / "2", NEW)
    for at in range(1000):
        home = Path(folder, str(at))
        host, dest = Host(home), home / "w"
        host.bring(old)
        host.call("files.put", b"".join(new.pack(host.missing(new, "~/w"))))
        try:
            faulty = crasher.Faulty(at, full)
            with monkeypatch.context() as patch:
                for module in crasher.MODULES:
                    patch.setattr(module, "os", faulty)
                host.call("files.apply", dest="~/w", manifest_id=new.manifest.id)
        except RequestRefused as error:
            assert "no space left" in str(error).lower() and "\n" not in str(error)
            assert list((host.state / "incoming").iterdir()) == []
        assert all(b".podway." not in path for path in snapshot(dest))
        host.bring(new)
        assert snapshot(dest) == NEW
        if faulty.left >= 0:
            break
    assert at > 30


SMALL_DISK = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from file_trees import Host, scanned, snapshot
from podway.hosts.agent.phase import RequestRefused
root, small = Path(sys.argv[2]), Path(sys.argv[3])
old = {b"f": ("file", 0o644, b"o" * 1000), b"g": ("file", 0o644, b"g")}
new = {b"f": ("file", 0o644, b"n" * 1000), b"big": ("file", 0o644, b"b" * 3_000_000)}
host = Host(root / "home")
host.bring(scanned(root / "old", old), str(small / "w"))
try:
    host.bring(scanned(root / "new", new), str(small / "w"))
except RequestRefused as error:
    print(error)
assert {name: item for name, item in snapshot(small / "w").items() if name == b"f"}[b"f"][2][:1] in b"on"
assert b"big" not in snapshot(small / "w") and set(snapshot(small / "w")) <= {b"f", b"g"}
ok = {b"f": ("file", 0o644, b"n" * 1000)}
host.bring(scanned(root / "ok", ok), str(small / "w"))
assert snapshot(small / "w") == ok
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && shift 0 && exec "$@"', str(small)]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    script = [sys.executable, "-c", SMALL_DISK, str(Path(__file__).parent), str(tmp_path), str(small)]
    done = subprocess.run([*mount, *script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"no space left on the disk of {small}/w\n"
