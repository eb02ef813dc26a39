"""Confirmation at a terminal. Without a terminal the command proceeds as typed."""

import sys

import click


def proceed(question: str, *, yes: bool) -> None:
    """Ask `question` on stderr, since stdout may be piped; `no` aborts the command."""
    if yes or not sys.stdin.isatty():
        return
    if not click.confirm(f"{question} Proceed?", default=True, err=True):
        raise click.Abort
