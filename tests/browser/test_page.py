"""Every view of the page, on a real server with a real simulated cluster."""

import time
from collections.abc import Callable
from typing import Any

from tests.browser.screen import Screen, Site

VIEWS = {
    "/": ".figures",
    "/clusters": "table",
    "/clusters/demo": ".hosts",
    "/clusters/demo/jobs/1": ".line",
    "/plan": "form",
    "/slices": ".torus",
    "/cost": ".figures",
    "/settings": ".facts",
}


def test_every_view_opens(screen: Screen) -> None:
    for path, selector in VIEWS.items():
        screen.go(path)
        screen.page.wait_for_selector(selector)
    screen.go("/nowhere/at/all")
    screen.page.wait_for_selector("text=There is nothing here")


def test_the_way_from_home_to_a_log(screen: Screen) -> None:
    page = screen.page
    page.click("main >> text=demo")
    page.wait_for_selector("h1:has-text('demo')")
    assert page.locator(".hosts li").count() == 4
    page.click("table >> text=hello")
    page.wait_for_selector(".line")
    page.go_back()
    page.wait_for_selector("h1:has-text('demo')")


def test_what_a_job_prints_stays_text(screen: Screen) -> None:
    screen.go("/clusters/demo/jobs/1")
    page = screen.page
    page.wait_for_selector(".line >> text=<script>")
    assert page.title() == "demo job 1 · Podway"
    shown = page.inner_text(".log")
    assert "<img src=x onerror=alert(1)>" in shown
    assert "red" in shown and "\x1b" not in shown and "[31m" not in shown and "stolen title" not in shown
    assert page.locator(".log script, .log img").count() == 0


def test_a_log_is_filtered_and_searched(screen: Screen) -> None:
    screen.go("/clusters/demo/jobs/1")
    page = screen.page
    page.wait_for_selector(".line >> text=(all 4 hosts) step 60 of 60")
    page.fill("input[type=search]", "step 42")
    until(page, lambda: page.locator(".line").count() == 1)
    assert "step 42 of 60" in page.inner_text(".line")
    page.fill("input[type=search]", "")
    page.select_option("select", "2")
    # One rank's log has no lines of several hosts.
    until(page, lambda: "step 60" in page.inner_text(".log") and "all 4" not in page.inner_text(".log"))


def until(page: Any, condition: Callable[[], bool]) -> None:
    """Look again and again: the page's own policy lets no test evaluate code in it."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        page.wait_for_timeout(100)


def test_actions_ask_first_and_act(screen: Screen) -> None:
    site, page = screen.site, screen.page
    site.podway("launch", "-y", "-d", "-c", "second", "--infra", "local", "--tpus", "v6e-4", "sleep 600")
    screen.go("/clusters/second/jobs/1")
    page.wait_for_selector("text=running")
    page.click("button:has-text('Cancel')")
    page.click("dialog >> text=Keep it")
    assert page.locator("dialog[open]").count() == 0
    page.click("button:has-text('Cancel')")
    page.click("dialog >> text=Cancel the job")
    page.wait_for_selector("text=cancelled")  # by the stream of changes: nobody reloads
    page.click("h1 >> text=second")
    page.click("button:has-text('Take down')")
    page.click("dialog >> .danger")
    page.wait_for_selector("text=gone")
    assert "second" not in site.podway("status")


def test_the_planner_answers(screen: Screen) -> None:
    screen.allowed = ("status of 404",)
    screen.go("/plan")
    page = screen.page
    page.click("button.primary")
    page.wait_for_selector("text=Memory of a chip")
    assert page.locator(".chart canvas").count() == 1
    page.fill("input[name=model]", "no-such-model")
    page.click("button.primary")
    page.wait_for_selector("[role=alert]")


def test_a_phone_shows_everything_without_scrolling_sideways(site: Site, browser: Any) -> None:
    screen = Screen(site, browser, width=390, height=800)
    for path, selector in VIEWS.items():
        screen.go(path)
        screen.page.wait_for_selector(selector)
        wide = screen.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390, f"{path} is {wide} pixels wide"
    screen.close()


def test_a_link_opens_once(site: Site, browser: Any) -> None:
    link = site.link()
    first = Screen(site, browser, login=False)
    first.page.goto(link)
    first.page.wait_for_selector("nav")
    first.close()
    second = Screen(site, browser, login=False)
    second.page.goto(link)
    second.page.wait_for_selector("text=This link was used or has expired")
    second.close()


def test_without_a_session_the_page_says_how_to_log_in(site: Site, browser: Any) -> None:
    screen = Screen(site, browser, login=False)
    screen.allowed = ("status of 401",)
    screen.page.goto(site.link().partition("/login")[0])
    screen.page.wait_for_selector("text=Please log in")
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
