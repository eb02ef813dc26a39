"""Several threads may meet a type first at the same moment."""

import subprocess
import sys

import msgspec
import pytest

from podway.decoding import from_json, from_msgpack, from_plain

# 40 types with a part each, which four threads meet together; msgspec.json.decode itself ends this by SIGSEGV.
TOGETHER = """
import sys, threading, msgspec
from podway.decoding import from_json, from_msgpack, from_plain
sys.setswitchinterval(1e-6)
fields = [(f"f{j}", "dict[str, int] | None", None) for j in range(10)]
for i in range(40):
    globals()[f"Part{i}"] = msgspec.defstruct(f"Part{i}", [("a", "dict[str, int]"), ("b", "str")], module=__name__)
kinds = [msgspec.defstruct(f"Kind{i}", [("x", f"Part{i} | None", None), *fields], module=__name__) for i in range(40)]
value = {f"f{j}": {"q": j} for j in range(10)}
ways = [
    lambda kind: from_json(msgspec.json.encode(value), kind),
    lambda kind: from_msgpack(msgspec.msgpack.encode(value), kind),
    lambda kind: from_plain(value, kind),
    lambda kind: from_json(msgspec.json.encode([value]), list[kind])[0],
]
gate, right = threading.Barrier(len(ways)), []
def meet(way):
    for kind in kinds:
        gate.wait()
        right.append(way(kind).f9 == {"q": 9})
threads = [threading.Thread(target=meet, args=(way,)) for way in ways]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert right == [True] * 160
"""


def test_threads_that_meet_a_type_together() -> None:
    done = subprocess.run([sys.executable, "-c", TOGETHER], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_not_of_the_type_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        from_json(b'{"a": "x"}', dict[str, int])
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        from_msgpack(msgspec.msgpack.encode({"a": "x"}), dict[str, int])
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        from_plain({"a": "1"}, dict[str, int])
    assert from_plain({"a": "1"}, dict[str, int], strict=False) == {"a": 1}
