"""Cloud Storage's JSON API over buckets and uploads.

/storage/v1/b[/BUCKET[/o[/OBJECT]]]      what there is
/upload/storage/v1/b/BUCKET/o            bytes up
/download/storage/v1/b/BUCKET/o/OBJECT   bytes down (the same with alt=media)
"""

import asyncio
import re
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from podway.sandbox.access import shown_token
from podway.sandbox.faults import Call
from podway.sandbox.jsons import JsonObject
from podway.sandbox.names import stamp
from podway.sandbox.status import ApiError
from podway.sandbox.storage.buckets import Buckets, Stored, check_conditions, measure
from podway.sandbox.storage.uploads import RESUME_INCOMPLETE, Session, Uploads, as_json

_PATH = re.compile(
    r"^(?:/resumable)?(?:/(upload|download))?/storage/v1/b(?:/([^/]+)(?:/(o|iam|storageLayout|managedFolders|folders)(?:/(.+))?)?)?$"
)
_TO = re.compile(r"^(.+)/(rewriteTo|copyTo)/b/([^/]+)/o/(.+)$")
_MOVE = re.compile(r"^(.+)/moveTo/o/(.+)$")
_REASONS = {400: "invalid", 401: "required", 403: "forbidden", 404: "notFound", 409: "conflict", 412: "conditionNotMet"}
_BYTES = re.compile(r"^bytes=(\d*)-(\d*)$")
CHUNK = 1 << 20


def storage_error(error: ApiError) -> Response:
    """As Cloud Storage writes errors."""
    if error.http_code == 304:
        return Response(status_code=304)
    reason = _REASONS.get(error.http_code, "backendError")
    one = {"message": error.message, "domain": "global", "reason": reason}
    return _answer({"error": {"code": error.http_code, "message": error.message, "errors": [one]}}, error.http_code)


class Storage:
    """The methods."""

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self._uploads = Uploads(buckets)

    def has_session(self, id: str) -> bool:
        """Whether an upload is under way."""
        return self._uploads.has(id)

    def route(self, request: Request) -> tuple[Call, Callable[[], Awaitable[Response]]]:
        """What rules of faults see of a request, and how to do it."""
        # Not the decoded path: an object's name may have an encoded slash.
        raw = request.scope["raw_path"].decode("latin-1").partition("?")[0]
        found = _PATH.match(raw.rstrip("/") if raw.endswith(("/b/", "/o/")) else raw)
        if not found:
            raise ApiError("NOT_FOUND", f"The requested URL {raw} was not found on this server.")
        way, bucket, part, rest = found[1], unquote(found[2] or ""), found[3], found[4] or ""
        if not bucket:
            return self._on_buckets(request)
        if part == "o":
            return self._on_objects(request, way, bucket, rest)
        if part == "iam":
            return Call(service="storage", method="buckets.testIamPermissions", name=bucket), lambda: self._test(
                request, bucket
            )
        if part in (
            "managedFolders",
            "folders",
        ):  # of which this sandbox has none; gcloud asks before it deletes a bucket
            return _known(request, f"{part}.list", bucket, lambda: self._no_folders(part))
        return self._on_bucket(request, bucket, part == "storageLayout")

    # Buckets.

    def _on_buckets(self, request: Request) -> tuple[Call, Callable[[], Awaitable[Response]]]:
        method = {"GET": "buckets.list", "POST": "buckets.insert"}.get(request.method)
        project = request.query_params.get("project", "")

        async def do() -> Response:
            self.buckets.check_permission(str(method), "*")
            if method == "buckets.insert":
                return _answer(
                    self._bucket_view(request, self.buckets.make(project, await _body(request), time.time()))
                )
            prefix = request.query_params.get("prefix", "")
            shown = [
                self._bucket_view(request, one)
                for name, one in sorted(self.buckets.all.items())
                if name.startswith(prefix)
            ]
            return _answer({"kind": "storage#buckets", "items": shown})

        return _known(request, method, "", do)

    def _on_bucket(self, request: Request, name: str, layout: bool) -> tuple[Call, Callable[[], Awaitable[Response]]]:
        method = {
            "GET": "buckets.get",
            "DELETE": "buckets.delete",
            "PATCH": "buckets.patch",
            "PUT": "buckets.patch",
        }.get(request.method)

        async def do() -> Response:
            self.buckets.check_permission(str(method), name)
            if method == "buckets.delete":
                self.buckets.drop(name, time.time())
                return Response(status_code=204)
            if method == "buckets.patch":
                return _answer(self._bucket_view(request, self.buckets.change(name, await _body(request), time.time())))
            found = self.buckets.bucket(name)
            if layout:
                kept = {key: found[key] for key in ("location", "locationType")}
                return _answer(
                    {
                        "kind": "storage#storageLayout",
                        "bucket": name,
                        **kept,
                        "hierarchicalNamespace": {"enabled": False},
                    }
                )
            return _answer(self._bucket_view(request, found))

        return _known(request, method, name, do)

    async def _test(self, request: Request, bucket: str) -> Response:
        self.buckets.bucket(bucket)
        denied = self.buckets.denied.get(bucket, set()) | self.buckets.denied.get("*", set())
        asked = request.query_params.getlist("permissions")
        granted = [one for one in asked if one not in denied]
        return _answer({"kind": "storage#testIamPermissionsResponse", "permissions": granted})

    async def _no_folders(self, part: str) -> Response:
        return _answer({"kind": f"storage#{part}", "items": []})

    def _bucket_view(self, request: Request, bucket: JsonObject) -> JsonObject:
        return {**bucket, "selfLink": f"{_home(request)}/storage/v1/b/{bucket['name']}"}

    # Objects.

    def _on_objects(
        self, request: Request, way: str | None, bucket: str, rest: str
    ) -> tuple[Call, Callable[[], Awaitable[Response]]]:
        query = dict(request.query_params)
        if way == "upload":
            return self._on_upload(request, bucket, query)
        copying = _TO.match(rest)
        if copying and request.method == "POST":
            name, verb = unquote(copying[1]), "rewrite" if copying[2] == "rewriteTo" else "copy"
            target = (unquote(copying[3]), unquote(copying[4]))
            return _known(
                request, f"objects.{verb}", f"{bucket}/{name}", lambda: self._copy(request, verb, bucket, name, target)
            )
        moving = _MOVE.match(rest)
        if moving and request.method == "POST":
            name, new = unquote(moving[1]), unquote(moving[2])
            return _known(request, "objects.move", f"{bucket}/{name}", lambda: self._move(request, bucket, name, new))
        if rest.endswith("/compose") and request.method == "POST":
            name = unquote(rest.removesuffix("/compose"))
            return _known(request, "objects.compose", f"{bucket}/{name}", lambda: self._compose(request, bucket, name))
        name = unquote(rest)
        if not name:
            method = "objects.list" if request.method == "GET" else None
            return _known(request, method, bucket, lambda: self._list(request, bucket, query))
        methods = {"GET": "objects.get", "HEAD": "objects.get", "DELETE": "objects.delete"}
        method = methods.get(request.method, "objects.patch" if request.method in ("PATCH", "PUT") else None)
        down = way == "download" or query.get("alt") == "media"

        async def do() -> Response:
            self.buckets.check_permission(str(method), bucket, name)
            if method == "objects.delete":
                self.buckets.delete(bucket, name, query)
                return Response(status_code=204)
            if method == "objects.patch":
                return _answer(
                    self._view(request, self.buckets.edit(bucket, name, await _body(request), query, time.time()))
                )
            found = self.buckets.get(bucket, name, query)
            return _download(request, found) if down else _answer(self._view(request, found))

        return _known(request, method, f"{bucket}/{name}", do)

    def _on_upload(
        self, request: Request, bucket: str, query: dict[str, str]
    ) -> tuple[Call, Callable[[], Awaitable[Response]]]:
        session = query.get("upload_id")

        async def do() -> Response:
            self.buckets.check_permission("objects.insert", bucket, query.get("name", "-"))
            self.buckets.bucket(bucket)
            if session and request.method == "DELETE":
                self._uploads.cancel(session)
                return Response(status_code=499)
            if session:
                return await self._resumed(request, await self._uploads.go_on(request, session))
            if query.get("uploadType") == "resumable":
                check_conditions(self.buckets.find(bucket, query.get("name", "")), query if query.get("name") else {})
                id = await self._uploads.begin(request, bucket)
                where = f"{_home(request)}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={id}"
                return Response(status_code=200, headers={"Location": where, "X-GUploader-UploadID": id})
            multipart = query.get("uploadType") == "multipart"
            data, fields = await (self._uploads.multipart(request) if multipart else self._uploads.whole(request))
            name = query.get("name") or str(fields.get("name") or "")
            return _answer(self._view(request, await self._put(bucket, name, data, fields, query)))

        method = "objects.insert" if request.method in ("POST", "PUT", "DELETE") else None
        return _known(request, method, f"{bucket}/{query.get('name', '')}", do)

    async def _put(self, bucket: str, name: str, path: Path, fields: JsonObject, query: dict[str, str]) -> Stored:
        """Bytes that were written become an object; reading them for their hashes must not hold up everybody else."""
        content = await asyncio.to_thread(measure, path)
        return self.buckets.put(bucket, name, content, fields, query, time.time())

    async def _resumed(self, request: Request, got: Session | int) -> Response:
        if isinstance(got, int):
            headers = {"Range": f"bytes=0-{got - 1}"} if got else {}
            if (
                request.headers.get("x-guploader-no-308") == "yes"
            ):  # Google's Go client, which takes a 308 for a redirect
                return Response(status_code=200, headers={**headers, "X-Http-Status-Code-Override": "308"})
            return Response(status_code=RESUME_INCOMPLETE, headers=headers)
        stored = await self._put(got.bucket, got.fields["name"], got.data, got.fields, got.query)
        return _answer(self._view(request, stored))

    async def _list(self, request: Request, bucket: str, query: dict[str, str]) -> Response:
        self.buckets.check_permission("objects.list", bucket)
        items, prefixes, token = self.buckets.list_of(bucket, query)
        shown: JsonObject = {"kind": "storage#objects", "items": [self._view(request, item) for item in items]}
        if prefixes:
            shown["prefixes"] = prefixes
        return _answer({**shown, **({"nextPageToken": token} if token else {})})

    async def _copy(self, request: Request, verb: str, bucket: str, name: str, target: tuple[str, str]) -> Response:
        self.buckets.check_permission("objects.get", bucket, name)
        self.buckets.check_permission(f"objects.{verb}", target[0], target[1])
        query = dict(request.query_params)
        source = self.buckets.get(bucket, name, {"generation": query.get("sourceGeneration", "")})
        data = self.buckets.new_file()
        await asyncio.to_thread(shutil.copyfile, source.data.path, data)
        made = await self._put(*target, data, {**source.fields, **await _body(request)}, query)
        if verb == "copy":
            return _answer(self._view(request, made))
        size = str(made.data.size)
        whole = {"kind": "storage#rewriteResponse", "totalBytesRewritten": size, "objectSize": size, "done": True}
        return _answer({**whole, "resource": self._view(request, made)})

    async def _move(self, request: Request, bucket: str, name: str, new: str) -> Response:
        self.buckets.check_permission("objects.delete", bucket, name)
        answer = await self._copy(request, "copy", bucket, name, (bucket, new))
        self.buckets.delete(bucket, name, {})
        return answer

    async def _compose(self, request: Request, bucket: str, name: str) -> Response:
        self.buckets.check_permission("objects.compose", bucket, name)
        body = await _body(request)
        data = self.buckets.new_file()
        with open(data, "wb") as out:
            for one in body.get("sourceObjects") or []:
                out.write(self.buckets.get(bucket, str(one.get("name"))).data.path.read_bytes())
        fields = body.get("destination") or {}
        made = await self._put(bucket, name, data, fields, dict(request.query_params))
        return _answer(self._view(request, made))

    def _view(self, request: Request, stored: Stored) -> JsonObject:
        path = f"b/{quote(stored.bucket, safe='')}/o/{quote(stored.name, safe='')}"
        home = _home(request)
        return {
            "contentType": "application/octet-stream",
            "storageClass": "STANDARD",
            **stored.fields,
            "kind": "storage#object",
            "id": f"{stored.bucket}/{stored.name}/{stored.generation}",
            "name": stored.name,
            "bucket": stored.bucket,
            "generation": str(stored.generation),
            "metageneration": str(stored.metageneration),
            "size": str(stored.data.size),
            "md5Hash": stored.data.md5,
            "crc32c": stored.data.crc32c,
            "etag": f"C{stored.generation}/{stored.metageneration}",
            "timeCreated": stamp(stored.created),
            "updated": stamp(stored.updated),
            "selfLink": f"{home}/storage/v1/{path}",
            "mediaLink": f"{_home(request, login=True)}/download/storage/v1/{path}?generation={stored.generation}&alt=media",
        }


def _download(request: Request, stored: Stored) -> Response:
    start, end, status = 0, stored.data.size - 1, 200
    wanted = _BYTES.match(request.headers.get("range", ""))
    if wanted and (wanted[1] or wanted[2]):
        if not wanted[1]:
            start = max(0, stored.data.size - int(wanted[2]))
        else:
            start, end = int(wanted[1]), min(end, int(wanted[2] or end))
        status = 206
        if start >= stored.data.size:
            return Response("Requested range not satisfiable", 416, {"Content-Range": f"bytes */{stored.data.size}"})
    headers = {
        "Content-Length": str(end - start + 1),
        "X-Goog-Hash": f"crc32c={stored.data.crc32c},md5={stored.data.md5}",
        "X-Goog-Generation": str(stored.generation),
        "X-Goog-Metageneration": str(stored.metageneration),
        "X-Goog-Stored-Content-Length": str(stored.data.size),
        "X-Goog-Stored-Content-Encoding": "identity",
        "X-Goog-Storage-Class": "STANDARD",
        "ETag": f'"{stored.data.md5}"',
        "Accept-Ranges": "bytes",
    }
    if status == 206:
        headers["Content-Range"] = f"bytes {start}-{end}/{stored.data.size}"
    kind = str(stored.fields.get("contentType") or "application/octet-stream")
    file = open(stored.data.path, "rb")  # noqa: SIM115 - now, as the object may be replaced before the last byte is sent

    async def chunks() -> AsyncIterator[bytes]:
        with file:
            file.seek(start)
            left = end - start + 1
            while left > 0 and (chunk := file.read(min(CHUNK, left))):
                left -= len(chunk)
                yield chunk

    return StreamingResponse(chunks(), status, headers, media_type=kind)


def _known(
    request: Request, method: str | None, name: str, do: Callable[[], Awaitable[Response]]
) -> tuple[Call, Callable[[], Awaitable[Response]]]:
    if method is None:
        raise ApiError("NOT_FOUND", f"There is no {request.method} of {request.url.path}.")
    return Call(service="storage", method=method, name=name), do


async def _body(request: Request) -> JsonObject:
    return as_json(await request.body())


def _answer(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json; charset=UTF-8")


def _home(request: Request, *, login: bool = False) -> str:
    """The address that the client used; with the login it put there, where links have to work by themselves."""
    token = shown_token(request.headers.get("authorization", "")) if login else ""
    basic = request.headers.get("authorization", "").lower().startswith("basic ")
    return f"http://{f'sandbox:{token}@' if token and basic else ''}{request.headers.get('host', '')}"
