"""`podway ui`: a link that logs in is in no argument of a process."""

import html
import re
import webbrowser
from pathlib import Path

import pytest

from podway.cli.main import main
from podway.server.client import Client

LINK = 'http://127.0.0.1:1/login?code=one-time&x="><script>'


def test_the_link_reaches_the_browser_by_a_file_of_ones_own(
    podway_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    monkeypatch.setattr(Client, "page_link", lambda self: LINK)
    assert main(["ui"]) == 0
    assert capsys.readouterr().out == f"{LINK}\n"
    file = podway_home / "open.html"
    assert opened == [file.as_uri()] and "one-time" not in opened[0]
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    (leads,) = re.findall(r'content="0; url=([^"]*)"', text)
    assert html.unescape(leads) == LINK and "<script>" not in text
    opened.clear()
    assert main(["ui", "--no-browser"]) == 0
    assert opened == []
