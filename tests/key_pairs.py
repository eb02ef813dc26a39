"""Certificates for tests: self-signed, so that a client that trusts this one alone verifies it in earnest."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from podway.certificates import TlsKeyPair

DAY = datetime.timedelta(days=1)


def key_pair(*names: str, begins: int = -1, days: int = 30, passphrase: bytes | None = None) -> TlsKeyPair:
    """For host names and addresses; `begins`: in so many days from now, for `days` days."""
    key = ec.generate_private_key(ec.SECP256R1())
    start = datetime.datetime.now(datetime.UTC) + begins * DAY
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0])])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + days * DAY)
        .add_extension(x509.SubjectAlternativeName([_name(one) for one in names]), critical=False)
        .sign(key, hashes.SHA256())
    )
    how = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return TlsKeyPair(certificate=made.public_bytes(pem).decode(), key=key.private_bytes(pem, pkcs8, how).decode())


def _name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def write_pair(folder: Path, pair: TlsKeyPair) -> None:
    """As `cert.pem` and `key.pem`."""
    (folder / "cert.pem").write_text(pair.certificate)
    (folder / "key.pem").write_text(pair.key)
