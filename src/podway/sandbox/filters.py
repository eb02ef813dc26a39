"""Filters of list requests, as Google's APIs share them (AIP-160, and Compute Engine's `eq` and `ne`). Pure.

    labels.team=nlp AND (state="READY" OR -state:STOP*) name!=b

Terms compare a field with a value; side by side or joined by AND all must hold, and OR binds closer than AND. `=`, `!=` and `:`
take `*` for anything, `field:*` asks whether the field is there, `eq` and `ne` take a regular expression.
"""

import re
from collections.abc import Callable

from podway.sandbox.jsons import JsonObject
from podway.sandbox.status import ApiError, invalid

Test = Callable[[JsonObject], bool]
_TOKEN = re.compile(r"""\s*(?:(\(|\)|!=|<=|>=|[=:<>])|"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s()=:<>!"']+))""")
_OPERATORS = ("=", "!=", ":", "<=", ">=", "<", ">", "eq", "ne")
DEEPEST = 30  # parentheses within parentheses


def matches(item: JsonObject, text: str) -> bool:
    """Whether a resource passes a filter; an empty one lets all pass."""
    return read_filter(text)(item)


def read_filter(text: str) -> Test:
    """The test that a filter stands for."""
    return _Reader(text).all()


class _Reader:
    """One filter, token by token."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0
        self._tokens: list[tuple[str, bool]] = []  # and whether it was quoted
        end, stop = 0, len(text.rstrip())
        while end < stop:
            found = _TOKEN.match(text, end)
            if not found:
                raise self._refuse()
            quoted = found[2] if found[2] is not None else found[3]
            plain = found[1] or found[4] or ""
            self._tokens.append((re.sub(r"\\(.)", r"\1", quoted), True) if quoted is not None else (plain, False))
            end = found.end()

    def all(self) -> Test:
        test = self._both() if self._tokens else lambda item: True
        if self._at < len(self._tokens):
            raise self._refuse()
        return test

    def _both(self) -> Test:
        tests = [self._either()]
        while self._peek() not in ("", ")"):
            self._take("AND", "and")
            tests.append(self._either())
        return lambda item: all(test(item) for test in tests)

    def _either(self) -> Test:
        tests = [self._one()]
        while self._take("OR", "or"):
            tests.append(self._one())
        return lambda item: any(test(item) for test in tests)

    def _one(self) -> Test:
        if self._take("NOT", "not"):
            test = self._one()
            return lambda item: not test(item)
        if not self._take("("):
            return self._term()
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._refuse()
        inner = self._both()
        self._depth -= 1
        if not self._take(")"):
            raise self._refuse()
        return inner

    def _term(self) -> Test:
        field, operator, value = self._next(), self._next(), self._next()
        negated = field.startswith("-") and len(field) > 1
        if not field or operator not in _OPERATORS:
            raise self._refuse()
        compare = self._comparison(operator, value)
        path = field.removeprefix("-").split(".") if negated else field.split(".")
        return lambda item: compare(_value(item, path)) != negated

    def _comparison(self, operator: str, value: str) -> Callable[[object], bool]:
        if operator in ("<", ">", "<=", ">="):
            return lambda found: found is not None and _ordered(str(found), operator, value)
        try:
            regular = operator in ("eq", "ne")
            pattern = re.compile(value if regular else ".*".join(map(re.escape, value.split("*"))), re.DOTALL)
        except re.error:
            raise self._refuse() from None
        wanted = operator not in ("!=", "ne")
        return lambda found: (found is not None and any(pattern.fullmatch(str(one)) for one in _each(found))) == wanted

    def _peek(self) -> str:
        token, quoted = self._tokens[self._at] if self._at < len(self._tokens) else ("", False)
        return f'"{token}' if quoted else token

    def _take(self, *words: str) -> bool:
        if self._peek() not in words:
            return False
        self._at += 1
        return True

    def _next(self) -> str:
        if self._at >= len(self._tokens):
            raise self._refuse()
        self._at += 1
        return self._tokens[self._at - 1][0]

    def _refuse(self) -> ApiError:
        return invalid(f"Invalid value for field 'filter': '{self._text}'. Terms are FIELD=VALUE, joined by AND or OR.")


def _value(item: JsonObject, path: list[str]) -> object:
    found: object = item
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _each(found: object) -> list[object]:
    """A list passes if one of its values does."""
    return found if isinstance(found, list) else [str(found).lower() if isinstance(found, bool) else found]


def _ordered(found: str, operator: str, value: str) -> bool:
    try:
        less, equal = float(found) < float(value), float(found) == float(value)
    except ValueError:
        less, equal = found < value, found == value
    return (less if operator[0] == "<" else not less and not equal) or (equal and operator.endswith("="))
