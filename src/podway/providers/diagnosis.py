"""What `podway doctor` says of a provider: one finding for each thing that a launch there needs, with what to do about it."""

from collections.abc import Callable, Iterator

import msgspec

from podway.errors import ProviderError, UserError


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at."""

    what: str
    ok: bool
    note: str = ""  # what is there, or what is wrong
    fix: str = ""  # what to do, where it is not ok


def ask(what: str, look: Callable[[], str]) -> Iterator[Finding]:
    """What came of looking: its note, or the error as a finding."""
    try:
        yield Finding(what=what, ok=True, note=look())
    except UserError as error:
        yield Finding(what=what, ok=False, note=error.what, fix=error.hint)
    except (ProviderError, OSError) as error:
        yield Finding(what=what, ok=False, note=str(error) or "no answer", fix="try again in a moment")
