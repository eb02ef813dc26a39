"""The key pair of a service's endpoint, from a request to the gateways.

It comes among the secrets of the task, is checked here again, whoever sent it, and is sealed beside the service. It belongs to the
endpoint and not to a revision: an update with another certificate is made in place, and a rollback does not bring an old one back.
"""

from collections.abc import Iterable

import msgspec

from podway.certificates import CertificateFacts, TlsKeyPair, covers, load_pair
from podway.control.service_records import Service
from podway.control.vault import SecretVault
from podway.errors import UserError
from podway.launch_options import LaunchRequest
from podway.task.task import TLS_CERTIFICATE, TLS_KEY, job_secrets


def take_pair(request: LaunchRequest) -> tuple[LaunchRequest, TlsKeyPair | None]:
    """The request without the pair, with what the certificate really says; and the pair."""
    task, pair = request.task, None
    service, secrets = task.service, task.secrets
    if service is not None and service.tls is not None:
        if not secrets.get(TLS_CERTIFICATE) or not secrets.get(TLS_KEY):
            raise UserError("the certificate or the key of the service is missing", "apply its file again")
        pair, facts = load_pair(
            secrets[TLS_CERTIFICATE], secrets[TLS_KEY], certfile="the certificate", keyfile="the key"
        )
        service = msgspec.structs.replace(service, tls=facts)
    task = msgspec.structs.replace(task, service=service, secrets=job_secrets(task))
    return msgspec.structs.replace(request, task=task), pair


def check_names(name: str, facts: CertificateFacts | None, services: Iterable[Service]) -> None:
    """Clients say a host name and get one certificate: two services may share it, and not have one each for the same name."""
    for other in services if facts is not None else ():
        theirs = other.spec.tls
        if other.name == name or theirs is None or facts is None or theirs.fingerprint == facts.fingerprint:
            continue
        both = [one for one in facts.names if one in theirs.names or covers(theirs.names, one)]
        both += [one for one in theirs.names if covers(facts.names, one)]
        if both:
            hint = "use the same certificate for both, or one for another host name"
            raise UserError(f"another service has a certificate for {both[0]}", hint, status=409)


def seal_pair(vault: SecretVault, pair: TlsKeyPair | None) -> bytes:
    """As it is stored."""
    return vault.seal(msgspec.structs.asdict(pair)) if pair is not None else b""


def open_pair(vault: SecretVault, service: Service) -> TlsKeyPair | None:
    """For the gateways; None: it has none. One that cannot be opened is empty, and the service takes no requests."""
    if service.spec.tls is None:
        return None
    try:
        return TlsKeyPair(**vault.open(service.sealed_tls))
    except UserError:
        return TlsKeyPair()
