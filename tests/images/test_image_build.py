"""`podway image build` against a real registry that asks for a password: the image, its bytes, and what is sent again."""

import base64
import gzip
import http.server
import io
import json
import shutil
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.cli.image import with_image_of_workdir
from podway.errors import UserError
from podway.hosts.tree import scan
from podway.images.build import build_image, encoded
from podway.images.layer import write_layer
from podway.images.login import find_login
from podway.images.reference import parse_reference
from podway.images.registry import INDEXES, MANIFESTS, Registry, digest_of
from podway.order import Order
from podway.providers.gke.manifests import JobSetContext
from podway.providers.gke.one_shot import render_one_shot
from podway.task.task import LocalDir, Resources, Task, container_image
from tests.cli.conftest import Run, home, run, stub
from tests.cli.stub import Stub
from tests.containers.tools import PASSWORD, USER, registry

__all__ = ["home", "run", "stub"]  # fixtures
pytestmark = pytest.mark.skipif(not shutil.which("docker-registry"), reason="docker-registry is not installed")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture
def login(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which docker keeps its logins."""
    folder = tmp_path / "docker"
    folder.mkdir()
    auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {address: {"auth": auth}}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    return folder / "config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "work"
    (place / "data").mkdir(parents=True)
    (place / "train.py").write_text("print('trained')\n")
    (place / "run.sh").write_text("#!/bin/sh\n")
    (place / "run.sh").chmod(0o755)
    (place / "empty").touch()
    (place / "data" / "größe.txt").write_text("x" * 1000)
    (place / "link").symlink_to("train.py")
    (place / ".gitignore").write_text("*.log\n")
    (place / "noise.log").write_text("noise")
    return place


def push_base(name: str, *, kind: str = MANIFESTS[0], indexed: bool = False) -> str:
    """A base image of one layer."""
    into = Registry(parse_reference(name))
    plain = io.BytesIO()
    with tarfile.open(mode="w", fileobj=plain) as tar:
        info = tarfile.TarInfo("etc/base")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"base"))
    layer = gzip.compress(plain.getvalue(), mtime=0)
    config = encoded(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["A=1"], "Cmd": ["sh"]},
            "rootfs": {"type": "layers", "diff_ids": [digest_of(plain.getvalue())]},
            "history": [{"created_by": "base"}],
        }
    )
    for data in (layer, config):
        if not into.has(digest_of(data)):
            into.upload(digest_of(data), len(data), lambda data=data: io.BytesIO(data))  # type: ignore[misc]
    manifest = {
        "schemaVersion": 2,
        "mediaType": kind,
        "config": {"mediaType": "x", "size": len(config), "digest": digest_of(config)},
        "layers": [{"mediaType": "y", "size": len(layer), "digest": digest_of(layer)}],
    }
    data = encoded(manifest)
    into.put_manifest("one", kind, data)
    if indexed:
        entries = [
            {"mediaType": kind, "size": len(data), "digest": digest_of(data), "platform": platform}
            for platform in ({"os": "linux", "architecture": "arm64"}, {"os": "linux", "architecture": "amd64"})
        ]
        index = encoded({"schemaVersion": 2, "mediaType": INDEXES[0], "manifests": entries})
        into.put_manifest("all", INDEXES[0], index)
    return name


def read_image(reference: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, tarfile.TarInfo], dict[str, bytes]]:
    """The manifest, the configuration, and what the last layer holds."""
    source = Registry(parse_reference(reference))
    _, manifest, _ = source.manifest(reference.rpartition("@")[2])
    config = source.json_blob(manifest["config"]["digest"])
    with source.open_blob(manifest["layers"][-1]["digest"]) as answer:
        data = answer.read()
    assert digest_of(data) == manifest["layers"][-1]["digest"]
    assert digest_of(gzip.decompress(data)) == config["rootfs"]["diff_ids"][-1]
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = {one.name: one for one in tar.getmembers()}
        files = {name: tar.extractfile(one).read() for name, one in members.items() if one.isfile()}  # type: ignore[union-attr]
    return manifest, config, members, files


def test_a_directory_becomes_an_image(run: Run, address: str, login: Path, folder: Path) -> None:
    base = push_base(f"{address}/base/python")
    result = run("image", "build", str(folder), "--base", f"{base}:one", "--to", f"{address}/team/train:v1")
    assert result.code == 0, result.err
    reference = result.out.strip()
    assert reference.startswith(f"{address}/team/train@sha256:")
    manifest, config, members, files = read_image(reference)
    assert len(manifest["layers"]) == len(config["rootfs"]["diff_ids"]) == 2 and manifest["mediaType"] == MANIFESTS[0]
    assert config["config"] == {"Env": ["A=1"], "Cmd": ["sh"], "WorkingDir": "/workdir"}
    assert set(files) == {f"workdir/{name}" for name in ("train.py", "run.sh", "empty", "data/größe.txt", ".gitignore")}
    assert files["workdir/train.py"] == b"print('trained')\n"
    assert (members["workdir/run.sh"].mode, members["workdir/train.py"].mode) == (0o755, 0o644)
    assert members["workdir/link"].linkname == "train.py"
    assert {(one.uid, one.gid, one.mtime) for one in members.values()} == {(0, 0, 0)}
    assert Registry(parse_reference(f"{address}/team/train")).manifest("v1")[2] == reference.rpartition("@")[2]


def test_the_same_directory_is_the_same_image_and_is_not_sent_again(
    address: str, login: Path, folder: Path, tmp_path: Path
) -> None:
    """Another checkout, with other times and another umask. A change sends its layer and the configuration alone."""
    base = parse_reference(push_base(f"{address}/again/base") + ":one")
    target = parse_reference(f"{address}/again/image")

    def build(place: Path) -> Any:
        return build_image(scan(place), base, target, "/workdir", lambda text: None)

    first = build(folder)
    assert first.sent > 0
    other = tmp_path / "elsewhere"
    shutil.copytree(folder, other, symlinks=True, copy_function=shutil.copyfile)
    (other / "run.sh").chmod(0o700)
    (other / "train.py").chmod(0o600)
    second = build(other)
    assert second.image == first.image and second.sent == 0
    (other / "train.py").write_text("print('changed')\n")
    third = build(other)
    assert third.image != first.image and third.layer.size < third.sent < third.layer.size + 2000


def test_bases_of_either_kind_and_of_many_platforms(address: str, login: Path, folder: Path) -> None:
    target = parse_reference(f"{address}/kinds/image:1")
    push_base(f"{address}/kinds/oci", indexed=True)
    push_base(f"{address}/kinds/docker", kind=MANIFESTS[1])
    for name, kind in (("oci:all", MANIFESTS[0]), ("docker:one", MANIFESTS[1])):
        base = parse_reference(f"{address}/kinds/{name}")
        built = build_image(scan(folder), base, target, "/app", lambda text: None)
        manifest, config, _, files = read_image(str(built.image))
        assert manifest["mediaType"] == kind and config["config"]["WorkingDir"] == "/app" and "app/train.py" in files


def test_no_login_a_wrong_one_and_what_is_not_there(run: Run, address: str, login: Path, folder: Path) -> None:
    push_base(f"{address}/private/base")
    arguments = ["image", "build", str(folder), "--to", f"{address}/private/out", "--base"]
    result = run(*arguments, f"{address}/private/none:1")
    assert result.code == 1 and f"there is no image {address}/private/none:1" in result.err
    for document in ({}, {"auths": {address: {"auth": base64.b64encode(b"puller:wrong").decode()}}}):
        login.write_text(json.dumps(document))
        result = run(*arguments, f"{address}/private/base:one")
        assert result.code == 1 and "does not let you use private/base" in result.err
        assert f"docker login {address}" in result.err and "wrong" not in result.err
    login.write_text("{")
    assert "cannot be read" in run(*arguments, f"{address}/private/base:one").err
    result = run(*arguments, "127.0.0.1:9/x/base:1")
    login.write_text("{}")
    result = run(*arguments, "127.0.0.1:9/x/base:1")
    assert result.code == 1 and "the registry 127.0.0.1:9 cannot be reached" in result.err


def test_a_login_of_a_helper(login: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "docker-credential-mine"
    helper.write_text('#!/bin/sh\nread name\n[ "$name" = a.example ] && echo \'{"Username": "u", "Secret": "s"}\'\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    login.write_text(json.dumps({"credHelpers": {"a.example": "mine", "b.example": "missing"}}))
    found = find_login("a.example")
    assert found is not None and (found.user, found.password) == ("u", "s")
    assert find_login("b.example") is None and find_login("c.example") is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--base", "UPPER", "--to", "a.example/b"], "'UPPER' is not the name of an image"),
        (["--base", "a:b:c", "--to", "a.example/b"], "is not the name of an image"),
        (["--base", "python", "--to", "../b"], "is not the name of an image"),
        (["--base", "python", "--to", "a.example/b", "--path", "workdir"], "not a directory of an image"),
        (["--base", "python", "--to", "a.example/b", "--path", "/a/../b"], "not a directory of an image"),
        (["--base", "python", "--to", "a.example/b", "nowhere"], "nowhere does not exist"),
    ],
)
def test_bad_input(run: Run, arguments: list[str], said: str) -> None:
    result = run("image", "build", *arguments)
    assert result.code == 1 and said in result.err and "Traceback" not in result.err


@given(st.text(max_size=60))
def test_any_text_is_a_name_or_an_error(text: str) -> None:
    try:
        found = parse_reference(text)
    except UserError:
        return
    assert parse_reference(str(found)) == found


def test_names() -> None:
    assert str(parse_reference("python:3.12")) == "docker.io/library/python:3.12"
    assert parse_reference("python").address == "registry-1.docker.io"
    assert str(parse_reference("docker:me/x")) == "docker.io/me/x"
    assert str(parse_reference("localhost/x:1")) == "localhost/x:1"
    digest = "sha256:" + "0" * 64
    assert str(parse_reference(f"us-docker.pkg.dev/p/r/i@{digest}")) == f"us-docker.pkg.dev/p/r/i@{digest}"


def test_a_file_that_changes_while_it_is_packed_is_refused(folder: Path) -> None:
    found = scan(folder)
    (folder / "train.py").write_text("print('TRAINED')\n")
    with pytest.raises(UserError, match="changed"):
        write_layer(found, "/workdir", io.BytesIO())


def test_a_one_shot_run_has_its_workdir_in_the_image(run: Run, address: str, login: Path, folder: Path) -> None:
    """Without a push (--dryrun) the name is the same, and nothing is sent."""
    base = push_base(f"{address}/run/base")
    repository = f"{address}/run/image"
    resources = Resources(image=f"docker:{base}:one")
    task = Task(run="python3 train.py", workdir=LocalDir(path=str(folder)), resources=(resources,), working_dir="data")
    shown = with_image_of_workdir(task, repository, push=False)
    with pytest.raises(UserError, match="there is no image"):
        Registry(parse_reference(repository)).manifest("latest")
    made = with_image_of_workdir(task, repository, push=True)
    assert made == shown and made.workdir is None and made.working_dir == "/workdir/data"
    image = container_image(made.resources[0].image)
    assert image is not None and read_image(image)[3]["workdir/train.py"] == b"print('trained')\n"
    order = Order(accelerator_type=None, provider="gke", image=made.resources[0].image)
    request = render_one_shot(JobSetContext(owner="o", context="c", namespace="n"), "run", order, made, "ada")
    (container,) = request.steps[-1].body["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ]  # type: ignore[index]
    assert container["image"] == image and "cd /workdir/data" in container["command"][-1]


def test_push_needs_a_one_shot_run_and_a_workdir(run: Run, stub: Stub) -> None:
    assert "add --one-shot" in run("launch", "--push", "a.example/b", "true").err
    assert "the task has none" in run("launch", "--one-shot", "--push", "a.example/b", "true").err


class _Tokens(http.server.BaseHTTPRequestHandler):
    """A registry in memory that takes tokens alone, one for reading and one for writing, and keeps contents on another host."""

    kept: dict[str, bytes]
    leaked: list[str]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, _, query = self.path.partition("?")
        own, shown = f"127.0.0.1:{self.server.server_address[1]}", self.headers.get("Authorization") or ""  # type: ignore[attr-defined]
        if path == "/token":
            good = shown == "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            word = "write" if "push" in query else "read"
            self._answer(200 if good else 401, json.dumps({"token": word}).encode() if good else b"")
        elif path.startswith("/storage/"):
            self.leaked.append(shown)
            self._answer(200, self.kept[path.removeprefix("/storage/")])
        elif shown != "Bearer write" and not (shown == "Bearer read" and self.command in ("GET", "HEAD")):
            scope = "pull" if self.command in ("GET", "HEAD") else "pull,push"
            realm = f'Bearer realm="http://{own}/token",service="s",scope="repository:x:{scope}"'
            self._answer(401, b"", {"WWW-Authenticate": realm})
        elif self.command == "POST":
            self._answer(202, b"", {"Location": "/v2/x/blobs/uploads/1?state=a"})
        elif self.command == "PUT":
            self.kept[unquote(query.rpartition("digest=")[2]) if "/blobs/" in path else path.rpartition("/")[2]] = data
            self._answer(201, b"")
        elif (name := path.rpartition("/")[2]) not in self.kept:
            self._answer(404, b"")
        elif "/blobs/" in path and self.command == "GET":
            self._answer(307, b"", {"Location": f"http://localhost:{own.rpartition(':')[2]}/storage/{name}"})
        else:
            self._answer(200, self.kept[name], {"Content-Type": MANIFESTS[0]})

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def test_a_registry_with_tokens_and_contents_elsewhere(login: Path, folder: Path) -> None:
    """As the public ones are: a token for reading, another for writing, and no login shown where a redirect leads."""
    handler = type("Handler", (_Tokens,), {"kept": {}, "leaked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            name = f"127.0.0.1:{server.server_address[1]}"
            auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            login.write_text(json.dumps({"auths": {name: {"auth": auth}}}))
            base = parse_reference(push_base(f"{name}/x") + ":one")
            built = build_image(scan(folder), base, parse_reference(f"{name}/x:new"), "/workdir", lambda text: None)
            assert digest_of(handler.kept["new"]) == built.image.digest
            assert handler.leaked and set(handler.leaked) == {""}
            login.write_text("{}")
            with pytest.raises(UserError, match="does not let you use x"):
                build_image(scan(folder), base, base, "/workdir", lambda text: None)
        finally:
            server.shutdown()
            thread.join(60)


class _Hostile(http.server.BaseHTTPRequestHandler):
    """A registry that answers nonsense, or asks for the password over an open wire."""

    def do_GET(self) -> None:
        name = self.path.split("/")[2]
        if name == "login":
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Bearer realm="http://elsewhere.example/token"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = {"list": b"[1]", "text": b"no", "empty": b"{}", "odd": b'{"layers": 3, "config": {"digest": 1}}'}[name]
        self.send_response(200)
        self.send_header("Content-Type", MANIFESTS[0])
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def test_a_registry_that_answers_nonsense(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hostile) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            for name in ("list", "text", "empty", "odd", "login"):
                base = parse_reference(f"127.0.0.1:{server.server_address[1]}/{name}:1")
                with pytest.raises(UserError):
                    build_image(scan(folder), base, base, "/workdir", lambda text: None)
        finally:
            server.shutdown()
            thread.join(60)
