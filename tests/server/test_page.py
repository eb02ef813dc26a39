"""The page's files, its sessions, and what another site's page cannot do."""

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from starlette.testclient import TestClient

from podway.server.page import FOLDER, POLICY, read_files
from podway.server.sessions import LINK_S, MOST, SESSION_S, Session, Sessions, cookie_name, csrf_matches
from tests.server.in_process import server_in


def test_a_link_opens_one_session_once_and_not_later() -> None:
    sessions = Sessions()
    code = sessions.make_link("digest", now=0.0)
    cookie = sessions.open(code, now=1.0)
    assert cookie is not None
    assert sessions.open(code, now=1.0) is None
    assert sessions.open(sessions.make_link("digest", now=0.0), now=LINK_S) is None
    assert sessions.open("", now=0.0) is None
    found = sessions.find(cookie, now=2.0)
    assert found is not None and found.token_digest == "digest"
    assert sessions.find(cookie, now=SESSION_S + 2.0) is None
    sessions.close(cookie)
    assert sessions.find(cookie, now=2.0) is None
    assert sessions.find("", now=2.0) is None


def test_memory_is_bounded() -> None:
    sessions = Sessions()
    for number in range(MOST + 5):
        assert sessions.open(sessions.make_link(str(number), now=0.0), now=0.0)
        sessions.make_link(str(number), now=0.0)
    assert len(sessions._sessions) <= MOST and len(sessions._links) <= MOST


TOKEN = "test-token"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[TestClient]:
    with server_in(tmp_path, TOKEN) as client:
        yield client


def log_in(web: TestClient) -> str:
    """Open a session as `podway ui` and a browser do; the CSRF token of its page."""
    link = web.post("/v1/session-links", headers={"Authorization": f"Bearer {TOKEN}"}).json()["path"]
    answer = web.get(link, follow_redirects=False)
    cookie = answer.headers["set-cookie"]
    assert answer.headers["location"] == "/page/"
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    return str(web.get("/v1/session").json()["csrf"])


def test_a_session_reads_and_changes_with_its_token_alone(web: TestClient) -> None:
    assert web.get("/v1/clusters").status_code == 401
    csrf = log_in(web)
    assert web.get("/v1/clusters").status_code == 200
    body = {"model": "llama3.1-8b", "tpu": "v6e-8"}
    assert web.post("/v1/plan", json=body).status_code == 403  # a page of another site has the cookie and no more
    assert web.post("/v1/plan", json=body, headers={"X-Podway-CSRF": "wrong"}).status_code == 403
    assert web.post("/v1/plan", json=body, headers={"X-Podway-CSRF": csrf}).status_code == 200
    assert (
        web.post("/v1/session-links", headers={"X-Podway-CSRF": csrf}).status_code == 403
    )  # no session out of a session
    assert web.delete("/v1/session", headers={"X-Podway-CSRF": csrf}).status_code == 200
    assert web.get("/v1/clusters").status_code == 401


def test_a_session_ends_with_its_token(web: TestClient) -> None:
    admin = {"Authorization": f"Bearer {TOKEN}"}
    token = web.post("/v1/tokens", json={"user": "bob"}, headers=admin).json()["token"]
    link = web.post("/v1/session-links", headers={"Authorization": f"Bearer {token}"}).json()["path"]
    assert web.get(link, follow_redirects=False).status_code == 303
    assert web.get("/v1/clusters").status_code == 200
    assert web.delete("/v1/users/bob", headers=admin).status_code == 200
    assert web.get("/v1/clusters").status_code == 401


def test_a_wrong_token_is_not_helped_by_a_cookie(web: TestClient) -> None:
    log_in(web)
    assert web.get("/v1/clusters", headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_files_have_the_policy_and_are_not_sent_twice(web: TestClient) -> None:
    first = web.get("/page/app.js")
    assert first.headers["content-security-policy"] == POLICY
    assert first.headers["content-type"].startswith("text/javascript")
    assert web.get("/page/app.js", headers={"If-None-Match": first.headers["etag"]}).status_code == 304
    assert web.get("/page/clusters/demo").text.startswith("<!doctype html>")  # a view
    for path in ("/page/../server/main.py", "/page/%2e%2e/errors.py", "/page/nothing.js", "/page/vendor/../../x.css"):
        assert "import" not in web.get(path).text
    assert web.get("/login?code=wrong", follow_redirects=False).headers["location"] == "/page/expired"


def test_changes_are_told(web: TestClient) -> None:
    answer = web.get("/v1/changes?seconds=0.05", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200
    assert msgspec.json.decode(answer.text.splitlines()[0]) == {"changed": False}


def test_the_catalog_is_told(web: TestClient) -> None:
    slices = web.get("/v1/slices", headers={"Authorization": f"Bearer {TOKEN}"}).json()["slices"]
    found = next(one for one in slices if one["type"] == "v6e-16")
    assert (found["chips"], found["hosts"], found["topology"]) == (16, 4, "4x4") and found["prices"]


def test_servers_on_other_ports_of_one_machine_have_other_cookies() -> None:
    names = [cookie_name(host) for host in ("127.0.0.1:4000", "127.0.0.1:4001", "podway.example.com", "[::1]:4000", "")]
    assert names == [
        "podway_session_4000",
        "podway_session_4001",
        "podway_session",
        "podway_session_4000",
        "podway_session",
    ]


def test_csrf() -> None:
    session = Session(token_digest="d", csrf="abc", expires=1.0)
    assert csrf_matches(session, "abc")
    assert not any(csrf_matches(session, wrong) for wrong in (None, "", "abd", "abc ", "\udcff"))


def test_nothing_of_the_page_needs_another_server_or_inline_code() -> None:
    for path in FOLDER.rglob("*"):
        if path.suffix not in (".html", ".js", ".css", ".svg") or "vendor" in path.parts:
            continue
        text = path.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert not re.search(
            r"<script(?![^>]*\bsrc=)|\son[a-z]+=\"|javascript:|innerHTML|\beval\(|new Function", text
        ), path
        assert not re.search(r"\bstyle=", text), f"{path}: an inline style is refused by the policy"
    assert "unsafe" not in POLICY


def test_all_of_it_is_small() -> None:
    files = read_files()
    assert sum(len(one.compressed) for one in files.values()) < 300_000
    assert all(gzip.decompress(one.compressed) == one.content for one in files.values())


def test_every_import_leads_to_a_file() -> None:
    for path in FOLDER.rglob("*.js"):
        if "vendor" not in path.parts:
            for target in re.findall(r'from "(\.[^"]+)"', path.read_text()):
                assert (path.parent / target).resolve().is_file(), f"{path.name} imports {target}"


def test_vendored_files_come_with_their_licences() -> None:
    text = (Path(FOLDER) / "vendor" / "LICENSES.txt").read_text()
    assert "Preact" in text and "uPlot" in text and "MIT" in text
