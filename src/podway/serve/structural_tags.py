"""Free text in which some tags begin what must follow a JSON schema, as llguidance reads it (no jax).

Both spellings are read: `{structures: [{begin, schema, end}], triggers}` of OpenAI-compatible servers, and xgrammar's and vLLM's
`{format: {type: "triggered_tags", triggers, tags: [{begin, content: {type: "json_schema", json_schema}, end}]}}`.
"""

from typing import Any, Literal

import msgspec

from podway.decoding import from_plain
from podway.model.tokenizer import ModelTokenizer


class _Structure(msgspec.Struct):
    begin: str
    schema: dict[str, Any]
    end: str


class _Structures(msgspec.Struct):
    structures: list[_Structure]
    triggers: list[str]


class _Content(msgspec.Struct):
    type: Literal["json_schema"]
    json_schema: dict[str, Any]


class _Tag(msgspec.Struct):
    begin: str
    content: _Content
    end: str


class _TriggeredTags(msgspec.Struct):
    type: Literal["triggered_tags"]
    triggers: list[str]
    tags: list[_Tag]
    at_least_one: bool = False
    stop_after_first: bool = False


class _Format(msgspec.Struct):
    format: _TriggeredTags


def llguidance_text(value: object, tokenizer: ModelTokenizer) -> str:
    """The tags as a grammar; ValueError says what is wrong with them."""
    from llguidance import StructTag

    asked = _read(value)
    tags = []
    for one in asked.structures:
        trigger = next((trigger for trigger in asked.triggers if trigger and one.begin.startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"no trigger begins {one.begin[:40]!r}")
        tags.append(StructTag(begin=one.begin, grammar=one.schema, end=one.end, trigger=trigger))
    if not tags:
        raise ValueError("there is no tag")
    return StructTag.to_grammar(tags, assume_special=all(tokenizer.is_special(tag.trigger) for tag in tags))


def _read(value: object) -> _Structures:
    try:
        if not isinstance(value, dict) or "format" not in value:
            return from_plain(value, _Structures)
        wanted = from_plain(value, _Format).format
    except msgspec.ValidationError as error:
        raise ValueError(f"{error}; structures need begin, schema and end, and there must be triggers") from None
    if wanted.at_least_one or wanted.stop_after_first:
        raise ValueError("at_least_one and stop_after_first are not supported")
    structures = [_Structure(tag.begin, tag.content.json_schema, tag.end) for tag in wanted.tags]
    return _Structures(structures, wanted.triggers)
