"""A command and a server of different versions: a sentence that says which is older, and what to do."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from podway.errors import UserError
from podway.server import api, client, connection
from podway.version import __version__
from tests.server.in_process import server_in
from tests.server.test_retries import Flaky, make

__all__ = ["make"]  # a fixture: servers that answer as told
TOKEN = {"Authorization": "Bearer admin"}


@pytest.fixture
def web(tmp_path: Path) -> Iterator[TestClient]:
    with server_in(tmp_path, "admin") as found:
        yield found


@pytest.mark.parametrize(
    ("told", "which", "hint"),
    [
        ("2 9.9.9", "a newer one, 9.9.9", "upgrade the server"),
        ("0 0.0.1", "an older one, 0.0.1", f"pip install podway=={__version__}"),
        ("\xb2", "an older one", "pip install"),
        ("9" * 5000, "a newer one", "upgrade the server"),
    ],
)
def test_another_api_is_refused_with_what_to_do(web: TestClient, told: str, which: str, hint: str) -> None:
    headers = {**TOKEN, api.VERSION_HEADER: told.encode("latin-1")}
    answer = web.get("/v1/clusters", headers=headers)  # type: ignore[arg-type]
    error = answer.json()["error"]
    assert answer.status_code == 426 and error["code"] == "other_version"
    assert f"this server is Podway {__version__}" in error["what"] and which in error["what"]
    assert hint in error["hint"]
    assert web.get("/v1/info", headers=headers).status_code == 200  # type: ignore[arg-type]


def test_the_same_api_and_no_word_of_it_are_answered(web: TestClient) -> None:
    for headers in (TOKEN, {**TOKEN, api.VERSION_HEADER: f"{api.VERSION} 9.9.9"}):
        assert web.get("/v1/clusters", headers=headers).status_code == 200


def test_a_field_that_this_server_does_not_know_names_both_versions(web: TestClient) -> None:
    headers = {**TOKEN, api.VERSION_HEADER: f"{api.VERSION} 9.9.9"}
    answer = web.post("/v1/tokens", headers=headers, json={"user": "ann", "colour": "red"})
    assert answer.status_code == 400
    assert answer.json()["error"]["hint"] == f"this server is Podway {__version__}, the command 9.9.9: install the same"


def test_an_answer_that_cannot_be_read_is_a_sentence(make: type[Flaky]) -> None:
    asked = client.Client(make().url, "t")  # its answer lacks what `info` has
    with pytest.raises(UserError, match=f"this is Podway {__version__}, and it cannot read what the server at http"):
        asked.info()


def test_the_own_server_of_another_version_is_to_be_restarted(
    make: type[Flaky], podway_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make("426 other_version")
    podway_home.mkdir(mode=0o700)
    (podway_home / "server.json").write_text(f'{{"url": "{server.url}", "token": "t"}}')
    with pytest.raises(UserError) as refused:
        client.Client().clusters()
    assert refused.value.hint == "restart it with this version: podway server stop"
    assert connection.OTHER_VERSION == "other_version"
