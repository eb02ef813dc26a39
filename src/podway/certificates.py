"""A certificate and its private key, as PEM texts: what they say, whether they can serve HTTPS, and the TLS context that does.

The key comes from a person's file or out of a sealed value and is never written in clear: OpenSSL reads keys from files only, so
`server_context` gives it one that is encrypted under a passphrase of that moment, and deletes it.
"""

import ipaddress
import secrets
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from podway.errors import UserError

CLOCKS_DIFFER_S = 300

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes


class TlsKeyPair(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A certificate chain and its key (PEM); both empty where they are known to exist and are not at hand."""

    certificate: str = ""
    key: str = ""

    def __repr__(self) -> str:
        """Nothing of the key, whatever logs it."""
        return "TlsKeyPair(*****)"


class CertificateFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What anybody may know of a certificate."""

    names: tuple[str, ...] = ()  # host names (perhaps '*.example.org') and IP addresses that it is for
    expires: int = 0  # seconds since 1970
    fingerprint: str = ""  # SHA-256 of the certificate


def load_pair(
    certificate: str, key: str, *, certfile: str, keyfile: str, now: float | None = None
) -> tuple[TlsKeyPair, CertificateFacts]:
    """The chain and the key of two texts (PEM), and nothing else that stands in them. What cannot serve HTTPS is refused.

    `certfile` and `keyfile` are what to call the two in a message.
    """
    from cryptography.hazmat.primitives import serialization as forms

    chain, private = _read_chain(certificate, certfile), _read_key(key, keyfile)
    leaf = chain[0]
    if private.public_key() != leaf.public_key():
        raise UserError(
            f"{keyfile} is not the key of the certificate in {certfile}", "give the two files that were made together"
        )
    _check_dates(leaf, certfile, time.time() if now is None else now)
    encoded = private.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    pair = TlsKeyPair(
        certificate="".join(one.public_bytes(forms.Encoding.PEM).decode() for one in chain), key=encoded.decode()
    )
    try:
        server_context(pair)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = getattr(error, "reason", None) or error
        raise UserError(f"{certfile}: OpenSSL does not serve it: {why}", "make a pair of today's strength") from None
    return pair, pair_facts(pair)


def pair_facts(pair: TlsKeyPair) -> CertificateFacts:
    """What the certificate of a pair says, valid today or not."""
    leaf = _read_chain(pair.certificate, "the certificate")[0]
    expires = int(leaf.not_valid_after_utc.timestamp())
    return CertificateFacts(names=_names(leaf), expires=expires, fingerprint=_fingerprint(leaf))


def _check_dates(leaf: "x509.Certificate", shown: str, now: float) -> None:
    begins, expires = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    if expires.timestamp() <= now:
        raise UserError(f"{shown}: the certificate expired on {expires:%Y-%m-%d %H:%M} UTC", "renew it")
    if begins.timestamp() > now + CLOCKS_DIFFER_S:
        raise UserError(
            f"{shown}: the certificate is not valid before {begins:%Y-%m-%d %H:%M} UTC", "wait, or renew it"
        )


def _read_chain(text: str, shown: str) -> "list[x509.Certificate]":
    from cryptography import x509  # slow to import, and few tasks have a certificate

    try:
        found = x509.load_pem_x509_certificates(text.encode())
        _names(found[0])  # a certificate whose names cannot be read is none
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        hint = "give the certificate, followed by the ones that signed it, in PEM form (-----BEGIN CERTIFICATE-----)"
        raise UserError(f"{shown}: not a certificate", hint) from None
    return found


def _read_key(text: str, shown: str) -> "PrivateKeyTypes":
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(text.encode(), None)
    except TypeError:  # it has a passphrase
        hint = "give one without a passphrase (the server stores it encrypted): openssl pkey -in OLD -out NEW"
        raise UserError(f"{shown}: the private key is encrypted", hint) from None
    except (ValueError, UnsupportedAlgorithm):
        raise UserError(f"{shown}: not a private key", "give it in PEM form (-----BEGIN PRIVATE KEY-----)") from None


def _names(certificate: "x509.Certificate") -> tuple[str, ...]:
    from cryptography import x509

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        common = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        return tuple(str(one.value).lower() for one in common)
    addresses = (str(one) for one in found.get_values_for_type(x509.IPAddress))
    return (*(name.lower() for name in found.get_values_for_type(x509.DNSName)), *addresses)


def _fingerprint(certificate: "x509.Certificate") -> str:
    from cryptography.hazmat.primitives.hashes import SHA256

    return certificate.fingerprint(SHA256()).hex()


def covers(names: tuple[str, ...], host: str) -> bool:
    """Whether a certificate for `names` is one for this host: by name, by address, or by the one label of a '*.'."""
    host = host.lower().rstrip(".").strip("[]")
    return host in names or (not _is_address(host) and f"*.{host.partition('.')[2]}" in names)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def server_context(pair: TlsKeyPair) -> ssl.SSLContext:
    """A context that serves with this pair; OSError or ValueError where it cannot."""
    import tempfile  # with shutil, which commands that only read these types need not import

    from cryptography.hazmat.primitives import serialization as forms

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    key, passphrase = forms.load_pem_private_key(pair.key.encode(), None), secrets.token_urlsafe(32)
    sealed = key.private_bytes(
        forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.BestAvailableEncryption(passphrase.encode())
    )
    with tempfile.TemporaryDirectory(prefix="podway-tls-") as folder:
        certificates, keys = Path(folder, "chain.pem"), Path(folder, "key.pem")
        certificates.write_text(pair.certificate)
        keys.write_bytes(sealed)
        context.load_cert_chain(certificates, keys, passphrase)
    return context
