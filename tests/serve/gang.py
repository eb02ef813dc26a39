"""A server of several processes, found as on a simulated slice: one for each host, each with its own devices."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.conftest import HURRY, free_port


class Gang:
    """The processes, their output so far, and the address of the first once it is ready."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes
        self.output = ["" for _ in processes]
        self.url = ""
        self._readers = [
            threading.Thread(target=self._read, args=(rank,), daemon=True) for rank in range(len(processes))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, rank: int) -> None:
        out = self.processes[rank].stdout
        assert out is not None
        for line in out:
            self.output[rank] += line

    def wait_until_ready(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := re.search(r"ready at (\S+)/v1", self.output[0]):
                self.url = found[1]
                return
            if any(process.poll() is not None for process in self.processes):
                break
            time.sleep(0.1)
        raise AssertionError("\n".join(f"--- rank {n}\n{text}" for n, text in enumerate(self.output)))

    def end(self, seconds: float = 120.0) -> list[int]:
        """SIGTERM to all, as a cancelled job gets it: their exit codes."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        return [process.wait(seconds) for process in self.processes]


@contextmanager
def gang(hosts: int, devices: int, arguments: list[str], seconds: float = 480.0) -> Iterator[Gang]:
    port = free_port()
    processes = []
    for rank in range(hosts):
        found = {
            "PODWAY_NUM_HOSTS": str(hosts), "PODWAY_RANK": str(rank), "PODWAY_HOST_IP": "127.0.0.1", "JAX_PLATFORMS": "cpu",
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {HURRY}",
            "OMPI_MCA_orte_hnp_uri": f"1.0;tcp://127.0.0.1:{port}", "OMPI_COMM_WORLD_SIZE": str(hosts),
            "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        }  # fmt: skip
        command = [sys.executable, "-m", "podway.serve", *arguments, "--port", "0"]
        processes.append(
            subprocess.Popen(
                command, env={**os.environ, **found}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    made = Gang(processes)
    try:
        made.wait_until_ready(seconds)
        yield made
    finally:
        for process in processes:
            process.kill()
            process.wait()
