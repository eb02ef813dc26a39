"""Answers that must follow a grammar: JSON, a JSON schema, a regular expression, a choice (llguidance; no jax).

`Grammars` knows the tokens of a model. `compile` checks a grammar and keeps it by its content, so that the choices of a
request and later requests share one compilation; `start` returns a `Guide` of one answer: which tokens may come next (a bit
for each), moved on by the tokens that came. `Grammars.guides` does both in a thread of its own: llguidance releases the
interpreter, and the server's event loop goes on. A grammar that is too large or takes too long is refused.

A matcher that fails (a limit of the library, a token that it did not allow) raises `GuideError`: the request then ends with
an error, never with an answer that looks complete and is not valid.
"""

import asyncio
import hashlib
import json
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from podway.errors import UserError
from podway.extras import load
from podway.model.tokenizer import ModelTokenizer
from podway.serve import structural_tags

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Words = npt.NDArray[np.uint32]
MAX_GRAMMAR_BYTES = 1 << 18
MAX_OPTIONS = 10_000
COMPILE_SECONDS = 10.0
_KEPT = 128  # compiled grammars
_COMPILERS = 2  # threads


class Grammar(msgspec.Struct, frozen=True):
    """What an answer must follow: a `json_schema`, a `regex`, a `choice`, a `lark` grammar or a `structural_tag`; `source` is JSON."""

    kind: str
    source: str

    @staticmethod
    def of(kind: str, value: object) -> "Grammar":
        return Grammar(kind, json.dumps(value))


class GuideError(UserError):
    """A guide that cannot go on; the request ends with this error."""


class _Bytes:
    """The tokens of a model of bytes, in the form that llguidance asks for."""

    def __init__(self, vocab: int) -> None:
        self.eos_token_id, self.bos_token_id = 0, None
        self.tokens = [b"\xff<end>"] + [bytes([i]) for i in range(1, 256)]
        self.tokens += [f"\xff<{i}>".encode() for i in range(256, vocab)]
        self.tokens = self.tokens[:vocab]
        self.special_token_ids = [0, *range(256, vocab)]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class Grammars:
    """All grammars of one model."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="grammar")

    @cached_property
    def _inner(self) -> "LLTokenizer":
        llguidance = load("llguidance", "serve", "structured output")
        path, vocab = self._tokenizer.path, self._tokenizer.vocab
        tokens = llguidance.TokenizerWrapper(_Bytes(vocab)) if path is None else str(path)
        made: LLTokenizer = llguidance.LLTokenizer(tokens, n_vocab=vocab, eos_token=sorted(self._tokenizer.stop_ids))
        return made

    async def guides(self, grammar: Grammar, count: int) -> "list[Guide]":
        """Guides for so many answers, made beside the event loop, or why the grammar cannot be followed."""
        _check_size(grammar)
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._guides, grammar, count)
        try:
            return await asyncio.wait_for(asyncio.shield(work), COMPILE_SECONDS)
        except TimeoutError:
            work.add_done_callback(lambda done: done.cancelled() or done.exception())  # it is nobody's any more
            raise UserError(
                f"the {grammar.kind} takes more than {COMPILE_SECONDS:g} s to compile", "use a simpler one"
            ) from None

    def compile(self, grammar: Grammar) -> "LLMatcher":
        """The matcher at its start, from the last few that were compiled or again. Never moved on: `start` copies it."""
        key = hashlib.blake2b(f"{grammar.kind}\0{grammar.source}".encode(), digest_size=16).digest()
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
        _check_size(grammar)
        made = self._compile(grammar)
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = _llguidance_text(grammar, self._tokenizer)
            # Silent: where what else was asked leaves no token (min_tokens past the grammar's end), it would write to stderr.
            matcher = LLMatcher(self._inner, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
            matcher.compute_bitmask()  # some limits show only when the first tokens are looked for
        except ValueError as error:
            raise _not_followed(grammar, str(error)) from None
        if matcher.is_error():
            raise _not_followed(grammar, matcher.get_error())
        return matcher

    def start(self, grammar: Grammar) -> "Guide":
        """A guide for one answer."""
        [guide] = self._guides(grammar, 1)
        return guide

    def _guides(self, grammar: Grammar, count: int) -> "list[Guide]":
        matcher, words = self.compile(grammar), -(-self._tokenizer.vocab // 32)
        return [Guide(matcher.deep_copy(), words, grammar.kind) for _ in range(count)]


def _check_size(grammar: Grammar) -> None:
    if len(grammar.source) > MAX_GRAMMAR_BYTES:
        raise UserError(
            f"the {grammar.kind} has {len(grammar.source)} bytes, and {MAX_GRAMMAR_BYTES} are the limit",
            "make it smaller",
        )


def _not_followed(grammar: Grammar, why: str) -> UserError:
    return UserError(
        f"the {grammar.kind} cannot be followed: {why.splitlines()[0][:300] if why else 'no reason given'}", "change it"
    )


def _llguidance_text(grammar: Grammar, tokenizer: ModelTokenizer) -> str:
    """The grammar as llguidance reads it."""
    from llguidance import LLMatcher

    value: Any = json.loads(grammar.source)
    if grammar.kind == "json_schema":
        # Free white space lets a model fill its answer with blanks.
        strict: Any = {"whitespace_flexible": False}
        return LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=strict)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(str(value))
    if grammar.kind == "choice":
        # One regular expression: a rule with an alternative for each option meets the parser's limit on a row.
        options = [str(option) for option in value]
        if not options or len(options) > MAX_OPTIONS:
            raise ValueError(f"{len(options)} options, and there must be 1 to {MAX_OPTIONS}")
        if all(options):
            return LLMatcher.grammar_from_regex("|".join(map(_escaped, options)))
        raise ValueError("an option is empty")
    if grammar.kind == "structural_tag":
        return structural_tags.llguidance_text(value, tokenizer)
    return LLMatcher.grammar_from_lark(str(value))


def _escaped(text: str) -> str:
    """A text as a regular expression for exactly it."""
    return "".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):x}}}" for c in text)


class Guide:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: "LLMatcher", words: int, kind: str) -> None:
        self._matcher, self._words, self._kind = matcher, words, kind

    def allowed(self, also: Words | None = None) -> Words:
        """A bit for each token that may come next, of those that `also` allows."""
        raw = self._matcher.compute_bitmask()
        self._check()
        # llguidance has a bit more than there are tokens.
        allowed = np.frombuffer(raw, np.uint32)[: self._words]
        if also is not None:
            allowed = allowed & also
        if not allowed.any():
            raise _stuck(self._kind, "no token is left")
        return allowed

    def advance(self, tokens: list[int]) -> None:
        """These came."""
        for token in tokens:
            if self._matcher.is_stopped() and not self._matcher.is_error():
                return
            self._matcher.consume_token(token)
            self._check()

    @property
    def complete(self) -> bool:
        """Whether the answer has all that the grammar lets it have."""
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _stuck(self._kind, str(self._matcher.get_error()))


def _stuck(kind: str, why: str) -> GuideError:
    first = (why.splitlines() or [""])[0][:300]
    hint = "use a simpler one, or leave out what contradicts it"
    return GuideError(f"the answer cannot follow its {kind}: {first}", hint, status=422)
