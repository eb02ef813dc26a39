"""`podway`: the console entry and its one error boundary.

Every command ends here, in one of these ways:

1. a `UserError` is two lines on stderr, what is wrong and what to do, and exit 1; so is a cloud that does not answer;
2. a usage error names the nearest command or option, and exits 2;
3. a package that an extra brings and that is not installed is named with its extra, and exits 1;
4. Ctrl-C says that the job keeps running, how to follow and how to cancel it, and exits 130;
5. a closed pipe (`podway logs x | head`) is silent;
6. anything else is a bug: one line, and exit 70; PODWAY_DEBUG=1 shows the traceback.
"""

import io
import os
import sys
from collections.abc import Sequence
from typing import TextIO, cast

import click

from podway.cli.index import complete, completion_asked, podway
from podway.cli.safe_terminal import SafeTerminal
from podway.errors import ProviderError, UserError

FAILED, USAGE, INTERNAL, INTERRUPTED, NO_READER = 1, 2, 70, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code."""
    _prepare_streams()
    try:
        code = _invoke(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Discard what is still buffered: flushing it at exit would be a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return NO_READER
    except Exception as error:
        if os.environ.get("PODWAY_DEBUG"):
            import traceback  # only bugs need it

            traceback.print_exc()
        _say(f"Podway itself failed: {type(error).__name__}: {error} (set PODWAY_DEBUG=1 for the traceback)")
        return INTERNAL


def _prepare_streams() -> None:
    """A terminal that cannot show a character, or a closed stream (`>&-`), must not end a command."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.stdout, sys.stderr = (
        cast(TextIO, SafeTerminal(stream)) if stream.isatty() else stream for stream in (sys.stdout, sys.stderr)
    )


def _invoke(arguments: list[str]) -> int:
    if instruction := completion_asked():
        return complete(instruction)
    while True:
        try:
            return _run(arguments)
        except click.UsageError as error:  # nothing was done yet: the command line could not be read
            changed = _in_our_words(arguments, error)
            if changed is None:
                return _show_usage(error, arguments)
            arguments = changed


def _run(arguments: list[str]) -> int:
    try:
        # Not `podway.main()`: click would turn Ctrl-C into an abort and forget what was interrupted.
        with podway.make_context("podway", arguments) as context:
            podway.invoke(context)
        return 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.UsageError:
        raise
    except click.ClickException as error:
        _show_error(error.format_message(), "")
        return error.exit_code
    except click.Abort:
        _say("Nothing was done.")
        return FAILED
    except UserError as error:
        for one in (error, *error.others):
            _show_error(one.what, one.hint)
        return FAILED
    except ProviderError as error:  # of the few commands that ask a cloud themselves
        _show_error(str(error), "try again in a moment" if error.transient else "")
        return FAILED
    except OSError as error:
        from podway.home import unwritable  # only a full disk needs it

        if isinstance(error, BrokenPipeError) or (refusal := unwritable(error)) is None:
            raise
        _show_error(refusal.what, refusal.hint)
        return FAILED
    except ModuleNotFoundError as error:
        from podway.extras import explain  # only an incomplete installation needs it

        if (known := explain(error)) is None:
            raise
        _show_error(known.what, known.hint)
        return FAILED
    except KeyboardInterrupt as error:
        _say("\n" + (str(error) or "Interrupted. What was already requested continues; see: podway status"))
        return INTERRUPTED


def _show_usage(error: click.UsageError, arguments: list[str]) -> int:
    what = error.format_message()
    if what.startswith("Usage: "):  # a group without a command, which click answers with its help
        _say(what)
        return USAGE
    what = what.replace("a valid float range", "a number").replace("a valid integer range", "a whole number")
    _show_error(what.replace("\n\t", " "), _usage_hint(error, arguments))
    return USAGE


def _in_our_words(arguments: list[str], error: click.UsageError) -> list[str] | None:
    """The command line without what another tool's fingers put there, where that is known; None for any other mistake."""
    from podway.cli import habits  # only a mistake needs it

    if error.ctx is None:
        return None
    path = error.ctx.command_path.split()[1:]
    if isinstance(error, click.NoSuchOption):
        return habits.without_option(arguments, " ".join(path), error.option_name)
    if isinstance(error.ctx.command, click.Group) and path and arguments[: len(path)] == path:
        return habits.translated(arguments)
    return None


def _usage_hint(error: click.UsageError, arguments: list[str]) -> str:
    if error.ctx is None:
        return "see: podway --help"
    habit = _habit(error, error.ctx, arguments)
    lines = [habit] if habit else [" ".join(error.ctx.get_usage().split()), f"see: {error.ctx.command_path} --help"]
    takes_command = any(p.name in ("entrypoint", "command") and p.nargs == -1 for p in error.ctx.command.params)
    if takes_command and isinstance(error, click.NoSuchOption):
        lines.append(f"if {error.option_name} belongs to the command to run, quote that command or put it after --")
    return "\n".join(lines)


def _habit(error: click.UsageError, ctx: click.Context, arguments: list[str]) -> str:
    """What to type for an option, or a command of a group, that another tool has."""
    from podway.cli import habits  # only a mistake needs it

    path = ctx.command_path.split()[1:]
    if isinstance(error, click.NoSuchOption):
        return habits.option_answer(" ".join(path) or "podway", error.option_name)
    return habits.answer(arguments) if isinstance(ctx.command, click.Group) and path else ""


def _show_error(what: str, hint: str) -> None:
    from podway.cli.error_lines import show_error  # only an error needs it

    show_error(what, hint)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
