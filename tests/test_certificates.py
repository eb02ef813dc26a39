"""What is taken as a certificate and its key, and what is refused, each in one line."""

import ssl
from pathlib import Path

import pytest

from podway.certificates import TlsKeyPair, covers, load_pair, server_context
from podway.errors import UserError
from podway.task.environment import Overrides
from podway.task.read import read_task
from podway.task.task import TLS_CERTIFICATE, TLS_KEY, job_secrets, without_secrets
from tests.key_pairs import key_pair, write_pair

GOOD = key_pair("a.example.org", "*.b.example.org", "10.0.0.1")
FILE = "resources: {accelerators: tpu-v5litepod-4}\nservice: {ports: 80, tls: {keyfile: key.pem, certfile: cert.pem}}\nrun: x\n"


def refused(certificate: str, key: str) -> str:
    with pytest.raises(UserError) as found:
        load_pair(certificate, key, certfile="cert.pem", keyfile="key.pem")
    assert "\n" not in found.value.what and "BEGIN" not in found.value.what
    return found.value.what


def test_a_pair_and_what_it_says() -> None:
    pair, facts = load_pair(GOOD.certificate + GOOD.key, GOOD.certificate + GOOD.key, certfile="c", keyfile="k")
    assert pair == GOOD and "PRIVATE" not in pair.certificate and "PRIVATE" not in repr(pair)
    assert facts.names == ("a.example.org", "*.b.example.org", "10.0.0.1") and len(facts.fingerprint) == 64
    for host, covered in (
        ("A.example.org", True),
        ("a.example.org.", True),
        ("x.b.example.org", True),
        ("b.example.org", False),
        ("x.y.b.example.org", False),
        ("10.0.0.1", True),
        ("10.0.0.2", False),
        ("", False),
    ):
        assert covers(facts.names, host) is covered, host


@pytest.mark.parametrize(
    ("certificate", "key", "says"),
    [
        ("", GOOD.key, "cert.pem: not a certificate"),
        ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", GOOD.key, "cert.pem: not a certificate"),
        (GOOD.certificate, "", "key.pem: not a private key"),
        (GOOD.certificate, GOOD.certificate, "key.pem: not a private key"),
        (GOOD.certificate, key_pair("x").key, "key.pem is not the key of the certificate in cert.pem"),
        (GOOD.certificate, key_pair("x", passphrase=b"p").key, "the private key is encrypted"),
        *((one.certificate, one.key, "the certificate expired on") for one in (key_pair("x", begins=-9, days=8),)),
        *((one.certificate, one.key, "is not valid before") for one in (key_pair("x", begins=2),)),
    ],
)
def test_what_cannot_serve_is_refused(certificate: str, key: str, says: str) -> None:
    assert says in refused(certificate, key)


def test_the_key_is_never_in_a_file_in_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Context(ssl.SSLContext):
        def load_cert_chain(self, certfile: object, keyfile: object = None, password: object = None) -> None:
            seen.append(Path(str(keyfile)).read_text())

    monkeypatch.setattr(ssl, "create_default_context", lambda _: Context(ssl.PROTOCOL_TLS_SERVER))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server_context(GOOD)
    assert seen and seen[0].startswith("-----BEGIN ENCRYPTED PRIVATE KEY") and list(tmp_path.iterdir()) == []


def test_a_task_carries_the_pair_as_secrets_that_no_job_sees(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(FILE)
    write_pair(tmp_path, GOOD)
    task = read_task(str(file))
    assert task.service is not None and task.service.tls is not None
    assert task.service.tls.names[0] == "a.example.org"
    assert task.secrets == {TLS_CERTIFICATE: GOOD.certificate, TLS_KEY: GOOD.key} and job_secrets(task) == {}
    assert not any(without_secrets(task).secrets.values())


@pytest.mark.parametrize(
    ("pair", "remove", "says"),
    [
        (GOOD, "key.pem", "no such file"),
        (
            TlsKeyPair(certificate=GOOD.certificate, key=key_pair("x").key),
            "",
            "key.pem is not the key of the certificate",
        ),
    ],
)
def test_a_mistake_in_a_file_says_where_it_is(tmp_path: Path, pair: TlsKeyPair, remove: str, says: str) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(FILE)
    write_pair(tmp_path, pair)
    if remove:
        (tmp_path / remove).unlink()
    with pytest.raises(UserError) as found:
        read_task(str(file), overrides=Overrides())
    assert says in found.value.what and "service.yaml:2" in found.value.what
