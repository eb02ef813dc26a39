"""The agent's SFTP server: what OpenSSH's client does with it, and whatever else may come."""

import io
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.hosts.agent.sftp import NO_SUCH_FILE, STATUS, VERSION, SftpServer, string
from podway.hosts.bundle import bundle


def test_what_openssh_does(tmp_path: Path) -> None:
    if shutil.which("sftp") is None:
        pytest.skip("sftp is not installed")
    (tmp_path / "agent.pyz").write_bytes(bundle().data)
    (tmp_path / "home").mkdir()
    blob = os.urandom(700_000)
    (tmp_path / "blob").write_bytes(blob)
    for number in range(250):  # more than one answer holds
        (tmp_path / "many" / f"{number:03}").mkdir(parents=True)
    batch = f"""
pwd
put -p {tmp_path}/blob up
mkdir d
chmod 700 d
rename up d/up
ln -s d/up link
ls -l d
get link {tmp_path}/down
ls -1 {tmp_path}/many
-get nothing {tmp_path}/no
-rmdir d
put {tmp_path}/blob other
rename other d/up
rm link
"""
    served = f"env HOME={tmp_path}/home {sys.executable} -S -E {tmp_path}/agent.pyz sftp"
    done = subprocess.run(
        ["sftp", "-b", "-", "-D", served], input=batch, capture_output=True, text=True, timeout=120, check=True
    )
    assert f"Remote working directory: {tmp_path}/home" in done.stdout
    assert (tmp_path / "down").read_bytes() == blob == (tmp_path / "home" / "d" / "up").read_bytes()
    assert done.stdout.count("/many/") >= 250 and "not found" in done.stderr
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["d"]
    assert (tmp_path / "home" / "d").stat().st_mode & 0o777 == 0o700


def answers(data: bytes) -> bytes:
    out = io.BytesIO()
    SftpServer(io.BytesIO(data), out).run()
    return out.getvalue()


def packet(kind: int, body: bytes) -> bytes:
    return struct.pack("!IB", len(body) + 1, kind) + body


def test_answers_carry_the_number_of_their_request() -> None:
    said = answers(packet(1, b"\0\0\0\3") + packet(17, struct.pack("!I", 77) + string(b"/nonexistent/x")))
    assert said[4] == VERSION
    rest = said[4 + int.from_bytes(said[:4], "big") :]
    assert (rest[4], struct.unpack("!II", rest[5:13])) == (STATUS, (77, NO_SUCH_FILE))


@given(st.lists(st.tuples(st.sampled_from([1, 4, 5, 6, 8, 12, 21, 200, 255]), st.binary(max_size=60)), max_size=8))
def test_no_request_ends_it(requests: list[tuple[int, bytes]]) -> None:
    """As many answers as requests, whatever they hold: none of these kinds names a file."""
    said, count = answers(b"".join(packet(kind, body) for kind, body in requests)), 0
    while said:
        said, count = said[4 + int.from_bytes(said[:4], "big") :], count + 1
    assert count == len(requests)


@given(st.binary(max_size=40))
def test_what_is_no_packet_ends_it_in_peace(data: bytes) -> None:
    answers(b"\0\0\0\0" + data)
    answers(b"\xff\xff\xff\xff" + data)
