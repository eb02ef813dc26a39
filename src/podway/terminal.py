"""What may be written to a terminal of text that others made: a job's output, a server's reason, a name in a file.

`safe_line` is for lines that are shown as they are: colours stay if asked for, everything else that steers a terminal (cursor,
title, clipboard, bell) goes. `visible` is for a value inside a sentence or a table: it shows what would steer as an escape.
`Screen.line`, tables and error messages go through one of them; so no command can print past them.
"""

import re

RESET = "\x1b[0m"

# ECMA-48: CSI = ESC [ parameters intermediates final; OSC, DCS, SOS, PM and APC are strings up to BEL or ST; the rest are
# ESC intermediates final. A CSI cut off by the end of the line goes too; a string without its end loses its introducer only,
# so that stray bytes do not swallow the rest of a line.
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*(?:[@-~]|$)"
    r"|[\]PX^_](?:[^\x07\x1b]*(?:\x07|\x1b\\))?"
    r"|[ -/]*(?:[0-Z\\`-~]|$)"
    r"|)"
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
# Left after that: a NUL and the C1 controls (a terminal may take U+009B for ESC [) are no text; the other C0 controls
# move the cursor or ring the bell. The tab stays.
_NO_TEXT = re.compile(r"[\x00\x80-\x9f]")
_STEERING = re.compile(r"[\x01-\x08\x0a-\x1f\x7f\u2028\u2029]")
_STEERING_BUT_ESCAPE = re.compile(r"[\x01-\x08\x0a-\x1a\x1c-\x1f\x7f\u2028\u2029]")


def strip_ansi(text: str) -> str:
    """The text without any escape sequence."""
    return _ESCAPE.sub("", text) if "\x1b" in text else text


def safe_line(text: str, *, colour: bool = False) -> str:
    """One line as text that changes nothing but its own line."""
    if text.isprintable():  # almost every line
        return text
    if not colour:
        return _NO_TEXT.sub("\ufffd", _STEERING.sub("", strip_ansi(text)))
    if "\x1b" in text:
        text = _ESCAPE.sub(lambda found: found[0] if _COLOUR.fullmatch(found[0]) else "", text)
        if "\x1b" in text:
            text += RESET  # a colour left on would run into the next line
    return _NO_TEXT.sub("\ufffd", _STEERING_BUT_ESCAPE.sub("", text))


def safe_lines(text: str, *, colour: bool = False) -> str:
    """The same for several lines at once."""
    return "\n".join(safe_line(line, colour=colour) for line in text.split("\n"))


def visible(text: str) -> str:
    """A value on one line: what cannot be printed shows as an escape."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def visible_lines(text: str) -> str:
    """The same for a message of several lines."""
    return "\n".join(map(visible, text.split("\n")))
