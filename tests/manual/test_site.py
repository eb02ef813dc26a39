"""`make docs`: the manual as a site, strictly built; its links and anchors lead somewhere, and it loads nothing from elsewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.manual.pages import NAMES, ROOT

LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "video": "src"}


class Page(HTMLParser):
    """What a built page loads, and the places in it that a link may name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or values.get("name") or "")
        link = values.get(LOADS.get(tag, "")) or ""
        if values.get("rel") not in ("canonical", "prev", "next", "alternate"):
            self.loads.append(link)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return place


def test_it_is_built_without_a_warning_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    assert {f"{name}.html" for name in NAMES} <= {path.name for path in pages}
    for path, page in pages.items():
        assert [link for link in page.loads if re.match(r"(https?:)?//", link)] == [], path.name
        assert 'data-md-component="source"' not in path.read_text(), f"{path.name}: a script asks GitHub for stars"
    styles = [path for path in site.rglob("*.css") if re.search(r"url\([\"']?(https?:)?//", path.read_text())]
    assert styles == []


def test_links_of_the_readme_lead_somewhere(site: Path) -> None:
    for target, _, anchor in re.findall(r"\]\(([^)#\s]*)(#([^)]*))?\)", (ROOT / "README.md").read_text()):
        if "://" in target:
            continue
        assert (ROOT / target).exists(), target
        if anchor:
            page = Page((site / Path(target).with_suffix(".html").name).read_text())
            assert unquote(anchor) in page.ids, f"{target}#{anchor}"


def test_python_programs_find_every_name_of_the_api(site: Path) -> None:
    import podway

    ids = Page((site / "python-reference.html").read_text()).ids
    absent = [name for name in podway.__all__ if name != "__version__" and f"podway.{name}" not in ids]
    assert absent == []
    assert {"podway.Client.launch", "podway.Client.services", "podway.Client.metrics"} <= ids
