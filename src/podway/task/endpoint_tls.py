"""`tls` of a service: its two files are read where the command is typed, and travel as secrets of the task."""

from podway.certificates import CertificateFacts, load_pair
from podway.errors import UserError
from podway.task.fields import Field
from podway.task.paths import LocalMachine, read_file
from podway.task.task import TLS_CERTIFICATE, TLS_KEY


def read_tls(field: Field, local: LocalMachine, secrets: dict[str, str]) -> CertificateFacts:
    """What the certificate says; chain and key join the task's secrets."""
    keyfile, certfile = field.get("keyfile"), field.get("certfile")
    assert keyfile is not None and certfile is not None  # the shape requires them
    texts = {one.path: _text(one, local) for one in (certfile, keyfile)}
    try:
        pair, facts = load_pair(
            texts[certfile.path], texts[keyfile.path], certfile=certfile.words(), keyfile=keyfile.words()
        )
    except UserError as error:
        raise field.error(error.what, error.hint) from None
    secrets |= {TLS_CERTIFICATE: pair.certificate, TLS_KEY: pair.key}
    return facts


def _text(field: Field, local: LocalMachine) -> str:
    path = local.existing(field, field.words())
    try:
        return read_file(path, "a PEM file", field.words()).decode("utf-8", "replace")
    except UserError as error:
        raise field.error(error.what, error.hint) from None
