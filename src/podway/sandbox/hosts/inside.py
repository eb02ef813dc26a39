"""Servers that machines of their own see on their own addresses, though it is this process that answers.

A socket belongs to the network it was made in. So a thread enters a machine's network, makes a listening socket and ends; the
socket stays, and the event loop serves it like any other. Each machine finds the sandbox at the same 127.0.0.1:PORT as people
outside do, and its metadata server at 169.254.169.254:80. No process, no route and no forwarding is needed for it.
"""

import asyncio
import ctypes
import os
import socket
import threading
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

_CLONE_NEWNET = 0x40000000  # linux/sched.h


def listen_inside(namespace: str, addresses: list[tuple[str, int]]) -> list[socket.socket]:
    """Listening sockets in a network namespace that has a name."""
    made: list[socket.socket] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with open(Path("/run/netns") / namespace) as handle:
                if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            made.extend(socket.create_server(address, backlog=128) for address in addresses)
        except BaseException as error:
            failed.append(error)

    # A thread of its own, which ends: one of a pool would stay in there.
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        for one in made:
            one.close()
        raise failed[0]
    return made


class Listeners:
    """What this process serves besides its own address; each group ends on its own."""

    def __init__(self, protocol: type[H11Protocol]) -> None:
        self._protocol = protocol
        self._state = ServerState()
        self._servers: dict[int, list[asyncio.Server]] = {}

    async def serve(self, group: int, listener: socket.socket, app: ASGIApp) -> None:
        """Serve an application on a socket until the group is closed."""
        config = uvicorn.Config(app, http=self._protocol, lifespan="off", log_level="warning", access_log=False)
        config.load()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: self._protocol(config=config, server_state=self._state, app_state={}, _loop=loop), sock=listener
        )
        self._servers.setdefault(group, []).append(server)

    def has(self, group: int) -> bool:
        """Whether a group is served."""
        return group in self._servers

    def close(self, group: int) -> None:
        """Stop listening for a group."""
        for server in self._servers.pop(group, []):
            server.close()

    def close_all(self) -> None:
        """Stop all, and close what is still connected."""
        for group in list(self._servers):
            self.close(group)
        for connection in list(self._state.connections):
            connection.shutdown()
