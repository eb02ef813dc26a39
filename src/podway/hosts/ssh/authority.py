"""Certificates with which people log in to hosts that a team's server looks after (PROTOCOL.certkeys of OpenSSH).

The server holds one key, the authority (mode 0600, in its own home). A host that somebody wants to log in to is told its public half, with
the one name (principal) that certificates for this cluster carry. A person's client makes a key of its own, whose private half never leaves
their machine, and asks the server to certify it: for this cluster, for a few minutes. A session that is open outlives its certificate.
"""

import os
import time
from pathlib import Path

import msgspec

from podway.errors import UserError
from podway.hosts.ssh.keys import KeyPair, key_pair

LIFETIME_S = 300
SKEW_S = 120  # hosts' clocks may be behind
EXTENSIONS = (b"permit-agent-forwarding", b"permit-port-forwarding", b"permit-pty", b"permit-user-rc")


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """One line of OpenSSH's format, and when it ends."""

    text: str
    expires: float


class CertificateAuthority:
    """The key of one server, made when it is first needed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def trust_line(self, principal: str) -> str:
        """What authorized_keys of a host says of it (sshd(8))."""
        return f'cert-authority,principals="{principal}" {self._key.public}'

    def sign(self, public_key: str, principal: str, who: str) -> Certificate:
        """Certify a person's key for the hosts that know this principal; `who` is what sshd logs."""
        from cryptography.exceptions import UnsupportedAlgorithm  # slow to import, and few servers need it
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import ssh

        try:
            key = serialization.load_ssh_public_key(public_key.encode())
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, Ed25519PublicKey):
            raise UserError("public_key is not an ed25519 key", "send a line that begins with ssh-ed25519")
        authority = serialization.load_ssh_private_key(self._key.path.read_bytes(), None)
        assert isinstance(authority, Ed25519PrivateKey)  # as `key_pair` makes it
        now = int(time.time())
        builder = (
            ssh.SSHCertificateBuilder()
            .public_key(key)
            .serial(int.from_bytes(os.urandom(8), "big"))
            .type(ssh.SSHCertificateType.USER)
            .key_id(who.encode())
            .valid_principals([principal.encode()])
            .valid_after(now - SKEW_S)
            .valid_before(now + LIFETIME_S)
        )
        for extension in EXTENSIONS:
            builder = builder.add_extension(extension, b"")
        return Certificate(text=builder.sign(authority).public_bytes().decode(), expires=float(now + LIFETIME_S))

    @property
    def _key(self) -> KeyPair:
        return key_pair(self._path)
