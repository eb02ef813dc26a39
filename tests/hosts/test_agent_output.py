"""The output file and its index of times: any pieces in, any range out."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile

from hypothesis import given
from hypothesis import strategies as st

from podway.hosts.agent import output

pieces = st.lists(st.binary(min_size=1, max_size=20), max_size=20)


@given(pieces, st.integers(0, 450), st.integers(0, 450), st.booleans(), st.integers(0, 15))
def test_any_range_comes_back_with_its_times(pieces, offset, limit, ended, cut):
    with tempfile.TemporaryDirectory() as folder:
        writer = output.OutputWriter(folder)
        for piece in pieces:
            writer.append(piece)
        whole = b"".join(pieces)
        os.truncate(f"{folder}/output.idx", max(0, os.path.getsize(f"{folder}/output.idx") - cut))  # noqa: PTH202
        indexed = whole if cut == 0 else b"".join(pieces[:-1])
        visible = whole if ended else indexed
        found = output.read(folder, offset, limit, ended)
        assert found.data == visible[offset : offset + limit]
        assert found.size == output.size(folder, ended) == len(visible)
        if found.data:
            ends = [end for end, _ in found.times]
            assert ends == sorted(set(ends)) and ends[0] > offset and ends[-1] == offset + len(found.data)
            boundaries = {sum(map(len, pieces[: count + 1])) for count in range(len(pieces))}
            assert set(ends[:-1]) <= boundaries
            assert [when for _, when in found.times] == sorted(when for _, when in found.times)
        else:
            assert found.times == []


def test_a_reply_never_has_more_times_than_fit(tmp_path):
    writer = output.OutputWriter(str(tmp_path))
    for _ in range(output.MAX_TIMES + 10):
        writer.append(b"x")
    found = output.read(str(tmp_path), 5, output.MAX_READ, ended=True)
    assert len(found.times) == output.MAX_TIMES == len(found.data) and found.times[-1][0] == 5 + len(found.data)


def test_nothing_there_reads_as_nothing(tmp_path):
    assert output.read(str(tmp_path / "absent"), 0, 10, ended=False).data == b""


def test_a_full_disk_is_counted_and_got_over(tmp_path):
    code = f"""
import resource, sys
sys.path.insert(0, {str(output.__file__.rsplit("/podway/", 1)[0])!r})
from podway.hosts.agent import output
writer = output.OutputWriter({str(tmp_path)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
writer.append(b"a" * 90)
writer.append(b"b" * 30)
assert (writer.size, writer.lost) == (100, 20), (writer.size, writer.lost)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.append(b"c" * 5)
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    subprocess.run([sys.executable, "-S", "-c", code], check=True, timeout=120)
    found = output.read(str(tmp_path), 0, 1000, ended=False)
    assert found.data == b"a" * 90 + b"b" * 10 + b"c" * 5 and [end for end, _ in found.times] == [90, 100, 105]
