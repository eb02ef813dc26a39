"""Ports for processes that tests and benchmarks start."""

import contextlib
import secrets
import socket


def free_port() -> int:
    """A port of 127.0.0.1 for a process that begins to listen later. It lies below those that the kernel gives to connections, so
    none of them takes it in the meantime."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
