"""The wire: what is sent is what is read; whatever else comes, the agent answers an error and lives."""

from __future__ import annotations

import contextlib
import io
import random
import socket

import pytest
from agent_host import Host
from hypothesis import given
from hypothesis import strategies as st

from podway.hosts.agent import wire
from podway.hosts.agent.relay import connect
from podway.hosts.agent.serve import MAX_CONNECTIONS

numbers = st.integers(-(1 << 62), 1 << 62) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(codec=None), max_size=20)  # lone surrogates too: bytes smuggled in strings
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
fields = st.dictionaries(texts.filter(lambda name: name != "size"), values, max_size=6)


@given(st.lists(st.tuples(fields, st.binary(max_size=50)), max_size=4))
def test_what_is_written_is_what_is_read(messages):
    stream = io.BytesIO()
    for line, body in messages:
        wire.write(stream, line, body)
    stream.seek(0)
    for line, body in messages:
        read = wire.read(stream)
        assert read is not None and read[0] == line and read[1].read() == body
    assert wire.read(stream) is None


@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "replace") + b"\n"))
def test_any_bytes_read_as_a_message_or_a_wire_error(data):
    with contextlib.suppress(wire.WireError):
        message = wire.read(io.BytesIO(data))
        if message is not None:
            message[1].drain()


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"[]\n",
        b"{}",
        b'{"op": NaN}\n',
        b'{"a": ' + b"9" * 5_000_000 + b"}\n",
        b"[" * 1_000_000 + b"\n",
        b'{"size": -1}\n',
        b'{"size": true}\n',
        b'{"size": 1.5}\n',
        b'{"size": 99999999999999999}\n',
        b"\xff\xfe\n",
    ],
    ids=lambda line: repr(line[:20]),
)
def test_lines_that_are_none(line):
    with pytest.raises(wire.WireError):
        wire.read(io.BytesIO(line))


def test_a_line_too_long_is_not_read_to_its_end():
    stream = io.BytesIO(b" " * (wire.MAX_LINE + 10_000_000))
    with pytest.raises(wire.WireError, match="too long"):
        wire.read(stream)
    assert stream.tell() == wire.MAX_LINE + 1


def test_bodies_stream_and_end_where_they_should():
    stream = io.BytesIO()
    wire.write(stream, {"size": 10}, io.BytesIO(b"0123456789"))
    wire.write(stream, {"op": "next"})
    stream.seek(0)
    message = wire.read(stream)
    assert message is not None and message[1].read(4) == b"0123"
    message[1].drain()
    assert message[1].read() == b""
    after = wire.read(stream)
    assert after is not None and after[0] == {"op": "next"}
    with pytest.raises(ConnectionError):
        wire.write(io.BytesIO(), {"size": 10}, io.BytesIO(b"012"))
    with pytest.raises(wire.WireError):
        wire.MessageBody(io.BytesIO(b"012"), 10).read()


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    with Host(tmp_path_factory.mktemp("fuzzed")) as host:
        yield host


def talk(host: Host, data: bytes) -> bytes:
    """Send bytes, end, and hear all that comes back."""
    with connect(str(host.home)) as connection:
        connection.settimeout(20)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                heard += piece
        return heard


def test_hundreds_of_garbage_requests(host):
    dice = random.Random(20)
    operations = [
        "hello",
        "start",
        "status",
        "follow",
        "cancel",
        "jobs",
        "usage",
        "forget",
        "chips",
        "nonsense",
        "",
        None,
        7,
    ]
    names = [
        "job",
        "phase",
        "offset",
        "limit",
        "wait",
        "grace",
        "script",
        "env",
        "cwd",
        "secrets",
        "interpreter",
        "size",
    ]
    junk = [
        None,
        True,
        -1,
        0,
        1 << 70,
        0.1,
        "",
        "../..",
        "a/b",
        "x" * 300,
        "\0",
        "\udc80",
        "\ud800",
        [],
        {},
        [[]],
        {"a": {}},
    ]
    for _ in range(300):
        request = {name: dice.choice(junk) for name in dice.sample(names, dice.randrange(6))}
        line = wire.json.dumps({"op": dice.choice(operations), **request}).encode()
        if dice.random() < 0.3:
            line = bytes(dice.choice([byte, dice.randrange(256)]) for byte in line)
        heard = talk(host, line + dice.choice([b"\n", b"", b"\n\n", b"\nrubbish"]))
        for reply in heard.splitlines():
            answer, size = wire.decode(reply)
            assert answer["ok"] in (True, False) and size == 0
            assert answer.get("code") != "internal", (line, answer)
    assert host.call("hello")["pid"] == host.pid
    assert host.call("jobs")["jobs"] == [] or all(job["state"] != "running" for job in host.call("jobs")["jobs"])


def test_a_bad_line_closes_the_connection_and_a_bad_request_does_not(host):
    heard = talk(host, b"rubbish\n" + wire.encode({"op": "hello"}))
    assert [wire.decode(line)[0]["ok"] for line in heard.splitlines()] == [False]
    unwanted = wire.encode({"op": "what"}, size=5) + b"12345"
    heard = talk(host, unwanted + wire.encode({"op": "hello"}))
    assert [wire.decode(line)[0]["ok"] for line in heard.splitlines()] == [False, True]


def test_callers_that_vanish_or_stall_hold_up_nobody(host):
    stalled = []
    try:
        for _ in range(20):
            connection = connect(str(host.home))
            connection.sendall(b'{"op": "hel')
            stalled.append(connection)
        gone = connect(str(host.home))
        gone.sendall(wire.encode({"op": "follow", "job": "x", "phase": "y", "offset": 0, "wait": 1}))
        gone.close()
        assert host.call("hello")["pid"] == host.pid
    finally:
        for connection in stalled:
            connection.close()


def test_more_connections_than_it_takes_are_closed_and_the_rest_served(host):
    crowd = [connect(str(host.home)) for _ in range(MAX_CONNECTIONS + 5)]
    try:
        crowd[-1].settimeout(10)
        assert crowd[-1].recv(1) == b""
        crowd[0].sendall(wire.encode({"op": "hello"}))
        crowd[0].settimeout(10)
        assert b'"ok":true' in crowd[0].recv(65536)
    finally:
        for connection in crowd:
            connection.close()
