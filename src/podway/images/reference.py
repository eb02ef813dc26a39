"""Names of images as people write them: `python:3.12`, `REGISTRY/REPOSITORY:TAG`, `REPOSITORY@sha256:...`."""

import re

import msgspec

from podway.errors import UserError

DOCKER_HUB, HUB_ADDRESS = "docker.io", "registry-1.docker.io"
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
_REGISTRY = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
LONGEST = 255


class ImageReference(msgspec.Struct, frozen=True, kw_only=True):
    """An image, or where one is to go."""

    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @property
    def address(self) -> str:
        """The host that answers for the registry."""
        return HUB_ADDRESS if self.registry == DOCKER_HUB else self.registry

    def __str__(self) -> str:
        end = f"@{self.digest}" if self.digest else f":{self.tag}" if self.tag else ""
        return f"{self.registry}/{self.repository}{end}"


def parse_reference(text: str) -> ImageReference:
    """As docker reads it: no registry is Docker Hub, and there a name without a user is of its library."""
    rest, at, digest = text.removeprefix("docker:").partition("@")
    first, slash, after = rest.partition("/")
    registry = DOCKER_HUB
    if slash and ("." in first or ":" in first or first == "localhost"):
        registry, rest = first, after
    repository, colon, tag = rest.partition(":")
    if registry == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    valid = (
        _REGISTRY.fullmatch(registry)
        and _REPOSITORY.fullmatch(repository)
        and len(repository) <= LONGEST
        and (not colon or _TAG.fullmatch(tag))
        and (not at or _DIGEST.fullmatch(digest))
    )
    if not valid:
        raise UserError(
            f"{text!r} is not the name of an image", "write it as REGISTRY/REPOSITORY:TAG, such as python:3.12"
        )
    return ImageReference(registry=registry, repository=repository, tag=tag or None, digest=digest or None)
