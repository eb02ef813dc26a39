"""The socket a gateway listens on, and giving it to the next process without losing a connection.

On SIGHUP a gateway starts its own command again (a newer Podway, perhaps) and lets it inherit the listening socket; once the new
process says that it is ready, the old one accepts nothing more and ends with its last request. Connections wait in the queue of the
one socket meanwhile, so none is refused. A socket from systemd (LISTEN_FDS) serves the same way across `systemctl restart`.
"""

import asyncio
import os
import socket
import subprocess
import sys

from podway.errors import UserError

INHERITED = "PODWAY_GATEWAY_FDS"  # 'socket,pipe' and perhaps ',lock'
SYSTEMD_FIRST_FD = 3  # sd_listen_fds(3)
READY_S = 60.0
BACKLOG = 2048


class Inherited:
    """What the process before left to this one; nothing, usually."""

    def __init__(self) -> None:
        numbers = [int(number) for number in os.environ.pop(INHERITED, "").split(",") if number.isdigit()]
        self.from_systemd = not numbers and "LISTEN_FDS" in os.environ
        self.listener = socket.socket(fileno=numbers[0]) if numbers else _from_systemd()
        self._pipe = numbers[1] if len(numbers) > 1 else None
        self.lock = numbers[2] if len(numbers) > 2 else None
        for number in numbers:
            os.set_inheritable(number, False)

    def tell_ready(self) -> None:
        """Let the process before go."""
        if self._pipe is not None:
            os.write(self._pipe, b"1")
            os.close(self._pipe)
            self._pipe = None


def _from_systemd() -> socket.socket | None:
    count, pid = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")  # for this process alone
    if pid != str(os.getpid()) or not count.isdecimal() or int(count) == 0:
        return None
    if int(count) > 1:
        raise UserError(f"systemd passed {count} sockets", "name one ListenStream in the socket unit")
    try:
        found = socket.socket(fileno=SYSTEMD_FIRST_FD)
        listens = bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        listens = False
    if not listens or found.type is not socket.SOCK_STREAM:
        raise UserError(
            "what systemd passed is not a listening TCP socket", "use ListenStream and Accept=no in its unit"
        )
    found.set_inheritable(False)
    return found


def listening_socket(host: str, port: int) -> socket.socket:
    """A new one."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    made = socket.socket(family, kind)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


async def start_successor(listener: socket.socket, lock: int | None) -> bool:
    """Start this command again with the same socket; True once it is ready to accept."""
    ready, tell = os.pipe()
    kept = [listener.fileno(), tell, *([lock] if lock is not None else [])]
    environment = {**os.environ, INHERITED: ",".join(map(str, kept))}
    try:
        subprocess.Popen(sys.orig_argv, pass_fds=kept, env=environment)
    except OSError:
        os.close(ready)
        return False
    finally:
        os.close(tell)
    loop = asyncio.get_running_loop()
    said: asyncio.Future[bytes] = loop.create_future()
    loop.add_reader(ready, lambda: None if said.done() else said.set_result(os.read(ready, 1)))
    try:
        async with asyncio.timeout(READY_S):
            return await said == b"1"  # nothing: it ended
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(ready)
        os.close(ready)
