"""`podway serve`: checks that the server can run here, and becomes it.

The server is a program of its own (`python -m podway.serve`), since it needs jax and this command must start without it.
"""

import os
import sys

import click

from podway.extras import require
from podway.serve.options import check, parser


class _AsIs(click.Command):
    """Help and arguments are those of the server."""

    def get_help(self, ctx: click.Context) -> str:
        """As argparse writes it."""
        return parser().format_help().rstrip()


@click.command(
    name="serve", cls=_AsIs, context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Serve a model with an OpenAI-compatible API."""
    try:
        args = parser().parse_args(list(arguments))
    except SystemExit as end:
        raise click.exceptions.Exit(int(end.code or 0)) from None
    check(args)
    require("serve", "podway serve")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "podway.serve", *arguments])
