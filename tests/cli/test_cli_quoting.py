"""Commands as people type them."""

import shlex
import subprocess

from hypothesis import given, settings
from hypothesis import strategies as st

from podway.cli.quoting import command_text


def test_one_word_is_bash_as_it_is() -> None:
    assert command_text(["echo $A && ls 'x y'"]) == "echo $A && ls 'x y'"


def test_shell_words_between_others_keep_their_meaning() -> None:
    assert command_text(["echo", "$A", "&&", "ls", "*.py"]) == "echo $A && ls *.py"


@given(st.lists(st.text("ab \t\n'\"\\", max_size=6), min_size=2))
def test_a_quoted_word_stays_one_word(words: list[str]) -> None:
    # A backslash outside quotes is bash's own; only words that need quoting for their spaces or quotes are touched.
    plain = [word for word in words if "\\" not in word or any(c in word for c in " \t\n'\"")]
    assert shlex.split(command_text([*plain, "x", "y"])) == [*plain, "x", "y"]


@settings(max_examples=20)
@given(st.lists(st.text("ab 'é\"", min_size=0, max_size=5), min_size=2, max_size=5))
def test_bash_agrees(words: list[str]) -> None:
    text = command_text(["printf", "%s\\n", *words])
    done = subprocess.run(
        ["bash", "-c", text.replace("%s\\n", "'%s\\n'", 1)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "".join(f"{word}\n" for word in words)
