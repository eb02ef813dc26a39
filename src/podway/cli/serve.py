"""`podway serve`: checks that the server can run here, and becomes it.

The server is a program of its own (`python -m podway.serve`), since it needs jax and this command must start without it.
"""

import os
import sys
from pathlib import Path

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
    """Serve a model with an OpenAI-compatible API.

    `up`, `update`, `status`, `down` and `logs` are about services, as `sky serve` has them.
    """
    if arguments and arguments[0] in ("up", "update", "status", "down", "logs") and not Path(arguments[0]).exists():
        from podway.cli.serve_services import command as services  # a model is served without it

        services.main(args=list(arguments), prog_name="podway serve", standalone_mode=False)
        return
    try:
        args = parser().parse_args(list(arguments))
    except SystemExit as end:
        raise click.exceptions.Exit(int(end.code or 0)) from None
    check(args)
    require("serve", "podway serve")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "podway.serve", *arguments])
