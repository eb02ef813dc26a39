"""Why a pull failed, in one line, whatever the registry answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.hosts.agent.pull import cause, last_line, registry_of

SAID = {
    "Error: writing blob: adding layer: write /var/lib/x: no space left on device": "the disk of this host is full",
    "Error response from daemon: pull access denied for x, repository does not exist": "it is not found, or needs credentials",
    "Error: reading manifest 1 in r/x: unauthorized: authentication required": "the registry refuses these credentials",
    "Error response from daemon: manifest for r/x:9 not found: manifest unknown": "it is not found: check its name and tag",
    "Error: pinging r: Get https://r/v2/: dial tcp: lookup r: no such host": "the registry cannot be reached",
    "Error: Get https://r/v2/: http: server gave HTTP response to HTTPS client": "the registry speaks http",
    "Error: Get https://r/v2/: x509: certificate signed by unknown authority": "the registry's certificate is not trusted",
}


@pytest.mark.parametrize("said", SAID)
def test_the_cause_is_named_with_what_the_tool_said(said: str) -> None:
    told = cause(f"Trying to pull\n{said}\n")
    assert told.startswith(SAID[said]) and "\n" not in told and "Error" not in told


@given(st.text(max_size=2000))
def test_whatever_a_registry_answers_is_one_short_line(said: str) -> None:
    told = cause(said + "\x1b[2J\x07\r")
    assert len(told) < 600
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in told)
    assert len(last_line("x" * 10_000)) <= 300


@pytest.mark.parametrize(
    ("image", "registry"),
    [("python:3.12", ""), ("team/app", ""), ("localhost/a", "localhost"), ("r.io/a", "r.io"), ("h:5000/a:1", "h:5000")],
)
def test_the_registry_of_an_image(image: str, registry: str) -> None:
    assert registry_of(image) == registry
