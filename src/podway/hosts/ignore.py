"""Which paths of a tree its ignore files leave out, exactly as git would decide.

Flow: 1. `Rules.parse` reads the lines of one ignore file. 2. Each line becomes one regular expression over bytes, following
git's own matcher (its wildmatch: `*` within a name, `**` across names, `?`, `[...]` with ranges and classes, backslash).
3. `ignored` asks the files from the deepest directory up; in each the last line that matches decides. A directory that is
left out is not entered, so nothing below it can be brought back: the walk in tree.py prunes it.

Why not a library: the one at hand differs from git on classes, negated directories and bytes that are not UTF-8, and raises
on lines that git ignores. tests/hosts/test_ignore.py holds this module to `git check-ignore` on random patterns.
"""

import re
from collections.abc import Iterable, Sequence

_SPECIAL = re.compile(rb"[*?\[\\]")
_NEVER = b"(?!)"
_BOM = b"\xef\xbb\xbf"

# The sets of C's isalpha() and its kin as git defines them (git-compat-util.h: ASCII only, four kinds of space).
_CLASSES = {
    b"alnum": rb"0-9A-Za-z",
    b"alpha": rb"A-Za-z",
    b"blank": rb" \t",
    b"cntrl": rb"\x00-\x1f\x7f",
    b"digit": rb"0-9",
    b"graph": rb"\x21-\x7e",
    b"lower": rb"a-z",
    b"print": rb"\x20-\x7e",
    b"punct": rb"\x21-\x2f\x3a-\x40\x5b-\x60\x7b-\x7e",
    b"space": rb" \t\n\r",
    b"upper": rb"A-Z",
    b"xdigit": rb"0-9A-Fa-f",
}


class _Malformed(Exception):
    """A pattern that git accepts and that matches nothing."""


class _Rule:
    """One line: what it matches, and whether it leaves out or brings back."""

    __slots__ = ("by_name", "exclude", "folders_only", "matches", "pattern")

    def __init__(self, line: bytes) -> None:
        self.exclude = not line.startswith(b"!")
        line = line.removeprefix(b"!")
        self.folders_only = line.endswith(b"/")
        line = line.removesuffix(b"/")
        self.by_name = b"/" not in line
        self.pattern = _pattern(line, self.by_name)
        self.matches = re.compile(self.pattern, re.DOTALL).fullmatch


class Rules:
    """The lines of one ignore file, for the paths below the directory it stands in."""

    def __init__(self, rules: Sequence[_Rule], depth: int) -> None:
        self._rules = list(reversed(rules))
        self.depth = depth
        # Most paths match no line at all: two alternations tell, before any line is asked.
        names = b"|".join(b"(?:%s)" % rule.pattern for rule in rules if rule.by_name)
        paths = b"|".join(b"(?:%s)" % rule.pattern for rule in rules if not rule.by_name)
        self._any_name = re.compile(names or _NEVER, re.DOTALL).fullmatch
        self._any_path = re.compile(paths or _NEVER, re.DOTALL).fullmatch

    @classmethod
    def parse(cls, data: bytes, depth: int = 0) -> "Rules":
        """Read an ignore file; `depth` is the length of its directory's path, to cut from the paths it is asked about."""
        lines = data.removeprefix(_BOM).split(b"\n")
        lines = [_trimmed(line.removesuffix(b"\r")) for line in lines if not line.startswith(b"#")]
        return cls([_Rule(line) for line in lines if line], depth)

    def decide(self, path: bytes, name: bytes, is_folder: bool) -> bool | None:
        """True: left out; False: brought back; None: no line of this file says anything."""
        path = path[self.depth :]
        if not (self._any_name(name) or self._any_path(path)):
            return None
        for rule in self._rules:
            if (is_folder or not rule.folders_only) and rule.matches(name if rule.by_name else path):
                return rule.exclude
        return None


def ignored(files: Iterable[Rules], path: bytes, name: bytes, is_folder: bool) -> bool:
    """Whether ignore files, given from the deepest to the one that yields to all others, leave a path out."""
    for rules in files:
        decision = rules.decide(path, name, is_folder)
        if decision is not None:
            return decision
    return False


def _trimmed(line: bytes) -> bytes:
    """Without trailing spaces, unless a backslash keeps one."""
    end = keep = 0
    while end < len(line):
        if line[end : end + 1] == b"\\":
            end += 2
            keep = end
        else:
            end += 1
            keep = keep if line[end - 1 : end] == b" " else end
    return line[:keep]


def _pattern(line: bytes, by_name: bool) -> bytes:
    """The regular expression of a pattern; of one that git can never match, one that never matches."""
    try:
        if by_name:
            return _translate(line, within_name=True) if line else _NEVER
        line = line.removeprefix(b"/")
        # git compares what precedes the first special character as it is, and gives its matcher only the rest: so a
        # `**` that follows such text counts as the beginning of a name.
        special = _SPECIAL.search(line)
        plain = special.start() if special else len(line)
        return re.escape(line[:plain]) + _translate(line[plain:], within_name=False)
    except _Malformed:
        return _NEVER


def _translate(glob: bytes, *, within_name: bool) -> bytes:
    parts: list[bytes] = []
    at = 0
    while at < len(glob):
        char = glob[at : at + 1]
        if char == b"*":
            part, at = _stars(glob, at, within_name)
        elif char == b"?":
            part, at = b"[^/]", at + 1
        elif char == b"[":
            part, at = _set(glob, at + 1)
        elif char == b"\\":
            if at + 1 == len(glob):
                raise _Malformed
            part, at = re.escape(glob[at + 1 : at + 2]), at + 2
        else:
            part, at = re.escape(char), at + 1
        parts.append(part)
    return b"".join(parts)


def _stars(glob: bytes, at: int, within_name: bool) -> tuple[bytes, int]:
    end = at
    while glob[end : end + 1] == b"*":
        end += 1
    after = glob[end : end + 2]
    whole_name = (at == 0 or glob[at - 1 : at] == b"/") and (after in (b"", b"\\/") or after[:1] == b"/")
    if end - at == 1 or within_name or not whole_name:
        return b"[^/]*", end
    if after[:1] == b"/":
        return b"(?:.*/)?", end + 1
    return b".*", end


def _set(glob: bytes, at: int) -> tuple[bytes, int]:
    """`[...]` from after the bracket: a class of bytes, never the slash; and where it ends."""
    negated = glob[at : at + 1] in (b"!", b"^")
    at += negated
    items: list[bytes] = []
    first: int | None = None  # the possible beginning of a range
    start = at
    while at == start or glob[at : at + 1] != b"]":
        char = glob[at : at + 1]
        if char == b"-" and first is not None and glob[at + 1 : at + 2] not in (b"", b"]"):
            last, at = _literal(glob, at + 1)
            if first <= last:
                items.append(b"\\x%02x-\\x%02x" % (first, last))
            first = None
        elif glob[at : at + 2] == b"[:" and (end := _class_end(glob, at + 2)) is not None:
            if glob[at + 2 : end] not in _CLASSES:
                raise _Malformed
            items.append(_CLASSES[glob[at + 2 : end]])
            first, at = None, end + 2
        else:
            first, at = _literal(glob, at)
            items.append(b"\\x%02x" % first)
    inner = b"".join(items)
    if negated:
        return b"[^/%s]" % inner, at + 1
    return (b"(?!/)[%s]" % inner if inner else _NEVER), at + 1


def _class_end(glob: bytes, at: int) -> int | None:
    """Where the name of `[:name:]` ends; None if the bracket that follows closes no class."""
    end = glob.find(b"]", at)
    if end < 0:
        raise _Malformed
    return end - 1 if end - 1 >= at and glob[end - 1 : end] == b":" else None


def _literal(glob: bytes, at: int) -> tuple[int, int]:
    """One byte of a set, which a backslash may precede, and where the next begins."""
    if glob[at : at + 1] == b"\\":
        at += 1
    if at >= len(glob):
        raise _Malformed
    return glob[at], at + 1
