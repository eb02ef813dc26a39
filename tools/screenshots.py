"""Pictures of the page for the docs: a server of its own, a job on a simulated slice, and a headless Chromium. `make screenshots`."""

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser.conftest import CHROMIUM  # noqa: E402
from tests.browser.screen import running_site  # noqa: E402

OUT = ROOT / "docs" / "images"
VIEWS = {
    "home": ("/", ".figures"),
    "cluster": ("/clusters/demo", ".hosts"),
    "job": ("/clusters/demo/jobs/1", ".line"),
    "slices": ("/slices", ".torus"),
}


def main() -> None:
    """Write every picture, light and dark."""
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, running_site(Path(folder)) as site, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            page = browser.new_context(viewport={"width": 1200, "height": 760}, color_scheme=scheme).new_page()
            link = site.link()
            page.goto(link)
            page.wait_for_selector("nav")
            for name, (path, selector) in VIEWS.items():
                page.goto(f"{link.partition('/login')[0]}/page{path}")
                page.wait_for_selector(selector)
                page.wait_for_timeout(700)
                page.screenshot(path=OUT / f"{name}-{scheme}.png")
            page.goto(f"{link.partition('/login')[0]}/page/plan")
            page.click("button.primary")
            page.wait_for_selector(".bar")
            page.wait_for_timeout(700)
            page.screenshot(path=OUT / f"plan-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main()
