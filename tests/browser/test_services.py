"""The two views of services and a conversation with a service's model, on a real service behind a real gateway."""

import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from podway.launch_options import LaunchOptions, LaunchRequest
from podway.task.task import Accelerator, Probe, Resources, Scaling, ServedModel, ServiceSpec, Task
from tests.browser.screen import Screen, Site, running_site
from tests.conftest import wait_until

PROGRAM = Path(__file__).parents[1] / "gateway" / "replica_program.py"
# Three requests within three seconds are more than one replica is to take.
SCALING = Scaling(min_replicas=1, max_replicas=2, target_qps=0.5, window_s=5, up_delay_s=0, down_delay_s=3600)


def service(word: str) -> LaunchRequest:
    task = Task(
        name="assistant",
        kind="service",
        run=f"exec {sys.executable} {PROGRAM} $PODWAY_PORT {word}",
        resources=(Resources(accelerator=Accelerator(type="v6e-1")),),
        service=ServiceSpec(
            port=8000,
            probes=(Probe(path="/health", interval_s=0.5, timeout_s=10, initial_delay_s=300),),
            scaling=SCALING,
            model=ServedModel(name="m"),
        ),
        stop_duration_s=5,
    )
    return LaunchRequest(task=task, options=LaunchOptions(provider="local"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A service in its second revision."""
    with running_site(tmp_path_factory.mktemp("services"), demo=False) as up:
        up.client.apply_service(service("first"))
        assert up.client.apply_service(service("second")).change == "roll"
        wait_until(lambda: up.client.service("assistant").state == "READY", 120, "a ready replica")
        wait_until(lambda: up.client.service("assistant").url, 120, "the gateway's report")
        yield up
        up.client.end_service("assistant")
        wait_until(lambda: up.client.service("assistant").state == "GONE", 120, "the end of the service")


def asked(site: Site, count: int) -> None:
    """Streams through the gateway, as a program has them."""
    url = f"{site.client.service('assistant').url}v1/chat/completions"
    headers = {"Authorization": f"Bearer {site.own_token}", "content-type": "application/json"}
    body = msgspec.json.encode({"model": "m", "stream": True, "max_tokens": 5, "messages": []})
    for _ in range(count):
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as reply:
            reply.read()


def test_load_latencies_and_the_autoscaler_s_reasons_are_shown(screen: Screen) -> None:
    page = screen.page
    screen.go("/services")
    page.click("table >> text=assistant")
    page.wait_for_selector("h1:has-text('assistant')")
    deadline = time.monotonic() + 120
    while "requests/s, target 0.5 for each replica" not in page.inner_text(".timeline"):
        assert time.monotonic() < deadline, screen.text()[:3000]
        asked(screen.site, 10)
        page.wait_for_timeout(200)
    screen.until(lambda: "wants 2 replicas in place of 1" in page.inner_text(".timeline"))
    for title in ("Requests/s", "Time to first token", "Time per token", "In flight and waiting"):
        page.wait_for_selector(f".charts section:has(h2:text-is('{title}')) canvas")
    screen.until(lambda: all(words in page.inner_text(".figures") for words in ("TPOT, median", "99 %:")))
    screen.until(lambda: "2 of 2" in page.inner_text(".figures"))
    passing = page.locator("table:has(caption:text-is('Replicas')) >> text=passes for")
    screen.until(lambda: passing.count() == 2)


def test_a_service_is_rolled_back_and_scaled(screen: Screen) -> None:
    page = screen.page
    screen.go("/services/assistant")
    roll_back = page.locator("td > button:text-is('Roll back')")
    page.wait_for_selector("tr:has-text('2'):has-text('current')")
    roll_back.click()
    page.click("dialog[open] >> text=Keep it")
    assert screen.site.client.service("assistant").revision == 2
    roll_back.click()
    page.click("dialog[open] .primary")
    page.wait_for_selector("dialog[open]", state="detached")
    page.wait_for_selector("td > button:text-is('Roll forward')")  # by the stream of changes
    page.wait_for_selector(".timeline >> text=rolls to revision 1")
    assert screen.site.client.service("assistant").revision == 1
    page.click("button:text-is('Scale')")
    page.fill("dialog[open] input >> nth=0", "0")
    page.fill("dialog[open] input >> nth=1", "-1")
    page.click("dialog[open] .primary")
    page.wait_for_selector("dialog[open] [role=alert]")  # and what was typed is still there
    assert page.input_value("dialog[open] input >> nth=1") == "-1"
    page.fill("dialog[open] input >> nth=0", "1")
    page.fill("dialog[open] input >> nth=1", "1")
    page.click("dialog[open] .primary")
    page.wait_for_selector("dialog[open]", state="detached")
    page.wait_for_selector(".figures >> text=fixed")
    screen.until(lambda: "1 of 1" in page.inner_text(".figures"))
    screen.allowed = ("status of 400",)


def test_a_service_s_model_is_talked_to_through_the_gateway(screen: Screen) -> None:
    page = screen.page
    screen.go("/models")
    page.wait_for_selector(".side-head >> text=m (service assistant)", state="attached")
    page.wait_for_selector(".side-head .state", state="detached")  # it is ready
    page.fill("input[type=number] >> nth=0", "7")
    screen.ask("Hello", 1)
    assert "<0><1><2><3><4><5><6>" in page.inner_text(".message.assistant")
    assert 'os.environ["GATEWAY_KEY"]' in page.inner_text("pre") and "/v1" in page.inner_text("pre")
    user = screen.site.client.info().user
    counted = lambda: [one for one in screen.site.client.usage_by_day() if one.user == user and one.completion_tokens]  # noqa: E731
    screen.until(lambda: bool(counted()))  # for the person who asked, like their own program's


def test_who_may_only_look_sees_no_actions(site: Site, browser: Any) -> None:
    viewer, member = site.token("tester", "viewer"), site.token("eve", "member")
    screen = Screen(site, browser, link=lambda: site.link_of(viewer))
    page = screen.page
    screen.go("/services/assistant")
    page.wait_for_selector(".timeline li")
    for word in ("Scale", "End", "Roll back"):
        assert page.locator(f"main button:text-is('{word}')").count() == 0, word
    screen.go("/models")
    page.wait_for_selector("text=Your role may look, and not ask")
    screen.close()
    other = Screen(site, browser, link=lambda: site.link_of(member))
    other.allowed = ("status of 404",)
    other.go("/services")
    other.page.wait_for_selector("text=No services")
    other.go("/services/assistant")
    other.page.wait_for_selector("[role=alert] >> text=assistant")
    other.go("/models")
    other.page.wait_for_selector("text=No model is being served")
    other.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_views_are_accessible_and_fit_a_phone(site: Site, browser: Any, axe: str, scheme: str) -> None:
    screen = Screen(site, browser, width=390, height=800, color_scheme=scheme, bypass_csp=True)
    for path, selector in (("/services", "table"), ("/services/assistant", ".timeline li"), ("/models", ".side-head")):
        screen.go(path)
        screen.page.wait_for_selector(selector)
        assert screen.violations(axe) == [], path
        assert screen.page.evaluate("document.documentElement.scrollWidth") <= 390, path
    screen.close()
