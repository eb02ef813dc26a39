"""Where a machine's sshd is: a plain value, which a client can have without any ssh library."""

import msgspec


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a machine's sshd listens, who logs in there, with which key, and by way of whom."""

    address: str
    port: int = 22
    user: str | None = None
    identity_file: str | None = None
    certificate_file: str | None = None  # for that key, where a team's server signed one
    jump: "Endpoint | None" = None
    alias: str | None = None  # its name in known_hosts, where addresses are given to one machine after another

    def __str__(self) -> str:
        return self.address if self.port == 22 else f"{self.address}:{self.port}"

    @property
    def known_as(self) -> str:
        """Its name in a known_hosts file (sshd(8))."""
        if self.alias is not None:
            return self.alias
        return self.address if self.port == 22 else f"[{self.address}]:{self.port}"

    def way(self) -> "list[Endpoint]":
        """It, and the machines it is reached through."""
        return [self, *(self.jump.way() if self.jump else [])]
