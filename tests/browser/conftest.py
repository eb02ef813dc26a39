"""A real server with a real simulated cluster, and a headless Chromium that looks at it."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.screen import Screen, Site, running_site

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running_site(tmp_path_factory.mktemp("site")) as up:
        yield up


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    if CHROMIUM is None:
        if os.environ.get("PODWAY_REQUIRE_E2E"):
            pytest.fail("there is no chromium: apt-get install chromium")
        pytest.skip("there is no chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        arguments = [
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
        ]
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield started
        started.close()


@pytest.fixture
def screen(site: Site, browser: object, tmp_path: Path) -> Iterator[Screen]:
    """Logged in, on a screen of usual size; whatever the page complains about fails the test."""
    opened = Screen(site, browser)
    yield opened
    opened.close()
