"""A real server with a real simulated cluster, and a headless Chromium that looks at it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.screen import CHROMIUM_OPTIONS, Screen, Site, running_site

ROOT = Path(__file__).parents[2]
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
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_OPTIONS)
        yield started
        started.close()


@pytest.fixture
def screen(site: Site, browser: object) -> Iterator[Screen]:
    """Logged in, on a screen of usual size; whatever the page complains about fails the test."""
    opened = Screen(site, browser)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, from npm (`tools/axe` fetches it once)."""
    done = subprocess.run(["bash", ROOT / "tools" / "axe"], capture_output=True, text=True)
    found = sorted((ROOT / ".cache" / "axe").glob("axe-*.js"))
    if not found:
        pytest.skip(f"axe-core is not here: {done.stderr.strip()[-200:]}")
    return found[-1].read_text()
