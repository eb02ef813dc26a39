"""Where something lies in object storage: `gs://BUCKET/PREFIX`, `s3://…`, `hf://ORG/NAME[@REVISION]/PREFIX`, taken apart. Pure."""

import msgspec


class Address(msgspec.Struct, frozen=True):
    """A bucket, and what the names of its objects begin with ("" for all of it)."""

    bucket: str
    prefix: str = ""
    scheme: str = "gs"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    def name_of(self, path: str) -> str:
        """The object of a path below this address."""
        return f"{self.prefix}/{path}" if self.prefix else path


def split_login(endpoint: str) -> tuple[str, str]:
    """A storage server's URL without the login that may stand in it, and the password of that login."""
    scheme, _, rest = endpoint.partition("//")
    login, at, server = rest.rpartition("@")
    return (f"{scheme}//{server}", login.partition(":")[2]) if at else (endpoint, "")


def parse(uri: str) -> Address:
    """The address that the readers of task files have proven to be one."""
    scheme, _, rest = uri.partition("://")
    parts = rest.split("/")
    own = 1 if scheme != "hf" else 3 if parts[0] in ("datasets", "spaces") else 2  # of the bucket's name
    return Address("/".join(parts[:own]), "/".join(parts[own:]).strip("/"), scheme)
