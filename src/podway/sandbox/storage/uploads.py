"""The three ways bytes come up: in one piece, with their description (multipart), and piece by piece (resumable)."""

import re
import secrets
from pathlib import Path

import msgspec
from starlette.requests import Request

from podway.sandbox.jsons import JsonObject
from podway.sandbox.status import ApiError, invalid
from podway.sandbox.storage.buckets import Buckets

_RANGE = re.compile(r"^bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)$")
_BOUNDARY = re.compile(r"""boundary=["']?([^"';]+)""")  # gcloud puts it between single quotes
RESUME_INCOMPLETE = 308


class Session(msgspec.Struct, kw_only=True):
    """A resumable upload under way. It changes: bytes are appended."""

    bucket: str
    fields: JsonObject
    query: dict[str, str]
    data: Path
    have: int = 0


class Uploads:
    """Bytes on their way into buckets."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._sessions: dict[str, Session] = {}

    async def whole(self, request: Request) -> tuple[Path, JsonObject]:
        """`uploadType=media`: the body is the object."""
        path = self._buckets.new_file()
        await _receive(request, path, append=False)
        return path, {"contentType": request.headers.get("content-type", "application/octet-stream")}

    async def multipart(self, request: Request) -> tuple[Path, JsonObject]:
        """`uploadType=multipart`: JSON, then the object."""
        kind, fields, content = split_multipart(request.headers.get("content-type", ""), await request.body())
        path = self._buckets.new_file()
        path.write_bytes(content)
        return path, {"contentType": kind, **fields}

    async def begin(self, request: Request, bucket: str) -> str:
        """`uploadType=resumable`: the id of a new session."""
        self._buckets.bucket(bucket)
        fields = as_json(await request.body())
        given = request.headers.get("x-upload-content-type")
        if given and not fields.get("contentType"):
            fields["contentType"] = given
        query = dict(request.query_params)
        id = secrets.token_urlsafe(24)  # whoever knows it may upload
        fields["name"] = query.get("name") or fields.get("name") or ""
        self._sessions[id] = Session(bucket=bucket, fields=fields, query=query, data=self._buckets.new_file())
        self._sessions[id].data.touch()
        return id

    async def go_on(self, request: Request, id: str) -> Session | int:
        """More bytes: the session when it is complete, else how many bytes there are."""
        session = self._sessions.get(id)
        if session is None:
            raise ApiError("NOT_FOUND", "No such upload session.")
        given = request.headers.get("content-range")
        found = _RANGE.match(given) if given else None
        if given and not found:
            raise invalid(f"Invalid Content-Range: {given}")
        if found is not None and found[1] is None:  # a question, or the end of an object of no bytes
            if found[3] != "*" and int(found[3]) == session.have:
                return self._end(id)
            return session.have
        first = int(found[1]) if found else 0
        if first > session.have:
            raise ApiError("UNAVAILABLE", f"Bytes from {session.have} on are missing.")
        await _receive(request, session.data, append=True, at=first)
        session.have = session.data.stat().st_size
        total = found[3] if found else str(session.have)
        return self._end(id) if total != "*" and session.have >= int(total) else session.have

    def has(self, id: str) -> bool:
        """Whether an upload is under way."""
        return id in self._sessions

    def cancel(self, id: str) -> None:
        """Forget a session."""
        session = self._sessions.pop(id, None)
        if session is not None:
            session.data.unlink(missing_ok=True)

    def _end(self, id: str) -> Session:
        return self._sessions.pop(id)


def as_json(text: bytes) -> JsonObject:
    """An object, which may be left out; Google's Go client then sends `null`."""
    if not text or text.strip() in (b"", b"null"):
        return {}
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise invalid(f"Invalid JSON payload received: {error}") from None
    if not isinstance(value, dict):
        raise invalid("The metadata must be an object.")
    return value


def split_multipart(content_type: str, body: bytes) -> tuple[str, JsonObject, bytes]:
    """The data's content type, the description and the data of a multipart/related body."""
    found = _BOUNDARY.search(content_type)
    mark = b"--" + found[1].encode() if found else b""
    # gcloud ends lines with a bare newline; the end of the first line tells.
    newline = b"\r\n" if body.lstrip(b"\r\n").startswith(mark + b"\r\n") else b"\n"
    parts = (newline + body).split(newline + mark) if found else []
    if len(parts) != 4:  # before, metadata, data, after
        raise invalid("A multipart upload has two parts: metadata and data.")
    (_, description), (kind, content) = (_part(one) for one in parts[1:3])
    return kind, as_json(description), content


def _part(text: bytes) -> tuple[str, bytes]:
    """The content type and the content of one part."""
    # Headers may be missing (rclone's data has none): then the content begins after the empty line.
    found = re.match(rb"\r?\n((?:[!-9;-~]+:[^\r\n]*\r?\n)*)\r?\n", text)
    if not found:
        raise invalid("A part of the upload has no headers.")
    kinds = [line.partition(b":")[2] for line in found[1].splitlines() if line.lower().startswith(b"content-type:")]
    return (kinds[0].strip().decode("latin-1") if kinds else "application/octet-stream"), text[found.end() :]


async def _receive(request: Request, path: Path, *, append: bool, at: int = 0) -> None:
    with open(path, "r+b" if append else "wb") as file:
        file.seek(at)
        async for chunk in request.stream():
            file.write(chunk)
