"""Words of a command line, back to the bash text they stand for."""

import shlex
from collections.abc import Sequence


def command_text(words: Sequence[str]) -> str:
    """One word is bash, as it is. Of several, a word that had to be quoted to hold its spaces stays one word."""
    if len(words) == 1:
        return words[0]
    return " ".join(shlex.quote(word) if not word or any(c in word for c in " \t\n'\"") else word for word in words)
