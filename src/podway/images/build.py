"""Base image + a directory's layer -> a new image in a registry.

1. The base's manifest is read, for linux/amd64 where there are several, and its configuration.
2. The layer is written to a temporary file; its digests are known then, and with them the whole new image.
3. What the target lacks is sent: layers of the base from their registry (or not at all, within one registry), the new layer, the
   configuration, and last the manifest that names them. An image that is there already costs a few questions.

Nothing of it depends on the time or the machine: the same directory over the same base is the same image.
"""

import io
import json
import tempfile
from collections.abc import Callable
from typing import IO, Any

import msgspec

from podway.errors import UserError
from podway.hosts.tree import Scan
from podway.images.layer import Layer, write_layer
from podway.images.reference import ImageReference
from podway.images.registry import INDEXES, MANIFESTS, Registry, digest_of

PLATFORM = ("linux", "amd64")
EPOCH = "1970-01-01T00:00:00Z"
_OCI = MANIFESTS[0]
_LAYER = {
    _OCI: "application/vnd.oci.image.layer.v1.tar+gzip",
    MANIFESTS[1]: "application/vnd.docker.image.rootfs.diff.tar.gzip",
}
_CONFIG = {
    _OCI: "application/vnd.oci.image.config.v1+json",
    MANIFESTS[1]: "application/vnd.docker.container.image.v1+json",
}

Say = Callable[[str], None]


class BaseImage(msgspec.Struct, frozen=True, kw_only=True):
    """What a base is made of."""

    kind: str
    manifest: dict[str, Any]
    config: dict[str, Any]
    digest: str


class BuiltImage(msgspec.Struct, frozen=True, kw_only=True):
    """The image, and what sending it took."""

    image: ImageReference
    layer: Layer
    sent: int = 0  # bytes
    reused: int = 0  # bytes of contents that the registry had


def build_image(
    scan: Scan, base: ImageReference, target: ImageReference, path: str, say: Say, *, push: bool = True
) -> BuiltImage:
    """Make the image and push it; without `push` only its name is found."""
    if target.digest:
        raise UserError(f"{target} names a digest", "leave it out: it follows from the contents")
    source, into = Registry(base), Registry(target)
    say(f"Reading {base}")
    found = read_base(source)
    with tempfile.NamedTemporaryFile() as file:
        say("Packing the directory")
        layer = write_layer(scan, path, file)
        file.flush()
        config = encoded(_config(found, layer, path))
        manifest = encoded(_manifest(found, layer, config))
        digest = digest_of(manifest)
        image = msgspec.structs.replace(target, tag=None, digest=digest)
        if not push:
            return BuiltImage(image=image, layer=layer)
        sending = _Push(source, into, say)
        for one in found.manifest["layers"]:
            sending.copy(str(one["digest"]), int(one["size"]))
        sending.send(layer.digest, layer.size, lambda: open(file.name, "rb"))  # noqa: SIM115 - closed where it is sent
        sending.send(digest_of(config), len(config), lambda: io.BytesIO(config))
    say(f"Naming {target}")
    into.put_manifest(target.tag or digest.removeprefix("sha256:")[:16], found.kind, manifest)
    return BuiltImage(image=image, layer=layer, sent=sending.sent, reused=sending.reused)


def read_base(source: Registry) -> BaseImage:
    """The manifest and configuration of the base, for one platform."""
    image = source.image
    kind, manifest, digest = source.manifest(image.digest or image.tag or "latest")
    if kind in INDEXES:
        platforms = [(one, one.get("platform") or {}) for one in _items(manifest.get("manifests"))]
        fitting = [one for one, of in platforms if (of.get("os"), of.get("architecture")) == PLATFORM]
        if not fitting:
            raise UserError(f"{image} has nothing for {'/'.join(PLATFORM)}", "name another base image")
        kind, manifest, digest = source.manifest(str(fitting[0].get("digest")))
    layers, about = _items(manifest.get("layers")), manifest.get("config")
    if kind not in MANIFESTS or not isinstance(about, dict) or not all(_is_content(one) for one in (about, *layers)):
        raise UserError(f"{image} is of a kind that cannot be built upon: {kind}", "name a container image")
    config = source.json_blob(about["digest"])
    if not isinstance((config.get("rootfs") or {}).get("diff_ids"), list):
        raise UserError(f"{image} is not a container image", "name another base image")
    return BaseImage(kind=kind, manifest=manifest, config=config, digest=digest)


def check_path(path: str) -> str:
    """Where in the image the directory goes."""
    parts = path.strip("/").split("/")
    if not path.startswith("/") or not all(parts) or {".", ".."} & set(parts) or not path.isprintable():
        raise UserError(f"--path {path}: not a directory of an image", "write it as /workdir")
    return "/" + "/".join(parts)


def encoded(value: dict[str, Any]) -> bytes:
    """JSON with the same bytes each time."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _config(base: BaseImage, layer: Layer, path: str) -> dict[str, Any]:
    old = base.config
    runs = {**(old.get("config") or {}), "WorkingDir": path}
    history = [*_items(old.get("history")), {"created": EPOCH, "created_by": f"podway image build: {path}"}]
    rootfs = {**old["rootfs"], "diff_ids": [*old["rootfs"]["diff_ids"], layer.diff_id]}
    return {**old, "created": EPOCH, "config": runs, "history": history, "rootfs": rootfs}


def _manifest(base: BaseImage, layer: Layer, config: bytes) -> dict[str, Any]:
    about = {"mediaType": _CONFIG[base.kind], "size": len(config), "digest": digest_of(config)}
    added = {"mediaType": _LAYER[base.kind], "size": layer.size, "digest": layer.digest}
    layers = [*_items(base.manifest.get("layers")), added]
    return {"schemaVersion": 2, "mediaType": base.kind, "config": about, "layers": layers}


class _Push:
    """Sends what the target lacks, and counts it."""

    def __init__(self, source: Registry, into: Registry, say: Say) -> None:
        self._source, self._into, self._say = source, into, say
        self.sent = self.reused = 0

    def copy(self, digest: str, size: int) -> None:
        """A layer of the base."""
        source, into = self._source.image, self._into.image
        near = source.registry == into.registry
        if not self._into.has(digest) and near and self._into.mount(digest, source.repository):
            self.reused += size
            return
        self.send(digest, size, lambda: self._source.open_blob(digest))

    def send(self, digest: str, size: int, body: Callable[[], IO[bytes]]) -> None:
        """A content, unless it is there."""
        if self._into.has(digest):
            self.reused += size
            return
        self._say(f"Sending {digest[7:19]} ({size:,} bytes)")
        self._into.upload(digest, size, body)
        self.sent += size


def _items(value: Any) -> list[Any]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _is_content(one: dict[str, Any]) -> bool:
    digest, size = one.get("digest"), one.get("size")
    return isinstance(digest, str) and digest.startswith("sha256:") and isinstance(size, int) and size >= 0
