"""Pictures of the page for the docs: a server of its own with two training runs, a model and a service, and a headless Chromium.

`make screenshots` writes docs/images. The runs and the service are real, on simulated slices: it takes some minutes.
"""

import io
import json
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser.conftest import CHROMIUM  # noqa: E402
from tests.browser.screen import CHROMIUM_OPTIONS, Site, running_site  # noqa: E402

from podway.launch_options import LaunchOptions, LaunchRequest  # noqa: E402
from podway.server.client import Client  # noqa: E402
from podway.task.task import Accelerator, Probe, Resources, Scaling, ServedModel, ServiceSpec, Task  # noqa: E402

OUT = ROOT / "docs" / "images"
READY_S = 600.0
# name -> (path, what shows that it is there, what to do then)
VIEWS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "home": ("/", ".figures", ()),
    "cluster": ("/clusters/demo", ".hosts", ()),
    "job": ("/clusters/demo/jobs/1", ".line", ()),
    "training": ("/training?runs=learn/1,longer/1", ".charts canvas", ()),
    "services": ("/services/assistant", ".charts, .figures", ()),
    "models": ("/models", ".side-head", ("chat",)),
    "plan": ("/plan", "form", ("plan",)),
    "slices": ("/slices", ".torus", ()),
    "cost": ("/cost", ".figures", ()),
    "settings": ("/settings", ".facts", ()),
}


def make_service(site: Site) -> None:
    """Two replicas of a tiny model."""
    probe = Probe(path="/health", interval_s=2, timeout_s=5, initial_delay_s=READY_S)
    spec = ServiceSpec(
        port=8000,
        probes=(probe,),
        scaling=Scaling(min_replicas=2, max_replicas=2),
        auth=False,
        model=ServedModel(name="tiny-llama3"),
    )
    task = Task(
        name="assistant",
        kind="service",
        run="podway serve tiny-llama3 --random --host 0.0.0.0 --port $PODWAY_PORT --max-len 256 --max-seqs 4",
        resources=(Resources(accelerator=Accelerator(type="v6e-1")),),
        service=spec,
    )
    token = json.loads((site.home / "server.json").read_text())["token"]
    Client(site.base, token).apply_service(LaunchRequest(task=task, options=LaunchOptions(provider="local")))


def pictures(site: Site) -> None:
    """Every view, light and dark."""
    OUT.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_OPTIONS)
        for scheme in ("light", "dark"):
            page = browser.new_context(viewport={"width": 1200, "height": 760}, color_scheme=scheme).new_page()
            page.set_default_timeout(120_000)
            link = site.link()
            page.goto(link)
            page.wait_for_selector("nav")
            for name, (path, selector, acts) in VIEWS.items():
                page.goto(f"{link.partition('/login')[0]}/page{path}")
                page.wait_for_selector(selector)
                for act in acts:
                    ACTS[act](page)
                page.evaluate("scrollTo(0, 0)")
                page.wait_for_timeout(1500)
                shrink(page.screenshot(), OUT / f"{name}-{scheme}.png")
        browser.close()


def shrink(picture: bytes, path: Path) -> None:
    """A page has few colours: 256 of them make a file of a third."""
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(path, optimize=True)


def _plan(page: Any) -> None:
    page.click("button.primary")
    page.wait_for_selector(".bar")


def _chat(page: Any) -> None:
    page.select_option(".side-head select", "chat/1")
    page.wait_for_selector(".side-head .state", state="detached")
    page.click("text=Continue a text")
    page.fill("input[type=number] >> nth=1", "0")
    page.fill("#draft", "We the People")
    page.click("form .primary")
    page.wait_for_selector(".message.assistant >> text=tokens/s")


ACTS = {"plan": _plan, "chat": _chat}


def use(site: Site, seconds: float = 30.0) -> None:
    """Some requests to the service, through its gateway."""
    token = json.loads((site.home / "server.json").read_text())["token"]
    client, deadline = Client(site.base, token), time.monotonic() + READY_S
    while (service := client.service("assistant")).state != "READY" and time.monotonic() < deadline:
        time.sleep(2)
    body = json.dumps({"model": "tiny-llama3", "prompt": "We the", "max_tokens": 24, "stream": True}).encode()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        headers = {"content-type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{service.url}v1/completions", body, headers), timeout=60
        ) as reply:
            reply.read()


def main() -> None:
    """Make the site, wait for what it runs, and write the pictures."""
    task = ROOT / "examples" / "learn-by-heart.yaml"
    with tempfile.TemporaryDirectory(prefix="site-") as folder, running_site(Path(folder)) as site:
        make_service(site)
        for name, steps in (("learn", 64), ("longer", 96)):
            out = site.home / f"out-{name}"
            site.podway("launch", "-y", "-c", name, str(task), "--env", f"OUT={out}", "--env", f"STEPS={steps}")
        serve = f"podway serve {site.home}/out-learn/model --port 18400 --max-len 512 --max-seqs 4"
        site.podway("launch", "-y", "-d", "-c", "chat", "--infra", "local", "--tpus", "v6e-1", serve)
        use(site)
        pictures(site)


if __name__ == "__main__":
    main()
