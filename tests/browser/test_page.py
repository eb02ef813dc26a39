"""Every view of the page, on a real server with a real simulated cluster."""

import json
from contextlib import suppress
from typing import Any

import pytest

from tests.browser.relay import Relay
from tests.browser.screen import Screen, Site

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256,
          "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "head_dim": 64}  # fmt: skip
VIEWS = {
    "/": ".figures",
    "/clusters": "table",
    "/pools": "main .card",
    "/groups": "main .card",
    "/clusters/demo": ".hosts",
    "/clusters/demo/jobs/1": ".line",
    "/training": ".empty",
    "/models": ".empty",
    "/plan": "form",
    "/slices": ".torus",
    "/cost": ".figures",
    "/settings": ".facts",
}


def test_every_view_opens(screen: Screen) -> None:
    for path, selector in VIEWS.items():
        screen.go(path)
        screen.page.wait_for_selector(selector)
        assert screen.page.locator("h1").count() == 1
    screen.go("/nowhere/at/all")
    screen.page.wait_for_selector("text=There is nothing here")


def test_a_pool_and_a_job_group_lead_to_their_jobs(screen: Screen) -> None:
    site, page = screen.site, screen.page
    site.launch_pool("batch", 3)
    site.launch_group("pair")
    screen.go("/pools")
    page.click("table >> text=batch")
    page.wait_for_selector("h1:has-text('batch')")
    screen.until(lambda: page.locator("table:has(caption:text-is('Workers')) >> text=batch-1").count() == 1)
    jobs = page.locator("table:has(caption:text-is('Jobs')) tbody tr")
    screen.until(lambda: jobs.count() == 3 and "succeeded" in jobs.last.inner_text())
    page.click("table:has(caption:text-is('Jobs')) tbody tr:last-child td:first-child a")
    page.wait_for_selector(".line >> text=part 0")
    screen.go("/pools/batch")
    page.click("button >> text=Take down")
    page.click("dialog[open] button.danger >> text=Take down")
    screen.until(lambda: page.locator("main >> text=No pools").count() == 1)
    screen.go("/groups")
    page.click("table >> text=pair")
    page.wait_for_selector("h1:has-text('pair')")
    screen.until(lambda: page.locator("tbody >> text=succeeded").count() == 2)
    page.click("tbody >> text=learner")
    page.wait_for_selector(".line >> text=I am the learner")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_views_of_pools_and_groups_are_accessible_and_fit_a_phone(site: Site, browser: Any, axe: str) -> None:
    """With workers, and jobs that have ended, run and wait."""
    site.launch_pool("parts", 2)
    site.launch_waiting_job("parts")
    site.launch_group("duet")
    for scheme, width in (("light", 1280), ("light", 360), ("dark", 360)):
        screen = Screen(site, browser, width=width, height=800, color_scheme=scheme, bypass_csp=True)
        for path, text in (
            ("/pools", "parts"),
            ("/pools/parts", "Cancel all jobs"),
            ("/groups", "duet"),
            ("/groups/duet", "duet-learner"),
        ):
            screen.go(path)
            screen.page.wait_for_selector(f"main >> text={text}")
            assert screen.violations(axe) == [], (path, scheme, width)
            assert screen.page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
        screen.close()
    site.podway("pool", "down", "-y", "parts")


def test_the_way_from_home_to_a_log(screen: Screen) -> None:
    page = screen.page
    page.click("main >> text=demo")
    page.wait_for_selector("h1:has-text('demo')")
    screen.until(lambda: page.locator(".hosts li").count() == 4)
    page.click("table >> text=hello")
    page.wait_for_selector(".line")
    page.go_back()
    page.wait_for_selector("h1:has-text('demo')")


def test_what_a_job_prints_stays_text(screen: Screen) -> None:
    screen.go("/clusters/demo/jobs/1")
    page = screen.page
    screen.until(lambda: "end" in page.inner_text(".log").split())  # its last line: the others are there, too
    assert page.title() == "demo job 1 · Podway"
    shown = page.inner_text(".log")
    assert "<script>" in shown and "<img src=x onerror=alert(1)>" in shown
    assert "red" in shown and "\x1b" not in shown and "[31m" not in shown and "stolen title" not in shown
    assert page.locator(".log script, .log img").count() == 0


def test_a_log_is_filtered_and_searched(screen: Screen) -> None:
    screen.go("/clusters/demo/jobs/1")
    page = screen.page
    page.wait_for_selector(".line >> text=(all 4 hosts) step 60 of 60")
    page.fill("input[type=search]", "step 42")
    screen.until(lambda: page.locator(".line").count() == 1)
    assert "step 42 of 60" in page.inner_text(".line")
    page.fill("input[type=search]", "")
    page.select_option("select", "2")
    # One rank's log has no lines of several hosts.
    screen.until(lambda: "step 60" in page.inner_text(".log") and "all 4" not in page.inner_text(".log"))


def test_actions_ask_first_and_act(screen: Screen) -> None:
    site, page = screen.site, screen.page
    site.podway("launch", "-y", "-d", "-c", "second", "--infra", "local", "--tpus", "v6e-4", "sleep 600")
    screen.go("/clusters/second/jobs/1")
    page.wait_for_selector("text=running")
    page.click("button:has-text('Cancel')")
    page.click("dialog >> text=Keep it")
    page.wait_for_selector("dialog[open]", state="detached")
    page.click("button:has-text('Cancel')")
    page.click("dialog >> text=Cancel the job")
    page.wait_for_selector("text=cancelled")  # by the stream of changes: nobody reloads
    page.click("h1 >> text=second")
    page.click("button:has-text('Take down')")
    page.click("dialog >> .danger")
    page.wait_for_selector("text=gone")
    assert "second" not in site.podway("status")


def test_a_question_stays_open_while_the_view_loads_again(screen: Screen) -> None:
    page = screen.page
    screen.go("/clusters/demo/jobs/1")
    page.wait_for_selector(".line")
    held: list[Any] = []
    # The cluster is known, and its next answer takes long.
    page.route("**/v1/clusters/demo", lambda route: held.append(route))
    page.click("h1 >> text=demo")
    page.click("button:has-text('Take down')")
    page.wait_for_selector("dialog[open]")
    page.wait_for_selector(".timeline li")  # an answer that came meanwhile
    assert page.locator("dialog[open]").count() == 1
    for route in held:
        route.continue_()
    page.unroute("**/v1/clusters/demo")
    page.click("dialog[open] >> text=Keep it")
    assert "demo" in screen.site.podway("status")


def test_an_open_question_never_turns_into_another(screen: Screen) -> None:
    """The hosts stop while somebody looks at the question whether to stop them: their click must not start them again."""
    page = screen.page
    screen.go("/clusters/demo")
    page.click("button:text-is('Stop')")
    page.wait_for_selector("dialog[open] >> text=Stop the hosts of demo")

    known = screen.context.request.get(f"{screen.site.base}/v1/clusters/demo").json()

    from playwright.sync_api import Error

    def stopped(route: Any) -> None:
        # The page may ask once more while the test ends, when nobody answers it any longer.
        with suppress(Error):
            route.fulfill(json={**known, "state": "STOPPED"})

    page.route("**/v1/clusters/demo", stopped)
    screen.site.podway("autostop", "demo", "-i", "600")  # a change: the page asks again
    page.wait_for_selector("button:text-is('Start')", state="attached")
    page.wait_for_selector("dialog[open]", state="detached")
    page.unroute("**/v1/clusters/demo")


def test_an_earlier_tab_goes_on_after_another_login(screen: Screen) -> None:
    """The browser has one session: the second link replaces the first one's, and its token for changes."""
    page = screen.page
    screen.allowed = ("status of 403",)
    screen.go("/clusters/demo")
    page.wait_for_selector("button:text-is('Autostop')")
    second = screen.context.new_page()
    second.goto(screen.site.link())
    second.wait_for_selector("nav")
    page.click("button:text-is('Autostop')")
    page.click("dialog[open] >> text=Set it")
    page.wait_for_selector("dialog[open]", state="detached")
    page.wait_for_selector("text=down after 30 idle min")


def test_a_session_that_ends_in_the_middle_is_told(screen: Screen) -> None:
    screen.allowed = ("status of 401",)
    screen.go("/clusters/demo")
    screen.page.wait_for_selector(".hosts")
    screen.context.clear_cookies()
    screen.page.click("nav >> text=Settings")
    screen.page.wait_for_selector("text=Please log in")


def test_addresses_and_the_way_back(screen: Screen) -> None:
    page = screen.page
    screen.go("/%E0%A4%A")
    page.wait_for_selector("text=There is nothing here")
    screen.go("/training?runs=demo/1")
    page.wait_for_selector("h1")
    page.click("nav >> text=Training")
    screen.until(lambda: page.url.endswith("/page/training"))
    page.go_back()
    screen.until(lambda: page.url.endswith("/page/training?runs=demo/1"))
    page.click("nav >> text=Clusters")
    page.click("table >> text=demo")
    page.wait_for_selector(".timeline li")
    page.mouse.wheel(0, 300)
    screen.until(lambda: page.evaluate("scrollY") > 0)
    where = page.evaluate("scrollY")
    page.click("table >> text=hello")
    page.wait_for_selector(".line")
    page.go_back()
    page.wait_for_selector(".timeline li")
    screen.until(lambda: abs(page.evaluate("scrollY") - where) < 50)


def test_the_planner_answers_by_name_and_by_config(screen: Screen) -> None:
    screen.allowed = ("status of 404",)
    screen.go("/plan")
    page = screen.page
    page.click("button.primary")
    page.wait_for_selector("text=Memory of a chip")
    screen.until(lambda: page.locator(".chart canvas").count() == 1)
    best = page.inner_text("table tbody tr >> nth=0").split()[0]  # v6e-256: so many chips are drawn
    screen.until(lambda: page.locator(".torus rect").count() == int(best.rpartition("-")[2]))
    page.fill("input[name=model]", "no-such-model")
    page.click("button.primary")
    page.wait_for_selector("[role=alert] >> text=no-such-model")
    page.click("text=Use a config.json")
    page.fill("textarea[name=config]", "{")
    page.click("button.primary")
    page.wait_for_selector("[role=alert] >> text=not JSON")
    page.fill("textarea[name=config]", json.dumps(CONFIG))
    page.click("button.primary")
    page.wait_for_selector("text=config.json, 1.50 B parameters")


def test_a_plan_is_looked_at_and_launched(screen: Screen) -> None:
    screen.go("/plan")
    page = screen.page
    page.fill("input[name=model]", "tiny-llama3")
    page.fill("input[name=tpu]", "v6e-4")
    page.click("button.primary")
    page.click("text=Launch this")
    page.fill("dialog[open] input", "planned")
    page.fill("dialog[open] textarea", "echo launched from the page")
    page.click("dialog[open] >> text=Show what it would do")
    page.wait_for_selector("dialog[open] >> text=simulated")
    page.click("dialog[open] >> .primary")
    page.wait_for_selector(".line >> text=launched from the page")
    assert "planned" in screen.site.podway("status")


def test_a_link_opens_once(site: Site, browser: Any) -> None:
    first = Screen(site, browser, link=site.link)  # as podway ui prints it
    first.close()
    second = Screen(site, browser, link="none")
    second.visit(first.link, "text=This link was used or has expired")
    second.close()


def test_without_a_session_the_page_says_how_to_log_in(site: Site, browser: Any) -> None:
    screen = Screen(site, browser, link="none")
    screen.allowed = ("status of 401",)
    screen.visit(site.base, "text=Please log in")
    screen.close()


def test_logging_out_ends_the_session(screen: Screen) -> None:
    screen.allowed = ("status of 401",)
    screen.go("/settings")
    page = screen.page
    page.click("button:has-text('Log out')")
    page.click("dialog >> .primary")
    page.wait_for_selector("text=You are logged out")
    screen.go("/")
    page.wait_for_selector("text=Please log in")


def test_the_keyboard_is_enough(screen: Screen) -> None:
    screen.go("/clusters")
    page = screen.page
    page.wait_for_selector("table")
    page.keyboard.press("Tab")
    assert page.locator(":focus").inner_text() == "Skip to the content"
    page.focus("table >> text=demo")
    page.keyboard.press("Enter")
    page.wait_for_selector(".hosts")
    page.focus("text=Take down")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog[open]", state="detached")
    assert "demo" in screen.site.podway("status")


def test_while_the_server_is_away_the_page_says_so_and_goes_on_afterwards(site: Site, browser: Any) -> None:
    with Relay(int(site.base.rpartition(":")[2])) as relay:
        screen = Screen(site, browser, link=lambda: site.link().replace(site.base, relay.base))
        screen.allowed = ("net::ERR_",)  # whatever the browser says of a way that is cut
        screen.go("/clusters/demo/jobs/1")
        screen.until(lambda: "step 60 of 60" in screen.text())  # its lines come in pieces
        relay.cut()
        screen.page.wait_for_selector(".banner >> text=The server is away")
        assert "step 60 of 60" in screen.text()  # what was there is still there
        screen.page.click("nav >> text=Settings")
        screen.page.wait_for_selector("[role=alert]")
        relay.mend()
        screen.page.wait_for_selector(".banner", state="detached")
        screen.page.click("nav >> text=Clusters")
        screen.page.wait_for_selector("table >> text=demo")
        screen.close()
