"""A SkyPilot service with `tls`: from its file to a client that verifies the certificate, its renewal, and where its key may not be."""

import contextlib
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from podway.certificates import TlsKeyPair
from podway.errors import UserError
from podway.launch_options import LaunchOptions, LaunchRequest
from podway.task.read import read_task
from tests.conftest import wait_until
from tests.e2e.harness import Podway
from tests.e2e.test_services import PROGRAM, ended, ready
from tests.key_pairs import key_pair, write_pair

FILE = """
name: web
resources: {accelerators: tpu-v5litepod-1}
envs: {WORD: one}
service:
  ports: 18080
  readiness_probe: {path: /health, endpoint_probe_interval_seconds: 0.5}
  tls: {keyfile: key.pem, certfile: cert.pem}
run: |
  exec python3 -c '%s'
"""


def apply(pod: Podway, folder: Path, pair: TlsKeyPair, name: str = "web") -> str:
    write_pair(folder, pair)
    (folder / "service.yaml").write_text(FILE.replace("name: web", f"name: {name}") % PROGRAM.replace("\n", "\n  "))
    task = read_task(str(folder / "service.yaml"))
    return pod.client.apply_service(LaunchRequest(task=task, options=LaunchOptions(provider="local"))).change


def answer(url: str, pair: TlsKeyPair | None) -> str:
    """By a client that trusts this certificate alone."""
    context = None if pair is None else ssl.create_default_context(cadata=pair.certificate)
    try:
        with urllib.request.urlopen(url, timeout=60, context=context) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()
    except (OSError, urllib.error.URLError) as error:
        return str(error)


def contents(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Of every file below it; what goes away meanwhile is left out."""
    for directory, _, names in os.walk(folder):
        for path in (Path(directory, name) for name in names):
            with contextlib.suppress(OSError):
                yield path, path.read_bytes() if path.is_file() else b""


def test_an_endpoint_with_its_own_certificate(pod: Podway, tmp_path: Path) -> None:
    first, second = key_pair("127.0.0.1", "web.example.org"), key_pair("127.0.0.1")
    pod.start()
    assert apply(pod, tmp_path, first) == "create"
    ready(pod, 1)
    wait_until(lambda: pod.client.service("web").url, 90, "the gateway")
    url = str(pod.client.service("web").url)
    assert url.startswith("https://127.0.0.1:")
    wait_until(lambda: answer(url, first) == "one", 90, "an answer by https")
    assert "https only" in answer(url.replace("https:", "http:"), None)
    assert "CERTIFICATE_VERIFY_FAILED" in answer(url, second)
    assert apply(pod, tmp_path, first) == "none"
    assert apply(pod, tmp_path, second) == "in-place"  # no replica is replaced
    wait_until(lambda: answer(url, second) == "one", 90, "the renewed certificate")
    assert [one.number for one in ready(pod, 1).replicas] == [1]
    with pytest.raises(UserError, match="another service has a certificate"):
        apply(pod, tmp_path, first, "other")
    secret = [line.encode() for pair in (first, second) for line in pair.key.splitlines()[1:-1]]
    for path, held in contents(pod.home):
        assert not any(line in held for line in secret), path
    ended(pod)
