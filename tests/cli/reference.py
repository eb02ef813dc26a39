"""The whole command line as text: each verb's help, and the reference page docs/cli.md, both made from the commands."""

from collections.abc import Iterator
from pathlib import Path

import click

from podway.cli.index import VERBS, podway

ROOT = Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden" / "cli"
PAGE = ROOT / "docs" / "cli.md"
BEGIN = "<!-- From here on made from the commands: PODWAY_UPDATE_GOLDEN=1 pytest tests/cli/test_cli_help.py -->"


def commands() -> Iterator[tuple[str, click.Command]]:
    """(words, command) of every verb and subcommand, the root first."""
    context = click.Context(podway)
    yield "", podway
    for verb in VERBS:
        command = podway.get_command(context, verb)
        assert command is not None
        yield verb, command
        if isinstance(command, click.Group):
            for name, sub in sorted(command.commands.items()):
                yield f"{verb} {name}", sub


def page() -> str:
    """The generated part of docs/cli.md."""
    lines = [BEGIN, "", "| verb | what it does |", "|---|---|"]
    lines += [f"| [`{verb}`](#podway-{verb}) | {text} |" for verb, (_, text, _) in VERBS.items()]
    for words, command in commands():
        if words:
            lines += ["", f"## podway {words}", "", *_section(words, command)]
    return "\n".join(lines) + "\n"


def _section(words: str, command: click.Command) -> list[str]:
    alias = next((verb for verb, row in VERBS.items() if row[0] == VERBS.get(words, ("",))[0]), words)
    if alias != words:
        return [f"The same as [`podway {alias}`](#podway-{alias})."]
    # Below the root's context, as when it is typed: click keeps the help option of the first context it sees.
    root = click.Context(podway, info_name="podway", **podway.context_settings)
    context = click.Context(command, info_name=words, parent=root)
    lines = [f"`{context.command_path} {' '.join(command.collect_usage_pieces(context))}`", ""]
    lines += [(command.help or "").replace("\b\n", "").partition("\n")[0]]
    options = [param for param in command.params if isinstance(param, click.Option)]
    if options:
        lines += ["", "| option | meaning |", "|---|---|"]
        lines += [f"| {_names(option)} | {_cell(option.help or '')} |" for option in options]
    return lines


def _names(option: click.Option) -> str:
    takes = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
    names = [*option.opts, *option.secondary_opts]
    return _cell(", ".join(f"`{name}`" for name in names)) + (f" `{_cell(takes.strip())}`" if takes else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
