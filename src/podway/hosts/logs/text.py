"""What a line of output may look like on somebody's screen, and whose line it is.

`display` turns the raw bytes of one line into text that is safe to print next to other lines: colours stay only if asked for,
everything that moves the cursor or steers the terminal goes, bytes that are no text show as U+FFFD. `prefix` and
`group_prefix` name the ranks that printed a line, and `mask` hides secret values.
"""

from collections.abc import Iterable, Sequence

from podway.hosts.agent.mask import Masker, patterns
from podway.terminal import RESET, safe_line, strip_ansi

RUN = "run"
_TINT = "\x1b[36m"


def is_blank(update: bytes) -> bool:
    """True if a terminal would show nothing for these bytes: white space and escape sequences only."""
    if b"\x1b" in update:
        return not strip_ansi(update.decode("latin-1")).strip()
    return not update.strip()


def display(raw: bytes, colour: bool = False) -> str:
    """The bytes of one line as text that changes nothing but its own line; never raises."""
    return safe_line(raw.decode("utf-8", "replace"), colour=colour)


def prefix(kind: str, rank: int, hosts: int, pid: int | None, ip: str = "", name: str = "") -> str:
    """Whose line it is: `kind` is the phase (`run`, or a word such as `setup` that is shown), the rest as known."""
    process = f"pid={'-' if pid is None else pid}"
    if hosts == 1:
        return f"({(name or 'task') if kind == RUN else kind}, {process}) "
    place = f"rank={rank}, {process}"
    if rank and ip:
        place += f", ip={ip}"
    return f"({_phase(kind)}{host_name(rank)}, {place}) "


def host_name(rank: int) -> str:
    """`head` for rank 0, `worker3` for rank 3; ranks run over all slices."""
    return f"worker{rank}" if rank else "head"


def group_prefix(kind: str, ranks: Sequence[int], hosts: int, figures: int | None = None) -> str:
    """The prefix of a line that several ranks printed alike: `(all 64 hosts) `, `(hosts 0-5,7) `; whose figures it shows, if they
    differ: `(all 64 hosts, figures of rank 0) `."""
    whose = "" if figures is None else f", figures of rank {figures}"
    who = f"all {hosts} hosts" if len(ranks) == hosts else f"hosts {ranges(ranks)}"
    return f"({_phase(kind)}{who}{whose}) "


def ranges(ranks: Iterable[int]) -> str:
    """`0-5,7` for 0, 1, 2, 3, 4, 5, 7."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def tint(text: str) -> str:
    """A prefix in the colour that sets it off from the output."""
    return f"{_TINT}{text.rstrip()}{RESET} "


class Mask:
    """Shows every secret value as `***`, by the same rule as on the host (`agent.mask`)."""

    def __init__(self, secrets: Iterable[str]) -> None:
        # Both sides in UTF-8: a match can only begin and end between characters.
        self._values = patterns(secret.encode("utf-8", "surrogatepass") for secret in secrets)
        self._texts = [value.decode("utf-8", "surrogatepass") for value in self._values]

    def __call__(self, text: str) -> str:
        if not any(secret in text for secret in self._texts):
            return text
        masker = Masker(self._values)
        shown = masker.feed(text.encode("utf-8", "surrogatepass")) + masker.finish()
        return shown.decode("utf-8", "surrogatepass")


def mask(text: str, secrets: Iterable[str]) -> str:
    """The text with every secret value shown as `***`."""
    return Mask(secrets)(text)


def _phase(kind: str) -> str:
    return "" if kind == RUN else f"{kind}, "
