"""The terminal as all commands see it: what others wrote (names, reasons, notes of a server) steers it by no way.

`main` puts it in the place of stdout and stderr where these are terminals. Colours pass; what moves the cursor, sets the title or fills
the clipboard does not. Who draws (`screen.py`) takes the terminal itself, and filters by itself. Files and pipes get what was written.
"""

from typing import TextIO


class SafeTerminal:
    """A text stream over a terminal."""

    def __init__(self, terminal: TextIO) -> None:
        self.unfiltered = terminal

    def write(self, text: str) -> int:
        """Write what of it is text or colour."""
        if not text.replace("\n", "").isprintable():
            from podway.terminal import safe_lines  # most commands write nothing that needs it

            self.unfiltered.write(safe_lines(text, colour=True))
        else:
            self.unfiltered.write(text)
        return len(text)

    @property
    def buffer(self) -> "_Bytes":
        """For who writes bytes, as click does with JSON."""
        return _Bytes(self)

    def __getattr__(self, name: str) -> object:
        """Everything else is the terminal's own."""
        return getattr(self.unfiltered, name)


class _Bytes:
    """The same stream, for UTF-8."""

    def __init__(self, text: SafeTerminal) -> None:
        self._text = text

    def write(self, data: bytes) -> int:
        self._text.write(bytes(data).decode("utf-8", "replace"))
        return len(data)

    def flush(self) -> None:
        self._text.unfiltered.flush()


def unfiltered(stream: TextIO) -> TextIO:
    """The terminal itself, for who draws on it."""
    return stream.unfiltered if isinstance(stream, SafeTerminal) else stream
