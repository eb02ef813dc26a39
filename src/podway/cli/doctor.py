"""`podway doctor` (and `podway check gcp|gke|ssh`): what a launch needs on each provider, and what to do about what is missing."""

import sys
from collections.abc import Iterable

import click
import msgspec

from podway.cli.error_lines import fold
from podway.cli.options import output_option
from podway.cli.screen import Screen
from podway.cli.tables import terminal_width
from podway.errors import UserError
from podway.extras import installed
from podway.home import home
from podway.provider_table import ProviderRow, find_row, load, provider_rows
from podway.providers.diagnosis import Finding

FAILED = 1
LONGEST_NOTE = 200


@click.command(name="doctor")
@click.argument("providers", nargs=-1, metavar="[PROVIDER]...")
@output_option
@click.pass_context
def command(ctx: click.Context, providers: tuple[str, ...], output: str) -> None:
    """Check what launches need: credentials, project, APIs, quota, keys, each with its fix.

    PROVIDER is gcp, gke or ssh; without one, those that are set up on this machine are checked. Nothing is made and nothing is
    changed. Exits with 1 if something that was checked is wrong.
    """
    ctx.exit(examine(providers, json=output == "json"))


def examine(providers: tuple[str, ...], *, json: bool) -> int:
    """Show what is found, as it is found; the exit code."""
    rows = [_row(word) for word in providers] or list(provider_rows().values())
    found: dict[str, list[Finding]] = {}
    with Screen(err=json) as screen:
        for row in rows:
            if not row.diagnose:
                continue
            if not providers and not _is_set_up(row):
                screen.line(f"{row.name}: not set up here; what is missing: podway doctor {row.name}")
                continue
            screen.line(row.name)
            found[row.name] = []
            screen.wait(f"Checking {row.name}")
            for finding in _findings(row):
                found[row.name].append(finding)
                _show(screen, finding)
        if not json and not providers:
            screen.line("local: slices are simulated here; nothing is needed")
    if json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
    return FAILED if any(not one.ok for some in found.values() for one in some) else 0


def _findings(row: ProviderRow) -> Iterable[Finding]:
    if row.extra and not installed(row.extra):
        fix = f"pip install 'podway[{row.extra}]'"
        return [Finding(what="packages", ok=False, note=f"podway[{row.extra}] is not installed", fix=fix)]
    findings: Iterable[Finding] = load(row.diagnose)(home())
    return findings


def _row(word: str) -> ProviderRow:
    row = find_row(word)
    if row is None or not row.diagnose:
        known = ", ".join(name for name, one in provider_rows().items() if one.diagnose)
        raise UserError(f"{word!r} is not a provider that can be checked", f"one of: {known}")
    return row


def _is_set_up(row: ProviderRow) -> bool:
    if row.extra and not installed(row.extra):
        return False
    return not row.configured or bool(load(row.configured)(home()))


def _show(screen: Screen, finding: Finding) -> None:
    mark = screen.paint("✓", "green") if finding.ok else screen.paint("✗", "red")
    note = finding.note if len(finding.note) <= LONGEST_NOTE else f"{finding.note[:LONGEST_NOTE]}…"
    first, *others = fold(f"  * {finding.what}: {note}", terminal_width(), "    ")
    screen.line(first.replace("*", mark, 1))
    fix = fold(f"      {finding.fix}", terminal_width(), "        ") if finding.fix else []
    for line in (*others, *fix):
        screen.line(line)
