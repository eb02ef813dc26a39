"""Pulling an image: with the credentials in a file that only memory holds, progress in the log, and one sentence when it fails."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import tempfile
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .wire import Fields

TELL_S = 10.0  # between lines about a pull under way
_AUTH = "podway-auth-"
_DOCKER_HUB = "https://index.docker.io/v1/"
_METADATA = "metadata.google.internal"
_TOKEN = "/computeMetadata/v1/instance/service-accounts/default/token"
_LONGEST = 300
_KEPT = 64 << 10  # of what a pull prints: a registry may answer anything
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_LAYERS = re.compile(r": (Pulling fs layer|Pull complete|Already exists)$")
# What the tools say, in order of what is the cause of what; the first match is told.
_CAUSES = (
    (r"no space left|disk quota exceeded", "the disk of this host is full; free some space, or ask for a larger disk_size"),
    (
        r"pull access denied|requested access to the resource is denied",
        "it is not found, or needs credentials: check the name, and registry_auth or SKYPILOT_DOCKER_USERNAME, _PASSWORD, _SERVER",
    ),
    (
        r"unauthorized|authentication required|invalid username|denied|forbidden|no basic auth|status: 40[13]",
        "the registry refuses these credentials: check registry_auth, or SKYPILOT_DOCKER_USERNAME, _PASSWORD, _SERVER",
    ),
    (
        r"manifest unknown|name unknown|not found|not known to registry|status: 404|does not exist",
        "it is not found: check its name and tag",
    ),
    (r"no matching manifest|no image found in .*index|choosing image instance", "it is not built for this host's machine type"),
    (r"server gave http response to https", "the registry speaks http: list it as insecure in the host's Docker or podman"),
    (r"x509|certificate|tls", "the registry's certificate is not trusted by this host"),
    (
        r"no such host|name resolution|connection refused|unreachable|timeout|timed out|connection reset|eof|deadline",
        "the registry cannot be reached from this host",
    ),
)  # fmt: skip


def pull(runtime: str, image: str, registry: Fields | None) -> str:
    """Pull the image, telling how far it is; why it cannot be, or ''."""
    print(f"podway: pulling {image}", flush=True)
    began = time.monotonic()
    with _credentials(image, registry) as folder:
        command = [runtime, "pull", image]
        if folder and runtime == "docker":
            command = [runtime, "--config", folder, "pull", image]
        elif folder:
            command = [runtime, "pull", "--authfile", os.path.join(folder, "config.json"), image]
        code, said = _watch(command, image)
    if code == 0:
        print(f"podway: pulled {image} in {time.monotonic() - began:.0f} s", flush=True)
        return ""
    return f"the image {image} cannot be pulled: {cause(said)}"


def cause(said: str) -> str:
    """Why a pull failed, and the tool's own last words."""
    last = last_line(said)
    for pattern, told in _CAUSES:
        if re.search(pattern, said, re.I):
            return f"{told} ({last})" if last else told
    return last or "no reason was given"


def last_line(said: str) -> str:
    """The last line of what a tool printed, fit to be shown."""
    lines = [text for text in (_CONTROL.sub(" ", line).strip() for line in said.splitlines()) if text]
    last = re.sub(r"^(Error( response from daemon)?: )+", "", lines[-1]) if lines else ""
    return last if len(last) <= _LONGEST else last[: _LONGEST - 1] + "…"


def registry_of(image: str) -> str:
    """The registry an image names; '' for Docker Hub's short names."""
    first, slash, _ = image.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else ""


def _watch(command: list[str], image: str) -> tuple[int, str]:
    """Run a pull, count its layers, and keep the end of what it says."""
    said = b""
    layers, there = 0, 0
    pulling = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert pulling.stdout is not None
    began = told = time.monotonic()
    with selectors.DefaultSelector() as ready, pulling.stdout as output:
        ready.register(output, selectors.EVENT_READ)
        partial = b""
        while True:
            if ready.select(1.0):
                data = os.read(output.fileno(), 65536)
                if not data:
                    break
                said = (said + data)[-_KEPT:]
                *lines, partial = (partial + data)[-_KEPT:].split(b"\n")
                for line in lines:
                    found = _LAYERS.search(line.decode("utf-8", "replace"))
                    layers += bool(found and found.group(1) != "Pull complete")
                    there += bool(found and found.group(1) != "Pulling fs layer")
            now = time.monotonic()
            if now - told >= TELL_S:
                told = now
                count = f", {there} of {layers} layers" if layers else ""
                print(f"podway: pulling {image}: {now - began:.0f} s{count}", flush=True)
    return pulling.wait(), said.decode("utf-8", "replace")


@contextlib.contextmanager
def _credentials(image: str, registry: Fields | None) -> Iterator[str]:
    """A directory with the credentials as Docker and podman read them, in memory where there is such a place; '' without any."""
    registry = registry or _google(image)
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    _remove_stale(place)
    if not registry:
        yield ""
        return
    pair = f"{registry['username']}:{registry['password']}".encode()
    server = registry.get("server") or registry_of(image) or _DOCKER_HUB
    folder = tempfile.mkdtemp(prefix=f"{_AUTH}{os.getpid()}-", dir=place)
    # A cancel must not leave the file behind.
    former = signal.signal(signal.SIGTERM, _stop)
    try:
        with open(
            os.open(os.path.join(folder, "config.json"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
        ) as file:
            json.dump({"auths": {server: {"auth": base64.b64encode(pair).decode()}}}, file)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, former)


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _remove_stale(place: str) -> None:
    """What a pull left that was killed."""
    for name in os.listdir(place):
        owner = name[len(_AUTH) :].partition("-")[0]
        if name.startswith(_AUTH) and owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            shutil.rmtree(os.path.join(place, name), ignore_errors=True)


def _google(image: str) -> Fields | None:
    """On a Google Cloud machine, its own token for Google's registries."""
    registry = registry_of(image)
    if not registry.endswith((".pkg.dev", "gcr.io")):
        return None
    try:
        connection = http.client.HTTPConnection(_METADATA, timeout=2.0)
        connection.request("GET", _TOKEN, headers={"Metadata-Flavor": "Google"})
        reply = connection.getresponse()
        token = json.loads(reply.read(1 << 16))["access_token"] if reply.status == 200 else None
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return None
    return {"username": "oauth2accesstoken", "password": str(token)} if token else None
