"""What a person did wrong, and what they can do about it.

Everything that is the user's to fix ends as a `UserError`: one line that says what is wrong and where, and one hint that
says what to do. The CLI prints it and exits 1; the server answers it as JSON with a 4xx status. Any other exception is
our own bug.
"""


class UserError(Exception):
    """What is wrong (one line), what to do (one line), the HTTP status the server answers it with, and a code for programs."""

    def __init__(
        self, what: str, hint: str, *, status: int = 400, code: str | None = None, others: "tuple[UserError, ...]" = ()
    ) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.status = status
        self.code = code  # where a program is to react to this mistake in particular
        self.others = others  # further mistakes of the same file, found in the same reading

    def __str__(self) -> str:
        own = f"{self.what}\n  {self.hint}" if self.hint else self.what
        return "\n".join([own, *map(str, self.others)])


class ProviderError(Exception):
    """A provider or a host did not do what was asked; `transient` says whether asking again may help."""

    def __init__(self, what: str, *, transient: bool = True) -> None:
        super().__init__(what)
        self.transient = transient
