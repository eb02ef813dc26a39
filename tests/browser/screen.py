"""What the browser tests look at: a server of their own, and a page of the browser that tells its complaints."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from podway.gateway.state_dir import running_gateway
from podway.server.client import Client

EVIL = "<script>document.title='broken'</script><img src=x onerror=alert(1)>"
TASK = r"""
name: hello
resources: {accelerators: tpu-v6e-16, infra: local}
run: |
  for i in $(seq 1 60); do echo "step $i of 60"; done
  echo "EVIL from rank $PODWAY_RANK"
  printf '\033[31mred\033[0m \033]0;stolen title\007 \033[2J end\n'
""".replace("EVIL", EVIL)
# A few real steps of a tiny model on the four devices of one simulated host.
TRAIN = r"""
name: tiny
resources: {accelerators: tpu-v6e-4, infra: local}
workdir: work
run: |
  podway train model.name=tiny-llama3 data.paths='[lines.jsonl]' data.tokenizer=bytes data.packing=none \
    batch.sequences=4 batch.length=64 mesh.shape=fsdp=4 schedule.steps=12 schedule.warmup=2 logging.every=1 \
    checkpoint.save=false output="$HOME/out"
"""
# A tiny model with random weights, behind the OpenAI API.
SERVE = """
name: chat
resources: {{accelerators: tpu-v6e-1, infra: local}}
run: podway serve tiny-llama3 --random --port {port} --max-len 256 --max-seqs 4
"""
POOL = "pool: {workers: 1}\nresources: {accelerators: tpu-v6e-1, infra: local}\n"
PART = 'name: part\nresources: {accelerators: tpu-v6e-1}\nrun: echo "part $SKYPILOT_JOB_RANK"\n'
GROUP = """
name: {name}
execution: parallel
---
name: learner
resources: {{accelerators: tpu-v6e-1, infra: local}}
run: echo "I am the learner"
---
name: actor
resources: {{accelerators: tpu-v6e-1, infra: local}}
run: echo "I am the actor"
"""
WAIT_MS = 120_000
TRIES = 20
# Chromium cuts every connection when a network interface comes or goes, and other tests on this machine make some. The page tries
# again by itself; where its scripts were cut off, the test opens it again.
CUT = "ERR_NETWORK_CHANGED"
CHROMIUM_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


class Site:
    """A server of its own, in a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def podway(self, *words: str, check: bool = True) -> str:
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        env = {"PODWAY_HOME": str(self.home), "PATH": path, "HOME": str(self.home), "USER": "tester"}
        command = [sys.executable, "-m", "podway.cli.main", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=self.home)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def launch(self, cluster: str, task: str, *, detach: bool = False) -> None:
        file = self.home / f"{cluster}.yaml"
        file.write_text(task)
        self.podway("launch", "-y", *(["-d"] if detach else []), "-c", cluster, file.name)

    def launch_pool(self, name: str, jobs: int) -> None:
        """A pool of one worker, and jobs for it."""
        (self.home / "pool.yaml").write_text(POOL)
        (self.home / "part.yaml").write_text(PART)
        self.podway("pool", "apply", "-y", "-p", name, "pool.yaml")
        self.podway("launch", "-y", "--pool", name, "--num-jobs", str(jobs), "part.yaml")

    def launch_waiting_job(self, pool: str) -> None:
        """A job of a pool that runs until the pool goes."""
        (self.home / "waits.yaml").write_text(PART.replace("run: ", "run: sleep 1000; "))
        self.podway("launch", "-y", "-d", "--pool", pool, "waits.yaml")

    def launch_group(self, name: str) -> None:
        """Two tasks that end by themselves."""
        (self.home / "group.yaml").write_text(GROUP.format(name=name))
        self.podway("launch", "-y", "-d", "group.yaml")

    def link(self) -> str:
        return self.podway("ui", "--no-browser").strip()

    @property
    def base(self) -> str:
        return str(json.loads((self.home / "server.json").read_text())["url"])

    def token(self, user: str, role: str) -> str:
        return self.podway("server", "token", user, "--role", role).split()[-1]

    def link_of(self, token: str) -> str:
        """Where a page opens as the holder of a token, as `podway ui` does for whoever is logged in with it."""
        headers = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{self.base}/v1/session-links", method="POST", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return f"{self.base}{json.loads(reply.read())['path']}"

    @property
    def own_token(self) -> str:
        return str(json.loads((self.home / "server.json").read_text())["token"])

    @property
    def client(self) -> Client:
        return Client(self.base, self.own_token)

    def post(self, path: str, body: Any) -> Any:
        """One request with the server's own token."""
        headers = {"Authorization": f"Bearer {self.own_token}", "content-type": "application/json"}
        request = urllib.request.Request(f"{self.base}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.loads(reply.read())


@contextlib.contextmanager
def running_site(home: Path, *, demo: bool = True) -> Iterator[Site]:
    """With one cluster, `demo`, whose first job has ended; `demo` False: with nothing."""
    site = Site(home)
    try:
        if demo:
            site.launch("demo", TASK)
        else:
            site.podway("server", "start")
        yield site
    finally:
        with contextlib.suppress(Exception):
            for one in site.client.services():
                site.client.end_service(one.name)
        site.podway("down", "-y", "--all", check=False)
        site.podway("server", "stop", check=False)
        _end_gateway(home / "gateway")


def _end_gateway(folder: Path) -> None:
    """A gateway outlives its server, so that streams go on."""
    running = running_gateway(folder) if folder.exists() else None
    if running is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while running_gateway(folder) is not None and time.monotonic() < deadline:
        time.sleep(0.1)


class Screen:
    """One page of the browser."""

    def __init__(
        self,
        site: Site,
        browser: Any,
        *,
        width: int = 1280,
        height: int = 860,
        link: str | Callable[[], str] = "",
        **more: Any,
    ) -> None:
        self.site = site
        self.context = browser.new_context(viewport={"width": width, "height": height}, **more)
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.allowed: tuple[str, ...] = ()
        self.page.on("console", lambda message: self._heard(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._asked(request.url))
        self.base = self.link = ""
        if link != "none":
            self._log_in(link)

    def _log_in(self, link: str | Callable[[], str]) -> None:
        """A link opens once: where the way to it was cut, with another one of the same person, by the same way."""
        another = link if callable(link) else lambda: self.site.link_of(self.site.own_token)
        for _ in range(TRIES):
            self.link = link if isinstance(link, str) and link else another()
            self.base = self.link.partition("/login")[0]
            if self._opened(self.link, "nav"):
                return
            link = ""
        raise AssertionError("the page does not open")

    def _opened(self, url: str, sign: str) -> bool:
        """Whether an address opened with its sign; False at once where the way to it was cut meanwhile."""
        before, deadline = len(self.complaints), time.monotonic() + WAIT_MS / 1000
        try:
            self.page.goto(url)
        except Exception as error:
            if CUT in str(error):
                return False  # the browser still shows the page before, whose signs are the same
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                self.page.wait_for_selector(sign, timeout=2000)
                return True
            if any(CUT in one for one in self.complaints[before:]):
                return False
        raise AssertionError(self.text())

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def _asked(self, url: str) -> None:
        if not url.startswith(("http://127.0.0.1:", "data:")):
            self.complaints.append(f"a request to {url}")

    def go(self, path: str) -> None:
        self.visit(f"{self.base}/page{path}", "nav, .closed")

    def visit(self, url: str, sign: str) -> None:
        """Open an address until its sign is there: again only where the way to it was cut."""
        assert any(self._opened(url, sign) for _ in range(TRIES)), f"{url} does not open"

    def text(self) -> str:
        return str(self.page.inner_text("body"))

    def ask(self, text: str, answers: int) -> None:
        """Send a message in Models and wait for its answers; again where the way of a stream was cut."""
        answered = self.page.locator(".message.assistant >> text=tokens/s")
        alert = self.page.locator("[role=alert] >> text=does not answer")
        for _ in range(TRIES):
            before = len(self.complaints)
            self.page.fill("#draft", text)
            self.page.keyboard.press("Enter")
            self.page.wait_for_selector(".composer >> text=Answering", state="detached")
            self.until(lambda: answered.count() >= answers or alert.count() > 0)
            if not any(CUT in one for one in self.complaints[before:]):
                break
        assert answered.count() >= answers, self.text()[:2000]

    def violations(self, axe: str) -> list[tuple[str, str]]:
        """What the accessibility checker finds; the page must be open without its policy, which lets no test add a script."""
        self.page.evaluate(axe)
        run = "axe.run().then((found) => found.violations.map((one) => [one.id, one.nodes[0].html]))"
        return [(str(one[0]), str(one[1])) for one in self.page.evaluate(run)]

    def until(self, condition: Callable[[], bool]) -> None:
        """Look again and again: the page's own policy lets no test evaluate code that waits in it."""
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, self.text()[:2000]
            self.page.wait_for_timeout(100)

    def close(self) -> None:
        self.page.unroute_all(behavior="ignoreErrors")  # what a test still holds back ends with it
        self.context.close()
        left = [one for one in self.complaints if not any(part in one for part in (CUT, *self.allowed))]
        assert not left, left
