"""`podway serve`: checks that the server can run here, and becomes it.

The server is a program of its own (`python -m podway.serve`), since it needs jax and this command must start without it. Its options
stand in one place (`serve/options.py`), and the options that are told, completed and checked here are made from them.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from podway.errors import UserError
from podway.extras import require
from podway.serve.options import check, parser

SERVICE_VERBS = ("up", "update", "status", "down", "logs")
_TYPES: "dict[object, click.ParamType[Any]]" = {int: click.INT, float: click.FLOAT, Path: click.Path(path_type=Path)}


def _parameters() -> Iterator[click.Parameter]:
    """The options of the server as this command's own."""
    for action in parser()._actions:
        if action.dest == "help":
            continue
        if not action.option_strings:
            yield click.Argument([action.dest])
        elif action.nargs == 0:
            yield click.Option(
                ["/".join(action.option_strings)], is_flag=True, default=action.default, help=action.help
            )
        else:
            kind = click.Choice(list(action.choices)) if action.choices else _TYPES.get(action.type)
            metavar = action.metavar if isinstance(action.metavar, str) else None
            several = isinstance(action.default, list)
            yield click.Option(action.option_strings, type=kind, metavar=metavar, multiple=several, help=action.help)


def _one_each(arguments: list[str]) -> list[str]:
    """With the option before each of the words where the server takes many after one: `--lora-modules a=x b=y`."""
    many = {name for action in parser()._actions if action.nargs == "+" for name in action.option_strings}
    found: list[str] = []
    option = ""
    for index, word in enumerate(arguments):
        if word == "--":
            return [*found, *arguments[index:]]
        if word.startswith("-"):
            option = word if word in many else ""
        elif option and found[-1] != option:
            found.append(option)
        found.append(word)
    return found


class _ServeCommand(click.Command):
    """Told and checked as any command; the server then reads the words as they were typed."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The words, and what the server makes of them; nothing for a verb about services, which reads its own."""
        words = list(args)
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        options: argparse.Namespace | None = None
        if not (words and words[0] in SERVICE_VERBS and not Path(words[0]).exists()):
            super().parse_args(ctx, _one_each(words))
            try:
                options = parser().parse_args(words)
            except UserError as error:
                raise click.UsageError(f"{error.what[0].upper()}{error.what[1:]}.", ctx) from None
        ctx.params = {"words": words, "options": options}
        return []


@click.command(name="serve", cls=_ServeCommand, params=list(_parameters()))
@click.pass_context
def command(ctx: click.Context, words: list[str], options: argparse.Namespace | None) -> None:
    """Serve a model with an OpenAI-compatible API.

    MODEL is a folder with config.json and safetensors, an id of the Hugging Face hub (ORG/MODEL[@REVISION]), a gs:// address, or
    a known name with --random.

    `podway serve up|update|status|down|logs` are about services, as `sky serve` has them.
    """
    if options is None:
        from podway.cli.serve_services import command as services  # a model is served without it

        with services.make_context("serve", words, parent=ctx.parent) as inner:
            services.invoke(inner)
        return
    check(options)
    require("serve", "podway serve")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "podway.serve", *words])
