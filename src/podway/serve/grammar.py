"""Answers that must follow a grammar: JSON, a JSON schema, a regular expression, a choice (llguidance; no jax).

`Grammars` knows the tokens of a model. `start` checks a grammar and returns a `Guide`: which tokens may come next (a bit for
each), moved on by the tokens that came.
"""

import json
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from podway.errors import UserError
from podway.model.tokenizer import ModelTokenizer

Words = npt.NDArray[np.uint32]


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

    @cached_property
    def _inner(self) -> Any:
        try:
            import llguidance  # only structured output needs it
        except ImportError:
            raise UserError("structured output needs llguidance", "pip install 'podway[serve]'", status=501) from None
        ends = sorted(self._tokenizer.stop_ids)
        if self._tokenizer.path is not None:
            return llguidance.LLTokenizer(str(self._tokenizer.path), n_vocab=self._tokenizer.vocab, eos_token=ends)
        wrapper = llguidance.TokenizerWrapper(_Bytes(self._tokenizer.vocab))
        return llguidance.LLTokenizer(wrapper, n_vocab=self._tokenizer.vocab, eos_token=ends)

    def start(self, kind: str, value: Any) -> "Guide":
        """A guide for a json_schema, regex, lark grammar or choice."""
        inner = self._inner
        from llguidance import LLMatcher

        try:
            if kind == "json_schema":
                # Free white space lets a model fill its answer with blanks.
                strict: Any = {"whitespace_flexible": False}
                grammar = LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=strict)
            elif kind == "regex":
                grammar = LLMatcher.grammar_from_regex(str(value))
            elif kind == "choice":
                options = " | ".join(json.dumps(str(option)) for option in value)
                grammar = LLMatcher.grammar_from_lark(f"start: {options}")
            else:
                grammar = LLMatcher.grammar_from_lark(str(value))
            # Silent: where what else was asked leaves no token (min_tokens past the grammar's end), it would write to stderr.
            matcher = LLMatcher(inner, grammar, log_level=0)
        except ValueError as error:
            raise UserError(f"the {kind} cannot be followed: {error}", "change it") from None
        if matcher.is_error():
            raise UserError(f"the {kind} cannot be followed: {matcher.get_error()}", "change it")
        return Guide(matcher, -(-self._tokenizer.vocab // 32))


class Guide:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher, self._words = matcher, words

    def allowed(self) -> Words:
        """A bit for each token that may come next."""
        # llguidance has a bit more than there are tokens.
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._words]

    def advance(self, tokens: list[int]) -> None:
        """These came."""
        for token in tokens:
            if self._matcher.is_stopped():
                return
            self._matcher.consume_token(token)
