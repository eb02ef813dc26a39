"""JobSet and Kueue as their projects publish them.

A release is one file at an address that people are shown, with the checksum of its bytes. `--from FILE` takes the same from a disk, for
machines without the internet; a file with another checksum is taken too, since a person named it, and is told of as such.
"""

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from podway.errors import UserError
from podway.providers.gke.manifests import Manifest

# Of what is installed, and of what `make test-kubernetes` runs: tools/kubernetes/build reads them here.
JOBSET_VERSION = "v0.12.0"
KUEUE_VERSION = "v0.19.2"
DOWNLOAD_S = 60.0
MOST_BYTES = 32 << 20


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a controller."""

    name: str
    version: str
    url: str
    sha256: str
    group: str  # its API group
    api_version: str  # that the release prefers
    namespace: str
    deployment: str


# Both files can be made again from the projects' Go modules (tools/kubernetes/build does); their checksums are those that public
# repositories record for the published files.
JOBSET = Release(
    name="JobSet",
    version=JOBSET_VERSION,
    url=f"https://github.com/kubernetes-sigs/jobset/releases/download/{JOBSET_VERSION}/manifests.yaml",
    sha256="a41aaf12dd0b7b0a3d626b8d6107f32c3dc889d7e7830adc46b8cdb77a8963bb",
    group="jobset.x-k8s.io",
    api_version="v1alpha2",
    namespace="jobset-system",
    deployment="jobset-controller-manager",
)
KUEUE = Release(
    name="Kueue",
    version=KUEUE_VERSION,
    url=f"https://github.com/kubernetes-sigs/kueue/releases/download/{KUEUE_VERSION}/manifests.yaml",
    sha256="88881eb50734eb920b67486ebc2aa978ed325e1b12d99b22fc51a6d7e9e4d370",
    group="kueue.x-k8s.io",
    api_version="v1beta2",
    namespace="kueue-system",
    deployment="kueue-controller-manager",
)
RELEASES = (JOBSET, KUEUE)


class ReleaseFile(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of a release, and where they were read."""

    release: Release
    source: str
    sha256: str
    objects: tuple[Manifest, ...]

    @property
    def title(self) -> str:
        """What is installed, from where."""
        known = self.sha256 == self.release.sha256
        version = self.release.version if known else "of a file that is not the release Podway knows"
        return f"{self.release.name} {version} from {self.source} (sha256 {self.sha256[:16]}…)"


def read_files(paths: Iterable[str]) -> dict[str, ReleaseFile]:
    """The files that a person named, by the name of what is in them."""
    found: dict[str, ReleaseFile] = {}
    for path in paths:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}", "name the manifests.yaml of a release") from None
        objects = parse(data, path)
        release = _release_of(objects, path)
        if release.name in found:
            raise UserError(f"{path}: a file of {release.name} is named already", "name one of each")
        digest = hashlib.sha256(data).hexdigest()
        found[release.name] = ReleaseFile(release=release, source=path, sha256=digest, objects=objects)
    return found


def download(release: Release) -> ReleaseFile:
    """The published file, whose bytes must be the known ones."""
    hint = f"download {release.url} yourself, and name the file: --from FILE"
    try:
        with urllib.request.urlopen(release.url, timeout=DOWNLOAD_S) as answer:
            data = answer.read(MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise UserError(f"{release.url} answers {error.code} {error.reason}", hint) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(f"{release.name} cannot be downloaded: {reason}", hint) from None
    digest = hashlib.sha256(data).hexdigest()
    if digest != release.sha256:
        raise UserError(
            f"{release.url} is not the file Podway knows: its sha256 is {digest}, not {release.sha256}",
            "look at the file, and where it is right name it: --from FILE",
        )
    return ReleaseFile(release=release, source=release.url, sha256=digest, objects=parse(data, release.url))


def parse(data: bytes, source: str) -> tuple[Manifest, ...]:
    """The objects of a YAML file, in the order they are to be applied."""
    try:
        documents: list[Any] = list(yaml.load_all(data, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark is not None else source
        raise UserError(
            f"{where}: not YAML: {getattr(error, 'problem', None) or error}", "name a manifests.yaml"
        ) from None
    objects = [one for one in documents if one is not None]
    for number, one in enumerate(objects, 1):
        if not _is_object(one):
            raise UserError(
                f"{source}: document {number} is not a Kubernetes object: it needs apiVersion, kind and metadata.name",
                "name the manifests.yaml of a release",
            )
    return tuple(sorted(objects, key=_order))


def _is_object(one: Any) -> bool:
    return (
        isinstance(one, dict)
        and isinstance(one.get("apiVersion"), str)
        and isinstance(one.get("kind"), str)
        and isinstance(one.get("metadata"), dict)
        and isinstance(one["metadata"].get("name"), str)
    )


def _order(one: Manifest) -> int:
    """What others live in goes first, what sends requests to the controller last."""
    last = one["kind"].endswith("WebhookConfiguration")
    return {"Namespace": 0, "CustomResourceDefinition": 1}.get(one["kind"], 3 if last else 2)


def _release_of(objects: Iterable[Manifest], path: str) -> Release:
    groups = {(one.get("spec") or {}).get("group") for one in objects if one["kind"] == "CustomResourceDefinition"}
    for release in RELEASES:
        if release.group in groups:
            return release
    raise UserError(
        f"{path}: neither JobSet nor Kueue is in this file", "name the manifests.yaml of one of their releases"
    )
