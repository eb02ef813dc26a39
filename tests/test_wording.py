"""Plain English, held: names and phrases that were replaced stay out of the source, the documentation and the messages.

Each row says what to write instead. Names are identifiers of Python source; phrases are looked for everywhere, across line ends.
"""

import re
import subprocess
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = {
    r"Wish(es)?|wish(es)?|_wish_\w+": "PlanOptions, LaunchOptions, request_...",
    r"Asked": "SamplingParams",
    r"Heard|hear|Said|Happened|Telling|Quiet": "TokenUpdate, on_update, CompileReport, StepMetrics, LoggingHook, BaseHook",
    r"Thing|Things|Sight|Trouble|Market|aside|Site": "Resource, Listing, GcpError, OfferFinder, in_thread, RenderContext",
    r"Farewell|farewell|rest_rule|rests_alone": "SelfTeardown, autostop policy",
    r"Strays?|strays?|Found": "OrphanScanner, orphans, OwnedResource",
    r"honours|opener|Opener": "capabilities, connect",
    r"Seats?|seats?|Knobs|Flight|TRASH": "fill_slots, SamplingState, InFlightStep, PAD_PAGE",
    r"_told|Story|story": "_read_metrics, ProgressPrinter, attempts_summary",
    r"Deed|deed|deeds|doomed|strangers": "Action, action, to_delete, orphan_runners",
    r"_Door|_Steady|SecretBox": "AuthMiddleware, VerifiedFile, SecretVault",
}
FILES = ("asked", "asking", "answers", "rest", "ahead", "fused", "fitness", "words", "strays", "secret_box", "knobs")
PHRASES = {
    r"(?<!there)(?<!where) is no (duration|folder|directory|file|number|slice|date|time|place|size|name)\b": "is not a ...; no such ...",
    r"which is made if it is not there": "creating it if needed",
    r"beside the queue": "bypassing the queue",
    r"the gone ones": "including deleted ones",
    r"clusters there are": "existing clusters",
    r"can(not)? be had|could be had": "is available; must be at least 1",
    r"--env is stronger": "--env takes precedence",
    r"in the space of the other": "shares the space above",
    r"\bbefalls?\b": "inject faults into requests",
    r"of the dice": "random seed",
    r"so many (are|seconds|of them)": "concurrent requests; this many seconds",
    r"always under way": "concurrent requests",
    r"bear to be": "cannot be reloaded",
    r"room\.key": "section.key",
    r"before the deed": "persist intent before acting",
    r"\banew\b": "again; recreated",
    r"whoever asks": "the caller",
    r"wants a token": "token required",
    r"does not run so\b": "does not fit on",
    r"goes? round again": "keep trying",
    r"rest rule": "autostop policy",
    r"\bdeeds?\b": "action",
}


def texts() -> list[Path]:
    """All that a user or a reader of the source sees, as git knows it."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src", "docs", "README.md"]
    words += ["CHANGELOG.md", "CONTRIBUTING.md", "examples", "tests/golden", "tools/demo", "Makefile"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kinds = (".py", ".md", ".txt", ".yaml", ".yml", ".js", ".html", "demo", "Makefile")
    return [ROOT / name for name in listed if name.endswith(kinds) and (ROOT / name).is_file()]


def found_in(pattern: str, paths: list[Path], flags: int = 0) -> list[str]:
    """`path:line: text` of every match; a space of the pattern is any white space."""
    places = []
    for path in paths:
        text = path.read_text()
        for match in re.finditer(pattern.replace(" ", r"\s+"), text, flags):
            line = text.count("\n", 0, match.start()) + 1
            places.append(f"{path.relative_to(ROOT)}:{line}: {match[0]!r}")
    return places


@pytest.fixture(scope="module")
def identifiers() -> dict[str, list[str]]:
    """Every identifier of the source, with the places it is in."""
    places = defaultdict(list)
    for path in texts():
        if path.suffix == ".py":
            with path.open("rb") as file:
                for token in tokenize.tokenize(file.readline):
                    if token.type == tokenize.NAME:
                        places[token.string].append(f"{path.relative_to(ROOT)}:{token.start[0]}")
    return places


@pytest.mark.parametrize("pattern", NAMES)
def test_no_replaced_name_is_left(pattern: str, identifiers: dict[str, list[str]]) -> None:
    found = {name: places for name, places in identifiers.items() if re.fullmatch(pattern, name)}
    assert found == {}, f"write: {NAMES[pattern]}"


@pytest.mark.parametrize("pattern", PHRASES)
def test_no_replaced_phrase_is_left(pattern: str) -> None:
    assert found_in(pattern, texts(), re.IGNORECASE) == [], f"write: {PHRASES[pattern]}"


def test_no_replaced_file_name_is_left() -> None:
    assert [path.name for path in texts() if path.suffix == ".py" and path.stem in FILES] == []
