"""Certificates for the listeners of nodes, and for a whole control plane."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ADMINISTRATORS = "system:masters"  # the group that may do everything in Kubernetes


def self_signed(place: Path) -> tuple[Path, Path]:
    """The files of a certificate that is its own authority and of its key, readable by this user alone."""
    key, name = ec.generate_private_key(ec.SECP256R1()), _name("podway-node")
    return _write(place, "node", _builder(name, name, key).sign(key, hashes.SHA256()), key)


def signed(place: Path, name: str) -> Path:
    """Writes NAME.crt and NAME.key: an administrator of Kubernetes and a server of 127.0.0.1 in one; the authority's certificate."""
    ca_key, ca_name = ec.generate_private_key(ec.SECP256R1()), _name("podway-authority")
    builder = _builder(ca_name, ca_name, ca_key).add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
    ca, _ = _write(place, "authority", builder.sign(ca_key, hashes.SHA256()), ca_key)
    key = ec.generate_private_key(ec.SECP256R1())
    known_as = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    made = _builder(_name("administrator", ADMINISTRATORS), ca_name, key).add_extension(known_as, False)
    _write(place, name, made.sign(ca_key, hashes.SHA256()), key)
    return ca


def _name(common: str, organization: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
    return x509.Name([*parts, *([x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization)] if organization else [])])


def _builder(name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    today = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=30))
    )


def _write(place: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> tuple[Path, Path]:
    shown, kept = place / f"{name}.crt", place / f"{name}.key"
    shown.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    kept.touch(mode=0o600)
    kept.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return shown, kept
