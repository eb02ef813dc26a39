"""What a person of each role sees: the page offers nothing that the server would refuse, and shows nothing of other people."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.screen import EVIL, Screen, Site, running_site

RESTRICTED = ("status of 403", "status of 404")


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, dict[str, str]]]:
    """A server with people: `demo` is tester's, in no project; a job of it has a hostile name."""
    with running_site(tmp_path_factory.mktemp("team")) as site:
        task = {
            "name": EVIL,
            "run": "sleep 600",
            "env": {"X": EVIL},
            "resources": [{"accelerator": {"type": "v6e-16"}}],
        }
        site.post("/v1/clusters/demo/jobs", {"task": task})
        people = {
            "owner": ("tester", "member"),
            "viewer": ("tester", "viewer"),
            "other": ("eve", "member"),
            "admin": ("root", "admin"),
        }
        yield site, {who: site.token(user, role) for who, (user, role) in people.items()}


def opened(team: tuple[Site, dict[str, str]], browser: Any, who: str) -> Screen:
    site, tokens = team
    screen = Screen(site, browser, link=lambda: site.link_of(tokens[who]))
    screen.allowed = RESTRICTED
    return screen


@pytest.mark.parametrize("who", ["owner", "admin"])
def test_who_may_act_sees_actions(team: tuple[Site, dict[str, str]], browser: Any, who: str) -> None:
    screen = opened(team, browser, who)
    screen.go("/clusters/demo")
    screen.page.wait_for_selector("button >> text=Take down")
    screen.go("/clusters/demo/jobs/2")
    screen.page.wait_for_selector("button >> text=Cancel")
    screen.go("/settings")
    screen.page.wait_for_selector("text=Tokens of everybody" if who == "admin" else "text=Your tokens")
    screen.page.wait_for_selector("button >> text=Revoke")
    if who == "admin":
        screen.page.wait_for_selector("text=Who did what")
    else:
        assert screen.page.locator("text=Who did what").count() == 0
    screen.close()


def test_a_read_only_person_sees_everything_and_no_actions(team: tuple[Site, dict[str, str]], browser: Any) -> None:
    screen = opened(team, browser, "viewer")
    for path, selector in (("/clusters/demo", ".hosts"), ("/clusters/demo/jobs/2", "h1"), ("/settings", "table")):
        screen.go(path)
        screen.page.wait_for_selector(selector)
        for word in ("Take down", "Stop", "Autostop", "Cancel", "Revoke", "Make it"):
            assert screen.page.locator(f"main button:text-is('{word}')").count() == 0, (path, word)
    screen.go("/plan")
    screen.page.click("button.primary")
    screen.page.wait_for_selector("text=Memory of a chip")
    assert screen.page.locator("text=Launch this").count() == screen.page.locator("text=Rehearse this").count() == 0
    screen.close()


def test_what_belongs_to_others_is_not_there(team: tuple[Site, dict[str, str]], browser: Any) -> None:
    screen = opened(team, browser, "other")
    for path, sign in (("/", "text=No clusters yet"), ("/clusters", "text=No clusters"), ("/cost", "text=Nothing was launched"),
                       ("/training", "text=No training runs yet"), ("/models", "text=No model is being served")):  # fmt: skip
        screen.go(path)
        screen.page.wait_for_selector(sign)
        assert "demo" not in screen.page.inner_text("main").replace("-c demo", "")
    for path in ("/clusters/demo", "/clusters/demo/jobs/1"):
        screen.go(path)
        screen.page.wait_for_selector("[role=alert] >> text=demo")
        assert screen.page.locator(".hosts, .line").count() == 0
    screen.close()


def test_hostile_names_stay_text_everywhere(team: tuple[Site, dict[str, str]], browser: Any) -> None:
    screen = opened(team, browser, "admin")
    named = ("/clusters/demo", "/clusters/demo/jobs/2")  # the cluster's jobs, and the job itself
    for path, selector in (("/", ".figures"), ("/clusters", "table"), ("/clusters/demo", ".timeline li"), ("/clusters/demo/jobs/2", "h1"),
                           ("/training", "h1"), ("/models", "h1"), ("/cost", ".figures"), ("/settings", "table")):  # fmt: skip
        screen.go(path)
        screen.page.wait_for_selector(selector)
        if path in named:
            screen.until(lambda: EVIL in screen.text())
        else:
            screen.page.wait_for_timeout(300)
        assert screen.page.locator("main script, main img").count() == 0 and "broken" not in screen.page.title()
    screen.close()


def test_a_tab_of_one_person_does_nothing_in_the_name_of_another(
    team: tuple[Site, dict[str, str]], browser: Any
) -> None:
    site, tokens = team
    screen = opened(team, browser, "owner")
    page = screen.page
    screen.go("/clusters/demo")
    page.click("button:text-is('Take down')")
    second = screen.context.new_page()
    second.goto(site.link_of(tokens["admin"]))
    second.wait_for_selector("nav >> text=Home")
    page.click("dialog[open] >> .danger")
    page.wait_for_selector(".who >> text=root")  # the page is loaded again, for whom it is now
    assert site.client.cluster("demo").state == "UP"
    screen.close()
