"""The calls of a registry's HTTP API (OCI distribution specification 1.1), for one repository.

Where a token is required, the registry says who issues it; it is requested with the login of this machine, or without one. A login is
sent to the registry and to that place alone, never where a redirect leads. This machine's own registries speak HTTP, as with docker.
"""

import hashlib
import http.client
import io
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from http.client import HTTPResponse
from typing import IO, Any

from podway.errors import UserError
from podway.images.login import find_login
from podway.images.reference import ImageReference

CALL_S = 60.0
MOST_JSON = 8 << 20
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_PARAMETER = re.compile(r'([a-zA-Z]+)="([^"]*)"')
_OWN = re.compile(r"(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?")

Body = Callable[[], IO[bytes]]  # opened again where a request is sent again


class Registry:
    """One repository of a registry."""

    def __init__(self, image: ImageReference) -> None:
        self.image = image
        scheme = "http" if _OWN.fullmatch(image.address) else "https"
        self._server = f"{scheme}://{image.address}"
        self._base = f"{self._server}/v2/{image.repository}"
        self._login = find_login(image.registry)
        self._authorization: str | None = None

    def manifest(self, reference: str) -> tuple[str, dict[str, Any], str]:
        """Its media type, its content, and its digest."""
        accept = {"Accept": ", ".join((*MANIFESTS, *INDEXES))}
        with self._call("GET", f"{self._base}/manifests/{reference}", accept) as answer:
            data, kind = answer.read(MOST_JSON + 1), str(answer.headers.get_content_type())
        digest = digest_of(data)
        if reference.startswith("sha256:") and reference != digest:
            raise UserError(
                f"{self.image}: the registry answers another content than its digest says", "tell its owner"
            )
        found = self._json(data)
        return str(found.get("mediaType") or kind), found, digest

    def json_blob(self, digest: str) -> dict[str, Any]:
        """A small content, checked against its digest."""
        with self._call("GET", f"{self._base}/blobs/{digest}") as answer:
            data = answer.read(MOST_JSON + 1)
        if digest_of(data) != digest:
            raise UserError(
                f"{self.image}: the registry answers another content than its digest says", "tell its owner"
            )
        return self._json(data)

    def open_blob(self, digest: str) -> HTTPResponse:
        """A content, to be read in pieces."""
        return self._call("GET", f"{self._base}/blobs/{digest}")

    def has(self, digest: str) -> bool:
        """Whether the repository has the content."""
        try:
            self._call("HEAD", f"{self._base}/blobs/{digest}").close()
        except RegistryRefusal as error:
            if error.answered == 404:
                return False
            raise
        return True

    def mount(self, digest: str, source: str) -> bool:
        """Have the content from another repository of the same registry, without sending it."""
        query = urllib.parse.urlencode({"mount": digest, "from": source})
        with self._call("POST", f"{self._base}/blobs/uploads/?{query}", {"Content-Length": "0"}) as answer:
            return answer.status == 201

    def upload(self, digest: str, size: int, body: Body) -> None:
        """Send a content; the registry checks it against its digest."""
        with self._call("POST", f"{self._base}/blobs/uploads/", {"Content-Length": "0"}) as answer:
            place = urllib.parse.urljoin(f"{self._server}/", answer.headers["Location"] or "")
        if urllib.parse.urlsplit(place).netloc != urllib.parse.urlsplit(self._server).netloc:
            raise UserError(f"{self.image}: the registry sends uploads to another host", "push with another tool")
        target = f"{place}{'&' if '?' in place else '?'}{urllib.parse.urlencode({'digest': digest})}"
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        self._call("PUT", target, headers, body).close()

    def put_manifest(self, reference: str, kind: str, data: bytes) -> None:
        """Name an image whose contents are all there."""
        headers = {"Content-Type": kind, "Content-Length": str(len(data))}
        self._call("PUT", f"{self._base}/manifests/{reference}", headers, lambda: io.BytesIO(data)).close()

    def _json(self, data: bytes) -> dict[str, Any]:
        try:
            found = json.loads(data) if len(data) <= MOST_JSON else None
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise UserError(f"{self.image}: the registry answers what is not an image", "check the name")
        return found

    def _call(
        self, method: str, url: str, headers: dict[str, str] | None = None, body: Body | None = None
    ) -> HTTPResponse:
        try:
            return self._send(method, url, headers or {}, body)
        except urllib.error.HTTPError as error:
            challenge = error.headers.get("WWW-Authenticate") or ""
            refused = RegistryRefusal(self.image, error)
            if error.code != 401 or not self._authorize(challenge):
                raise refused from None
        try:
            return self._send(method, url, headers or {}, body)
        except urllib.error.HTTPError as error:
            raise RegistryRefusal(self.image, error) from None

    def _send(self, method: str, url: str, headers: dict[str, str], body: Body | None) -> HTTPResponse:
        opened = body() if body else None
        request = urllib.request.Request(url, data=opened, headers={"User-Agent": "podway", **headers}, method=method)
        if self._authorization:
            request.add_unredirected_header("Authorization", self._authorization)
        try:
            answer: HTTPResponse = urllib.request.urlopen(request, timeout=CALL_S)
            return answer
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise UserError(
                f"the registry {self.image.registry} cannot be reached: {why}", "check its name and the network"
            ) from None
        finally:
            if opened is not None:
                opened.close()

    def _authorize(self, challenge: str) -> bool:
        """Do what the registry asks for; False where there is nothing new to show."""
        before, (kind, _, rest) = self._authorization, challenge.partition(" ")
        if kind.lower() == "basic":
            self._authorization = self._login.basic if self._login else None
        elif kind.lower() == "bearer":
            self._authorization = f"Bearer {self._token(dict(_PARAMETER.findall(rest)))}"
        return self._authorization is not None and self._authorization != before

    def _token(self, asked: dict[str, str]) -> str:
        realm = asked.get("realm", "")
        if not realm.startswith("https://") and not realm.startswith(f"{self._server}/"):
            raise UserError(f"{self.image.registry} asks for a login without encryption", "use another registry")
        scope = asked.get("scope") or f"repository:{self.image.repository}:pull"
        query = {"service": asked.get("service", ""), "scope": scope}
        request = urllib.request.Request(f"{realm}?{urllib.parse.urlencode(query)}", headers={"User-Agent": "podway"})
        if self._login:
            request.add_unredirected_header("Authorization", self._login.basic)
        try:
            with urllib.request.urlopen(request, timeout=CALL_S) as answer:
                found = self._json(answer.read(MOST_JSON + 1))
        except urllib.error.HTTPError as error:
            raise RegistryRefusal(self.image, error) from None
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"the login of {self.image.registry} cannot be reached: {error}", "try again") from None
        return str(found.get("token") or found.get("access_token") or "")


class RegistryRefusal(UserError):
    """An answer that is a refusal, with its HTTP status."""

    def __init__(self, image: ImageReference, error: urllib.error.HTTPError) -> None:
        with error:
            said = _message(error)
        what, hint = f"{image.registry} answers {error.code}{f': {said}' if said else ''}", "try again in a moment"
        if error.code in (401, 403):
            what = f"{image.registry} does not let you use {image.repository}{f': {said}' if said else ''}"
            hint = f"log in: docker login {image.registry} (or podman login); for Google: gcloud auth configure-docker"
        elif error.code == 404:
            what, hint = f"there is no image {image}", "check its name, and that you are logged in where it is private"
        super().__init__(what, hint)
        self.answered = error.code


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(MOST_JSON))["errors"][0]["message"])[:200]
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def digest_of(data: bytes) -> str:
    """`sha256:...`."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
