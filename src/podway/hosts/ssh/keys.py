"""Keys of Podway's own, made when they are first needed: the host key of hosts that a command serves, and a person's key for a team's."""

import contextlib
import os
from pathlib import Path

import msgspec


class KeyPair(msgspec.Struct, frozen=True, kw_only=True):
    """An ed25519 key: its file, and the public half as "TYPE BASE64"."""

    path: Path
    public: str


def proxied_host_key(folder: Path) -> KeyPair:
    """What every host shows that is served by a command of this Podway home."""
    return key_pair(folder / "proxied_host_key")


def key_pair(path: Path) -> KeyPair:
    """The key at `path`, made now if there is none. Mode 0600 from the first byte on; of two makers at once, one wins."""
    from cryptography.hazmat.primitives import serialization  # slow to import, and few commands need it
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        temp_name = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            with os.fdopen(os.open(temp_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(text)
            with contextlib.suppress(FileExistsError):
                os.link(temp_name, path)  # unlike a rename, it never replaces the key of another maker
        finally:
            temp_name.unlink(missing_ok=True)
    private = serialization.load_ssh_private_key(path.read_bytes(), None)
    public = private.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return KeyPair(path=path, public=public.decode())
