"""A real training run and a real model on the page, and every view by an accessibility checker."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.screen import SERVE, TRAIN, Screen, Site, running_site

VIEWS = {
    "/": ".figures",
    "/clusters": "table",
    "/clusters/demo": ".hosts",
    "/clusters/demo/jobs/1": ".line",
    "/training": ".chart canvas",
    "/models": ".side-head >> text=tiny-llama3",
    "/plan": ".empty",
    "/slices": ".torus",
    "/cost": ".figures",
    "/settings": ".facts",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("work-site")
    (home / "work").mkdir()
    lines = [{"text": f"line {number} of a small text to learn"} for number in range(64)]
    (home / "work" / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running_site(home) as up:
        up.launch("served", SERVE.format(port=port), detach=True)
        up.launch("trained", TRAIN, detach=True)
        yield up


@pytest.mark.timeout(600)
def test_a_training_run_is_drawn_beside_its_plan(screen: Screen) -> None:
    screen.go("/training?runs=trained/1")
    page = screen.page
    page.wait_for_selector("main >> text=Loss", timeout=300_000)
    page.wait_for_selector("main >> text=Goodput")
    screen.until(lambda: page.locator(".charts canvas").count() >= 5)
    page.wait_for_selector("text=Beside the plan")
    page.wait_for_selector("text=This slice is simulated")
    screen.until(lambda: "tiny-llama3 on v6e-4, fsdp=4, 4 x 64" in screen.text())
    page.wait_for_selector("table >> text=succeeded", timeout=300_000)  # by the stream of changes
    page.click("table >> text=tiny")
    page.click("text=Metrics")
    page.wait_for_selector(".charts canvas")


@pytest.mark.timeout(600)
def test_a_model_is_talked_to_one_and_two_at_a_time(screen: Screen) -> None:
    screen.allowed = ("status of 400",)
    screen.go("/models")
    page = screen.page
    page.wait_for_selector(".side-head >> text=tiny-llama3", timeout=300_000)
    page.wait_for_selector(".side-head .state", state="detached", timeout=300_000)  # it is ready
    page.fill("#draft", "Hello")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=alert] >> text=chat template")  # a base model: it goes on with texts
    page.click("text=Continue a text")
    page.click("text=Compare two")
    page.fill("input[type=number] >> nth=0", "24")
    page.fill("input[type=number] >> nth=1", "0")  # else a model of random weights may end its answer at once
    screen.ask("We the People", 2)
    screen.until(lambda: page.locator(".message.user").count() >= 3 and "first token" in screen.text())
    assert "client.completions.create(" in page.inner_text("pre") and 'prompt="We the People"' in page.inner_text("pre")
    page.click("text=curl")
    assert "/v1/completions" in page.inner_text("pre")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_has_an_accessibility_violation(site: Site, browser: Any, axe: str, scheme: str) -> None:
    screen = Screen(site, browser, color_scheme=scheme, bypass_csp=True)
    found = []
    for path, selector in VIEWS.items():
        screen.go(path)
        screen.page.wait_for_selector(selector)
        if path == "/plan":
            screen.page.click("button.primary")
            screen.page.wait_for_selector("text=Memory of a chip")
        found += [(path, *one) for one in screen.violations(axe)]
    assert not found
    screen.close()


def test_a_phone_shows_everything_without_scrolling_sideways(site: Site, browser: Any) -> None:
    screen = Screen(site, browser, width=390, height=800)
    for path, selector in VIEWS.items():
        screen.go(path)
        screen.page.wait_for_selector(selector)
        wide = screen.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390, f"{path} is {wide} pixels wide"
    screen.close()
