"""Confirmation at a terminal. Without a terminal the command proceeds as typed."""

import sys

import click

from podway.errors import UserError


def proceed(question: str, *, yes: bool) -> None:
    """Ask `question` on stderr, since stdout may be piped; `no` aborts the command."""
    if yes or not sys.stdin.isatty():
        return
    if not click.confirm(f"{question} Proceed?", default=True, err=True):
        raise click.Abort


def proceed_asked(question: str, *, yes: bool) -> None:
    """The same for what is never done unasked, since it changes what others use or costs money: without a terminal `yes` is needed."""
    if not yes and not sys.stdin.isatty():
        raise UserError("there is no terminal to ask for confirmation at; nothing was changed", "add --yes")
    proceed(question, yes=yes)
