"""Questions to the person at the terminal. Where there is none, the command was meant as it was typed and goes on."""

import sys

import click


def proceed(question: str, *, yes: bool) -> None:
    """Ask `question` (on stderr: stdout may be somebody's data); `no` ends the command with nothing done."""
    if yes or not sys.stdin.isatty():
        return
    if not click.confirm(f"{question} Proceed?", default=True, err=True):
        raise click.Abort
