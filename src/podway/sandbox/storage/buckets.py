"""Buckets and objects: what Cloud Storage keeps, with generations, preconditions, hashes and who may do what.

An object's bytes are a file of their own under the state directory, written before the object exists and named by its
generation; replacing an object makes a new file, so a download that has begun reads what it began with.
"""

import base64
import hashlib
import itertools
import re
import shutil
import time
from pathlib import Path

import google_crc32c
import msgspec

from podway.sandbox.jsons import JsonObject
from podway.sandbox.ledger import Ledger
from podway.sandbox.names import project_number, stamp
from podway.sandbox.status import ApiError, invalid

_BUCKET = re.compile(
    r"^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$"
)  # Google's page on bucket names, without the dotted long form
# What a method needs (Google's page "IAM permissions for JSON methods").
PERMISSIONS = {
    "buckets.get": "storage.buckets.get",
    "buckets.insert": "storage.buckets.create",
    "buckets.list": "storage.buckets.list",
    "buckets.delete": "storage.buckets.delete",
    "buckets.patch": "storage.buckets.update",
    "objects.get": "storage.objects.get",
    "objects.list": "storage.objects.list",
    "objects.insert": "storage.objects.create",
    "objects.delete": "storage.objects.delete",
    "objects.patch": "storage.objects.update",
    "objects.rewrite": "storage.objects.create",
    "objects.copy": "storage.objects.create",
    "objects.compose": "storage.objects.create",
}


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes in a file, with what Cloud Storage knows of them."""

    path: Path
    size: int
    md5: str
    crc32c: str


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """One object."""

    bucket: str
    name: str
    generation: int
    metageneration: int
    data: Content
    created: float
    updated: float
    fields: JsonObject  # contentType, metadata, cacheControl and so on, as given


class Buckets:
    """All of them."""

    def __init__(self, place: Path, ledger: Ledger) -> None:
        self._place, self._ledger = place, ledger
        shutil.rmtree(place, ignore_errors=True)  # what a sandbox left that was killed
        place.mkdir(parents=True)
        self.all: dict[str, JsonObject] = {}
        self.objects: dict[str, dict[str, Stored]] = {}
        self.denied: dict[str, set[str]] = {}  # bucket (or *) -> permissions taken away
        self._files = itertools.count()
        self._last_generation = 0

    def check_permission(self, method: str, bucket: str, name: str = "") -> None:
        """Refuse what was forbidden by command."""
        permission = PERMISSIONS.get(method, "")
        if permission in self.denied.get(bucket, set()) | self.denied.get("*", set()):
            kind = "object" if name else "bucket"
            raise ApiError(
                "PERMISSION_DENIED",
                f"sandbox@sandbox.iam.gserviceaccount.com does not have {permission} access to the Google Cloud Storage {kind}. "
                f"Permission '{permission}' denied on resource (or it may not exist).",
            )

    def bucket(self, name: str) -> JsonObject:
        """One bucket."""
        if name not in self.all:
            raise ApiError("NOT_FOUND", "The specified bucket does not exist.")
        return self.all[name]

    def make(self, project: str, body: JsonObject, now: float) -> JsonObject:
        """A new bucket; its name is the world's."""
        name = str(body.get("name") or "")
        if not _BUCKET.match(name):
            raise invalid(f"Invalid bucket name: '{name}'")
        if name in self.all:
            raise ApiError(
                "ALREADY_EXISTS", "Your previous request to create the named bucket succeeded and you already own it."
            )
        made = {
            "kind": "storage#bucket",
            "id": name,
            "projectNumber": project_number(project),
            "metageneration": "1",
            "location": "US",
            "storageClass": "STANDARD",
            "etag": "CAE=",
            "locationType": "region" if "-" in str(body.get("location", "")) else "multi-region",
            "timeCreated": stamp(now),
            "updated": stamp(now),
            **body,
            "name": name,
        }
        made["location"] = str(made["location"]).upper()
        self.all[name], self.objects[name] = made, {}
        self._ledger.made("bucket", f"projects/{project}/buckets/{name}", now, labels=body.get("labels"))
        return made

    def change(self, name: str, body: JsonObject, now: float) -> JsonObject:
        """Patch a bucket."""
        changed = {**self.bucket(name), **body, "updated": stamp(now)}
        changed["metageneration"] = str(int(changed["metageneration"]) + 1)
        self.all[name] = changed
        return changed

    def drop(self, name: str, now: float) -> None:
        """Delete an empty bucket."""
        self.bucket(name)
        if self.objects[name]:
            raise ApiError("ALREADY_EXISTS", "The bucket you tried to delete is not empty.")
        del self.all[name], self.objects[name]
        entry = next(one for one in self._ledger.living if one.endswith(f"/buckets/{name}"))
        self._ledger.gone(entry, now)

    def new_file(self) -> Path:
        """Where bytes may be written that are to become an object."""
        return self._place / f"{time.time_ns()}-{next(self._files)}"

    def find(self, bucket: str, name: str) -> Stored | None:
        """The object, if it is there."""
        self.bucket(bucket)
        return self.objects[bucket].get(name)

    def get(self, bucket: str, name: str, query: dict[str, str] | None = None) -> Stored:
        """The object, in the generation asked for."""
        found = self.find(bucket, name)
        wanted = (query or {}).get("generation")
        if found is None or (wanted and wanted != str(found.generation)):
            raise ApiError("NOT_FOUND", f"No such object: {bucket}/{name}")
        check_conditions(found, query or {})
        return found

    def put(
        self, bucket: str, name: str, data: Content, fields: JsonObject, query: dict[str, str], now: float
    ) -> Stored:
        """Bytes become an object, replacing another if the conditions allow it."""
        if not name or len(name.encode()) > 1024:
            raise invalid("Required: an object name of at most 1024 bytes")
        before = self.find(bucket, name)
        check_conditions(before, query)
        for key, true in (("md5Hash", data.md5), ("crc32c", data.crc32c)):
            if fields.get(key) not in (None, true):
                raise invalid(f"Provided {key} '{fields[key]}' doesn't match calculated {key} '{true}'.")
        self._last_generation = max(self._last_generation + 1, int(now * 1_000_000))
        kept = {
            key: value for key, value in fields.items() if key not in ("name", "bucket", "md5Hash", "crc32c", "size")
        }
        made = Stored(
            bucket=bucket,
            name=name,
            generation=self._last_generation,
            metageneration=1,
            data=data,
            created=now,
            updated=now,
            fields=kept,
        )
        self.objects[bucket][name] = made
        if before is not None:
            before.data.path.unlink(missing_ok=True)
        return made

    def edit(self, bucket: str, name: str, body: JsonObject, query: dict[str, str], now: float) -> Stored:
        """Change what is said of an object, not its bytes."""
        found = self.get(bucket, name, query)
        fields = {**found.fields, **body}
        changed = msgspec.structs.replace(found, fields=fields, metageneration=found.metageneration + 1, updated=now)
        self.objects[bucket][name] = changed
        return changed

    def delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        """Delete an object."""
        found = self.get(bucket, name, query)
        del self.objects[bucket][name]
        found.data.path.unlink(missing_ok=True)

    def list_of(self, bucket: str, query: dict[str, str]) -> tuple[list[Stored], list[str], str]:
        """Objects, prefixes up to the delimiter, and where the next page starts."""
        self.bucket(bucket)
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        first, end, after = query.get("startOffset", ""), query.get("endOffset", ""), query.get("pageToken", "")
        most = min(int(query.get("maxResults") or 1000), 1000)
        items: list[Stored] = []
        prefixes: list[str] = []
        for name in sorted(self.objects[bucket]):
            if not name.startswith(prefix) or name < first or (end and name >= end):
                continue
            inner = name[len(prefix) :]
            folder = prefix + inner.split(delimiter, 1)[0] + delimiter if delimiter and delimiter in inner else ""
            key = folder or name
            if key <= after or (folder and folder in prefixes):
                continue
            if len(items) + len(prefixes) == most:
                return items, prefixes, max([item.name for item in items] + prefixes)
            if folder:
                prefixes.append(folder)
            if not folder or (query.get("includeTrailingDelimiter") == "true" and name == folder):
                items.append(self.objects[bucket][name])
        return items, prefixes, ""


def check_conditions(found: Stored | None, query: dict[str, str]) -> None:
    """Preconditions on generation and metageneration; generation 0 means that there is no object."""
    actual = {
        "Generation": found.generation if found else 0,
        "Metageneration": found.metageneration if found else 0,
    }
    for what, number in actual.items():
        wanted, unwanted = query.get(f"if{what}Match"), query.get(f"if{what}NotMatch")
        if wanted is not None and int(wanted) != number:
            raise ApiError("CONDITION_NOT_MET", "At least one of the pre-conditions you specified did not hold.")
        if unwanted is not None and int(unwanted) == number:
            raise ApiError("NOT_MODIFIED", "")


def measure(path: Path) -> Content:
    """Read a file once through, for its size and hashes."""
    md5, crc, size = hashlib.md5(usedforsecurity=False), 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            md5.update(chunk)
            crc = google_crc32c.extend(crc, chunk)
            size += len(chunk)
    digests = (base64.b64encode(digest).decode() for digest in (md5.digest(), crc.to_bytes(4, "big")))
    return Content(path=path, size=size, md5=next(digests), crc32c=next(digests))
