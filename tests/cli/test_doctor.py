"""`podway doctor` and `podway check PROVIDER`, on a machine with nothing, and with what does not answer."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Run

VARIABLES = ("PODWAY_GCP_PROJECT", "PODWAY_GCP_ENDPOINT", "GOOGLE_CLOUD_PROJECT", "GOOGLE_APPLICATION_CREDENTIALS")


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    return tmp_path / "podway"  # the home of `run`


@pytest.fixture
def greeting() -> Iterator[int]:
    """The port of something that greets as sshd does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def greet() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"SSH-2.0-test\r\n")

    thread = threading.Thread(target=greet, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)


def pool(place: Path, port: int) -> None:
    (place / "ssh").mkdir(parents=True, exist_ok=True)
    (place / "ssh" / "lab.yaml").write_text(f"hosts:\n  - address: 127.0.0.1\n    port: {port}\n")


def test_a_bare_machine_has_nothing_wrong(run: Run) -> None:
    result = run("doctor")
    assert result.code == 0
    assert "gcp: not set up here" in result.out and "local: slices are simulated" in result.out


@pytest.mark.parametrize("verb", ["doctor", "check"])
def test_what_is_missing_is_named_with_its_fix(run: Run, verb: str) -> None:
    result = run(verb, "gcp")
    assert result.code == 1
    assert "no Google Cloud project is chosen" in result.out and "PODWAY_GCP_PROJECT" in result.out
    result = run(verb, "k8s")
    assert result.code == 1 and "get-credentials" in result.out


@pytest.mark.parametrize("silent", [False, True])
def test_a_cloud_that_does_not_answer_is_one_finding(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """One check waits for it, not each of them in turn."""
    listener = socket.create_server(("127.0.0.1", 0)) if silent else None
    port = listener.getsockname()[1] if listener else 9
    monkeypatch.setattr("podway.providers.gcp.diagnose.REACH_S", 0.2)
    monkeypatch.setenv("PODWAY_GCP_PROJECT", "my-project-1")
    monkeypatch.setenv("PODWAY_GCP_ENDPOINT", f"http://127.0.0.1:{port}")
    result = run("doctor", "gcp", "-o", "json")
    assert result.code == 1
    found = {one["what"]: one for one in json.loads(result.out)["gcp"]}
    assert found["credentials"]["ok"] and not found["network"]["ok"] and "HTTPS_PROXY" in found["network"]["fix"]
    assert ("does not answer" if silent else "cannot be reached") in found["network"]["note"]
    assert list(found) == ["zones", "credentials", "network"]
    if listener:
        listener.close()
    assert not (place / "gcp" / "id_ed25519").exists()  # nothing is made


def test_machines_of_one_s_own(run: Run, place: Path, greeting: int) -> None:
    pool(place, greeting)
    result = run("doctor", "ssh")
    assert result.code == 0 and "pool lab: 1 machine answers" in result.out
    pool(place, 9)
    result = run("doctor", "ssh")
    assert result.code == 1 and "127.0.0.1" in result.out and "its sshd runs" in result.out


def test_another_word_is_no_provider(run: Run) -> None:
    result = run("doctor", "nope")
    assert result.code == 1 and "one of: gcp, gke, ssh" in result.err
    assert "no such file" in run("check", "nope").err
