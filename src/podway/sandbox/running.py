"""A sandbox for as long as a block lasts, or one that is there already: how to talk to it, and what to tell its clients.

with running_sandbox(tmp_path, hosts="none", speed=600) as sandbox:
    sandbox.command("POST", "stock", {"chips": 0})
    subprocess.run(["gcloud", ...], env={**os.environ, **sandbox.environment(tmp_path)})
"""

import contextlib
import http.client
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from podway.decoding import from_json
from podway.sandbox.jsons import JsonObject

END_S = 30.0
TOKEN_FILE = "token"
CREDENTIALS_FILE = "credentials.json"


class SandboxError(Exception):
    """A command was refused."""


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox, by what it said of itself."""

    state: str  # the directory of its files, which is its owner's alone
    token: str
    rest: str
    grpc: str
    project: str
    zone: str
    machines: str
    login: str  # the only user that its hosts let in; nothing where they let in any
    note: str  # why the machines are not of the best kind; nothing when they are
    speed: float
    pid: int

    def command(self, method: str, name: str = "", body: JsonObject | None = None, timeout: float = 60.0) -> Any:
        """One of the sandbox's own commands (see commands.py); the answer's JSON."""
        connection = http.client.HTTPConnection(self.rest.removeprefix("http://"), timeout=timeout)
        try:
            text = None if body is None else msgspec.json.encode(body)
            headers = {"Content-Type": "application/json", **self.headers()}
            connection.request(method, f"/sandbox/{name}".rstrip("/"), text, headers)
            response = connection.getresponse()
            answer = msgspec.json.decode(response.read())
        finally:
            connection.close()
        if response.status >= 400:
            raise SandboxError(answer["error"]["message"])
        return answer

    def headers(self) -> dict[str, str]:
        """What a request has to show."""
        return {"Authorization": f"Bearer {self.token}"}

    @property
    def storage(self) -> str:
        """The address for storage clients that are told of an emulator: they show what stands in it, and nothing else."""
        return f"http://sandbox:{self.token}@{self.rest.removeprefix('http://')}"

    def environment(self, place: Path) -> dict[str, str]:
        """What makes gcloud, Google's storage client and Podway use it; gcloud keeps its own files under `place`."""
        return {
            "CLOUDSDK_CONFIG": str(place / "gcloud"),
            "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(Path(self.state) / TOKEN_FILE),
            "GOOGLE_APPLICATION_CREDENTIALS": str(Path(self.state) / CREDENTIALS_FILE),
            "GOOGLE_CLOUD_PROJECT": self.project,
            "CLOUDSDK_CORE_PROJECT": self.project,
            "CLOUDSDK_COMPUTE_ZONE": self.zone,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{self.rest}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{self.rest}/compute/v1/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDRESOURCEMANAGER": f"{self.rest}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_SERVICEUSAGE": f"{self.rest}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{self.rest}/storage/v1/",
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
            "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
            "CLOUDSDK_SURVEY_DISABLE_PROMPTS": "1",
            "STORAGE_EMULATOR_HOST": self.storage,
            "PODWAY_GCP_ENDPOINT": self.rest,
            "PODWAY_GCP_GRPC": self.grpc,
            "PODWAY_GCP_PROJECT": self.project,
            **({"PODWAY_GCP_SSH_USER": self.login} if self.login else {}),
        }


def environment_names() -> list[str]:
    """All that `environment` may set."""
    words = dict.fromkeys(("state", "token", "rest", "grpc", "project", "zone", "machines", "login", "note"), "-")
    return [*Running(**words, speed=1.0, pid=0).environment(Path())]


def find_sandbox(state: Path) -> Running | None:
    """The one that keeps its state there, if it runs."""
    try:
        found = from_json((state / "sandbox.json").read_bytes(), Running)
        os.kill(found.pid, 0)
    except (OSError, msgspec.DecodeError):
        return None
    return found


def start_sandbox(state: Path, *options: str) -> tuple[Running, subprocess.Popen[bytes]]:
    """Start one in a session of its own; it is ready when this returns."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(state / "sandbox.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "podway.sandbox", "--state", str(state), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    process.stdout.close()
    if not line:
        process.wait(END_S)
        said = (state / "sandbox.log").read_text(errors="replace").strip().splitlines()
        raise SandboxError(said[-1] if said else "the sandbox did not start")
    return from_json(line, Running), process


@contextlib.contextmanager
def running_sandbox(
    state: Path, *, hosts: str = "netns", speed: float = 600.0, options: tuple[str, ...] = ()
) -> Iterator[Running]:
    """A sandbox of our own; nothing of it is left afterwards but its ledger."""
    running, process = start_sandbox(state, "--hosts", hosts, "--speed", str(speed), *options)
    try:
        yield running
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
