"""Tool calls and reasoning in what models write: every format, whole and in any pieces."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podway.serve.output_events import CallArguments, CallStart, Content, Event, Reasoning, joined
from podway.serve.output_parser import TOOL_FORMATS, OutputParser, ToolFormat, format_of

SCHEMAS: dict[str, dict[str, object]] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}, "time": {},
}  # fmt: skip
WEATHER = [CallStart("weather"), CallArguments('{"city": "x"}')]
TIME = [CallStart("time"), CallArguments("{}")]
CASES: list[tuple[ToolFormat, str, list[Event]]] = [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>', WEATHER),
    (
        "hermes",
        'Let me check. <tool_call>{"name": "weather", "arguments": {"city": "a}b\\"c"}}</tool_call>\n<tool_call>'
        '{"name":"time","arguments":{}}</tool_call> bye',
        [Content("Let me check."), CallStart("weather"), CallArguments('{"city": "a}b\\"c"}'), *TIME, Content(" bye")],
    ),
    ("hermes", '<think>\nhm <tool_call>\n</think>\n\nSo <tool_call>{"name":"time","arguments":{}}</tool_call>',
     [Reasoning("\nhm <tool_call>\n"), Content("So"), *TIME]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "time"}</tool_call>', [CallStart("time"), CallArguments('{"a": 1}')]),
    ("hermes", '<tool_call>{"name":"time","arguments":"{\\"a\\": 1}"}</tool_call>', [CallStart("time"), CallArguments('{"a": 1}')]),
    ("hermes", '<tool_call>{"name":"nope","arguments":{}}</tool_call>', [Content('{"name":"nope","arguments":{}}')]),
    ("hermes", "a < b, <tool_ and <tool_call", [Content("a < b, <tool_ and <tool_call")]),
    ("hermes", "<tool_call>\n<function=weather>\n<parameter=city>\nSão <b>\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
     "</function>\n</tool_call>", [CallStart("weather"), CallArguments('{"city": "São <b>", "days": 3}')]),
    ("hermes", "<tool_call><function=time></function></tool_call>", TIME),
    ("llama3", '{"name": "weather", "parameters": {"city": "x"}}; {"name": "time", "parameters": {}}', [*WEATHER, *TIME]),
    ("llama3", '<|python_tag|>{"name": "weather", "parameters": {"city": "x"}}', WEATHER),
    ("llama3", '[{"name": "time", "parameters": {}}, {"name": "weather", "parameters": {"city": "x"}}]', [*TIME, *WEATHER]),
    ("llama3", '[weather(city="a(b", days=2), time()]',
     [CallStart("weather"), CallArguments('{"city": "a(b", "days": 2}'), *TIME]),
    ("llama3", '{"answer": 3} is it', [Content('{"answer": 3} is it')]),
    ("llama3", "[1, 2, 3] are numbers", [Content("[1, 2, 3] are numbers")]),
    ("mistral", 'ok [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "x"}}, {"name": "time", "arguments": {}}]',
     [Content("ok"), *WEATHER, *TIME]),
    ("mistral", '[TOOL_CALLS]weather{"city": "x"}[TOOL_CALLS]time[ARGS]{}', [*WEATHER, *TIME]),
    ("deepseek", 'hm<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "x"}<｜tool▁call▁end｜>'
     "<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     [Content("hm"), *WEATHER, *TIME]),
    ("harmony", "<|channel|>analysis<|message|>need it<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
     '<|constrain|>json<|message|>{"city": "x"}<|call|>', [Reasoning("need it"), *WEATHER]),
    ("harmony", "<|channel|>final<|message|>Hello <there>", [Content("Hello <there>")]),
]  # fmt: skip


def events(tools: ToolFormat | None, pieces: list[str], **more: bool) -> list[Event]:
    parser = OutputParser(SCHEMAS, tools, reasoning=True, **more)
    found = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    assert parser.called == any(isinstance(event, CallStart) for event in found)
    return joined(found)


@pytest.mark.parametrize(("tools", "text", "expected"), CASES)
def test_whole_and_character_by_character(tools: ToolFormat, text: str, expected: list[Event]) -> None:
    assert events(tools, [text]) == expected
    assert events(tools, list(text)) == expected


@settings(max_examples=300)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 300), max_size=6))
def test_any_pieces_give_the_same(case: tuple[ToolFormat, str, list[Event]], cuts: list[int]) -> None:
    tools, text, expected = case
    ends = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert events(tools, pieces) == expected


@settings(max_examples=400)
@given(
    st.sampled_from(TOOL_FORMATS),
    st.lists(
        st.sampled_from([*(part for _, text, _ in CASES for part in text.split(" ")), "{", "}", '"', "x", "[", "("]),
        max_size=8,
    ),
    st.integers(1, 7),
)
def test_no_text_breaks_it_and_pieces_never_matter(tools: ToolFormat, words: list[str], size: int) -> None:
    text = " ".join(words)
    whole = events(tools, [text])
    assert events(tools, [text[at : at + size] for at in range(0, len(text), size)]) == whole


def test_arguments_stream_before_they_are_whole() -> None:
    parser = OutputParser(SCHEMAS, "hermes")
    assert parser.feed('Hi <tool_call>{"name": "weather", "arguments": {"ci') == [
        Content("Hi"), CallStart("weather"), CallArguments('{"ci'),
    ]  # fmt: skip
    assert parser.feed('ty": "x') == [CallArguments('ty": "x')]


def test_long_arguments_take_linear_time() -> None:
    """A megabyte in pieces of four characters; a parser that looks at all of it again each time would take minutes."""
    parser = OutputParser(SCHEMAS, "hermes")
    text = '<tool_call>{"name": "weather", "arguments": {"city": "' + "x" * 1_000_000 + '"}}</tool_call>'
    found = joined([event for at in range(0, len(text), 4) for event in parser.feed(text[at : at + 4])])
    assert len(json.loads(found[1][0])["city"]) == 1_000_000


def test_one_call_where_no_more_are_wanted() -> None:
    text = '<tool_call>{"name":"weather","arguments":{"city": "x"}}</tool_call><tool_call>{"name":"time","arguments":{}}</tool_call>'
    assert events("hermes", [text], parallel=False) == WEATHER


def test_reasoning_that_the_prompt_began() -> None:
    parser = OutputParser({}, None, reasoning=True, begun_reasoning=True)
    assert parser.feed("so</th") + parser.feed("ink>\n\nyes") + parser.finish() == [Reasoning("so"), Content("yes")]
    parser = OutputParser({}, None, reasoning=False)
    assert parser.feed("<think>a</think>b") == [Content("<think>a</think>b")]


def test_the_template_names_the_family() -> None:
    named = {
        "<tool_call>": "hermes",
        "[TOOL_CALLS]": "mistral",
        "<|channel|>": "harmony",
        "tool▁call▁begin": "deepseek",
        "": "llama3",
    }
    assert {word: format_of(f"a {word} b") for word in named} == named
