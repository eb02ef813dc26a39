"""`call`: joins stdin and stdout to the agent's socket, so that any way to run a command on a host carries requests.

Bytes go both ways as they come, so one request or many, in turn, work alike. When stdin ends, the requests end; when the
agent has answered them all it closes, and this ends too. One is started for every connection to a host: it imports nothing else of the
agent.
"""

from __future__ import annotations

import os
import select
import socket
import sys

from . import wire


def connect(home: str) -> socket.socket:
    """A connection to the agent of `home`; OSError if there is none."""
    # A socket's path may have 108 bytes at most (unix(7)); through the directory's descriptor any home will do.
    directory = os.open(os.path.join(home, wire.STATE), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"/proc/self/fd/{directory}/{wire.SOCKET}")
    except OSError:
        connection.close()
        raise
    finally:
        os.close(directory)
    return connection


def relay(home: str) -> int:
    """Run until either side ends; 1 if there is no agent."""
    try:
        agent = connect(home)
    except OSError as error:
        fields = {"ok": False, "error": f"no agent serves {home} ({error})", "code": "no-agent"}
        sys.stdout.buffer.write(wire.encode(fields))
        sys.stdout.buffer.flush()
        return 1
    try:
        _copy_both_ways(agent)
    except OSError:
        return 1  # either side has gone
    return 0


def _copy_both_ways(agent: socket.socket) -> None:
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(agent, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == 0:
                data = os.read(0, wire.CHUNK)
                if data:
                    agent.sendall(data)
                else:
                    poll.unregister(0)
                    agent.shutdown(socket.SHUT_WR)
            else:
                data = agent.recv(wire.CHUNK)
                if not data:
                    return
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
