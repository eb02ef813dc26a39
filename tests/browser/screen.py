"""What the browser tests look at: a server of their own, and a page of the browser that tells its complaints."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TASK = r"""
name: hello
resources: {accelerators: tpu-v6e-16, infra: local}
run: |
  for i in $(seq 1 60); do echo "step $i of 60"; done
  echo "<script>document.title='broken'</script><img src=x onerror=alert(1)> from rank $PODWAY_RANK"
  printf '\033[31mred\033[0m \033]0;stolen title\007 \033[2J end\n'
"""
WAIT_MS = 120_000


class Site:
    """A server with one cluster, `demo`, whose first job has ended."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def podway(self, *words: str, check: bool = True) -> str:
        env = {"PODWAY_HOME": str(self.home), "PATH": "/usr/bin:/bin", "HOME": str(self.home), "USER": "tester"}
        command = [sys.executable, "-m", "podway.cli.main", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=self.home)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def link(self) -> str:
        return self.podway("ui", "--no-browser").strip()


@contextlib.contextmanager
def running_site(home: Path) -> Iterator[Site]:
    site = Site(home)
    (home / "hello.yaml").write_text(TASK)
    try:
        site.podway("launch", "-y", "-c", "demo", "hello.yaml")
        yield site
    finally:
        site.podway("down", "-y", "demo", check=False)
        site.podway("server", "stop", check=False)


class Screen:
    """One page of the browser."""

    def __init__(self, site: Site, browser: Any, *, width: int = 1280, height: int = 860, login: bool = True) -> None:
        self.site = site
        self.context = browser.new_context(viewport={"width": width, "height": height})
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.allowed: tuple[str, ...] = ()
        self.page.on("console", lambda message: self._heard(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._asked(request.url))
        self.base = ""
        if login:
            link = site.link()
            self.base = link.partition("/login")[0]
            self.page.goto(link)
            self.page.wait_for_selector("nav")

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def _asked(self, url: str) -> None:
        if not url.startswith(("http://127.0.0.1:", "data:")):
            self.complaints.append(f"a request to {url}")

    def go(self, path: str) -> None:
        self.page.goto(f"{self.base}/page{path}")

    def text(self) -> str:
        return str(self.page.inner_text("body"))

    def close(self) -> None:
        self.context.close()
        left = [one for one in self.complaints if not any(part in one for part in self.allowed)]
        assert not left, left
