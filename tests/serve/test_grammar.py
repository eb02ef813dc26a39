"""Grammars by random walks: whatever a model would choose among the tokens allowed, an answer that is complete is valid."""

import json
import os
import random
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podway.errors import UserError
from podway.model.tokenizer import ModelTokenizer
from podway.serve.grammar import Grammar, Grammars, Guide, GuideError

EXAMPLES = int(os.environ.get("PODWAY_FUZZ_GRAMMARS", "600")) // 3
slow = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
many = settings(slow, max_examples=2000)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(ModelTokenizer(tmp_path_factory.mktemp("bytes"), 256))


def walk(guide: Guide, seed: int, most: int = 400) -> str | None:
    """An answer of random tokens among those allowed, until it is complete or the end token is drawn; None: it was cut off.

    Closing brackets and quotes are preferred now and then, so that walks end."""
    chance, out = random.Random(seed), bytearray()
    for _ in range(most):
        bits = np.unpackbits(guide.allowed().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:256]).tolist()
        ends = [token for token in (0, *b'"}]') if token in allowed]
        token = chance.choice(ends if ends and chance.random() < 0.4 else allowed)
        if token == 0:
            return out.decode()
        out.append(token)
        guide.advance([token])
        if guide.complete:
            return out.decode()
    return None


names = st.text('abé"\\ ', min_size=1, max_size=4)
schemas = st.recursive(
    st.sampled_from([
        {"type": "boolean"}, {"type": "integer"}, {"type": "integer", "minimum": -3, "maximum": 40}, {"type": "null"},
        {"type": "string", "maxLength": 5}, {"enum": ["a", 3, None, "é\n"]}, {"const": {"x": [1]}},
        {"type": "string", "pattern": "^[a-c]{1,3}$"}, {"type": "number", "minimum": 0, "maximum": 2},
        {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 99}, {"type": "string", "minLength": 2, "maxLength": 3},
        {"type": "string", "format": "date"}, {"type": ["boolean", "null"]}, {"type": "number", "exclusiveMinimum": 1, "maximum": 9},
    ]),
    lambda inner: st.one_of(
        st.builds(lambda item, most: {"type": "array", "items": item, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(
            lambda fields: {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False},
            st.dictionaries(names, inner, max_size=3),
        ),
        st.builds(  # some may be left out, and others may come
            lambda fields, rest: {"type": "object", "properties": fields, "additionalProperties": rest, "maxProperties": 4},
            st.dictionaries(names, inner, max_size=2), inner,
        ),
        st.builds(
            lambda first, rest: {"type": "array", "prefixItems": [first], "items": rest, "minItems": 1, "maxItems": 3}, inner, inner
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)  # fmt: skip
ONE, TREE = {"$ref": "#/$defs/one"}, {"$ref": "#/$defs/tree"}
with_references = schemas.map(
    lambda named: {
        **TREE, "$defs": {"one": named, "tree": {"type": "array", "items": {"anyOf": [ONE, TREE]}, "maxItems": 2}}
    }
)  # fmt: skip


@given(schema=schemas | with_references, seed=st.integers(0, 1 << 30))
def check_json_schemas(grammars: Grammars, schema: dict[str, object], seed: int) -> None:
    try:
        text = walk(grammars.start(Grammar.of("json_schema", schema)), seed)
    except GuideError:
        return
    except UserError as error:
        assert "cannot be followed" in error.what
        return
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


@given(
    options=st.lists(st.text("ab|.(\\[ é日\n", min_size=1, max_size=6), min_size=1, max_size=40),
    seed=st.integers(0, 1 << 30),
)
def check_choices(grammars: Grammars, options: list[str], seed: int) -> None:
    assert walk(grammars.start(Grammar.of("choice", options)), seed) in options


pieces = st.sampled_from(["a", "[bc]", "\\d", "x{2,3}", "(y|zz)", "é", "[^a-y\\n]", "w*", "v?"])


@given(pattern=st.lists(pieces, min_size=1, max_size=6).map("".join), seed=st.integers(0, 1 << 30))
def check_regular_expressions(grammars: Grammars, pattern: str, seed: int) -> None:
    text = walk(grammars.start(Grammar.of("regex", pattern)), seed, most=60)
    if text is not None:
        # llguidance may know characters (digits, say) that this Python's tables of Unicode do not have yet.
        newer = any(unicodedata.category(c) == "Cn" for c in text)
        assert re.fullmatch(pattern, text) or newer


@pytest.mark.parametrize("check", [check_json_schemas, check_choices, check_regular_expressions])
def test_what_is_complete_is_valid(grammars: Grammars, check: Callable[[Grammars], None]) -> None:
    slow(check)(grammars)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("check", [check_json_schemas, check_choices, check_regular_expressions])
def test_what_is_complete_is_valid_2000_times(grammars: Grammars, check: Callable[[Grammars], None]) -> None:
    many(check)(grammars)


def test_a_schema_that_may_be_itself_is_followed_or_refused(grammars: Grammars) -> None:
    """The library that checks answers above does not end on such a schema."""
    endless = {**ONE, "$defs": {"one": {"anyOf": [ONE, {"type": "boolean"}]}}}
    try:
        guide = grammars.start(Grammar.of("json_schema", endless))
    except UserError as error:
        assert "cannot be followed" in error.what
    else:
        assert walk(guide, 1) in ("true", "false")


def test_copies_do_not_move_each_other(grammars: Grammars) -> None:
    both = [grammars.start(Grammar.of("choice", ["ab", "ac"])) for _ in (0, 1)]
    both[0].advance(list(b"ab"))
    assert both[0].complete and not both[1].complete
    assert walk(both[1], 3) in ("ab", "ac")


@pytest.mark.parametrize(
    ("kind", "value"),
    [("regex", "("), ("choice", []), ("choice", [""]), ("lark", "start: missing"), ("json_schema", {"type": "nothing"}),
     ("structural_tag", {"structures": [{}], "triggers": []}), ("structural_tag", {"structures": [], "triggers": []}),
     ("structural_tag", {"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": [""]}), ("structural_tag", []),
     ("structural_tag", {"structures": [{"begin": 1, "schema": [], "end": None}], "triggers": ["a"]}),
     ("structural_tag", {"format": {"type": "sequence", "elements": []}}),
     ("structural_tag", {"format": {"type": "triggered_tags", "triggers": ["a"], "tags": [], "at_least_one": True}}),
     ("choice", ["x" * (1 << 18)])],
)  # fmt: skip
def test_what_cannot_be_followed(grammars: Grammars, kind: str, value: object) -> None:
    with pytest.raises(UserError, match=kind):
        grammars.start(Grammar.of(kind, value))


TAG = {"begin": "<f>", "end": "</f>"}


@pytest.mark.parametrize("tag", [
    {"structures": [{**TAG, "schema": {"type": "boolean"}}], "triggers": ["<f"]},
    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [
        {**TAG, "content": {"type": "json_schema", "json_schema": {"type": "boolean"}}},
    ]}},
])  # fmt: skip
def test_what_stands_in_a_tag_follows_its_schema_in_both_spellings(grammars: Grammars, tag: object) -> None:
    guide = grammars.start(Grammar.of("structural_tag", tag))
    guide.advance(list(b"well <f>true</f> and"))
    with pytest.raises(GuideError):
        guide.advance(list(b" <f>3"))


def test_a_token_that_is_not_allowed_is_an_error(grammars: Grammars, tmp_path: Path) -> None:
    with pytest.raises(GuideError, match="cannot follow"):
        grammars.start(Grammar.of("regex", "[0-9]+")).advance(list(b"x"))
