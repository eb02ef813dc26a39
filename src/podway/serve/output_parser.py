"""What a model writes in a conversation, cut into text, reasoning and tool calls as it comes (no jax, no HTTP).

`OutputParser.feed` takes text in any pieces and returns events; `finish` the last ones. Whole answers go through the same
parser as streams, so both agree whatever the pieces are. Reasoning stands between <think> and </think> at the beginning, or in
harmony's analysis channel; how calls are written is a matter of the model's family (`tool_formats.py`).
"""

from typing import Literal, get_args

from podway.serve.output_events import (
    CallArguments,
    CallStart,
    Content,
    Event,
    Input,
    Parts,
    Reasoning,
    Schemas,
    begins,
    joined,
    skip_space,
    until,
)
from podway.serve.tool_formats import deepseek, harmony, hermes, llama3, mistral

ToolFormat = Literal["hermes", "llama3", "mistral", "deepseek", "harmony"]
TOOL_FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)


class OutputParser:
    """The parser of one answer."""

    def __init__(
        self,
        schemas: Schemas,
        tools: ToolFormat | None,
        *,
        reasoning: bool = False,
        begun_reasoning: bool = False,
        parallel: bool = True,
    ) -> None:
        self._input = Input()
        self._parts = _answer(self._input, schemas, tools, reasoning, begun_reasoning)
        self._parallel, self._calls = parallel, 0

    @property
    def called(self) -> bool:
        return self._calls > 0

    def feed(self, text: str) -> list[Event]:
        """The events that this text makes certain."""
        self._input.text += text
        return self._run()

    def finish(self) -> list[Event]:
        """The rest."""
        self._input.ended = True
        return self._run()

    def _run(self) -> list[Event]:
        found: list[Event] = []
        for event in self._parts:
            if event is None:
                break
            self._calls += isinstance(event, CallStart)
            beyond = self._calls > 1 and not self._parallel and isinstance(event, CallStart | CallArguments)
            if not beyond and event[0]:
                found.append(event)
        return joined(found)


def _answer(source: Input, schemas: Schemas, tools: ToolFormat | None, reasoning: bool, begun_reasoning: bool) -> Parts:
    if tools == "harmony":
        yield from harmony(source, schemas)
        return
    if reasoning and not begun_reasoning and (yield from begins(source, "<think>")):
        source.text = source.text.lstrip().removeprefix("<think>")
        begun_reasoning = True
    if begun_reasoning:
        yield from until(source, ("</think>",), Reasoning)
        yield from skip_space(source)
    formats = {"hermes": hermes, "llama3": llama3, "mistral": mistral, "deepseek": deepseek}
    if tools is not None and schemas:
        yield from formats[tools](source, schemas)
    while True:
        yield Content(source.take(len(source.text)))
        if source.ended:
            return
        yield None


def format_of(template: str) -> ToolFormat:
    """How a model whose chat template is this writes its calls."""
    if "<|channel|>" in template:
        return "harmony"
    if "tool▁call▁begin" in template:
        return "deepseek"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "hermes" if "<tool_call>" in template else "llama3"


def reasons(template: str) -> bool:
    """Whether a model whose chat template is this writes its reasoning between <think> and </think>."""
    return "</think>" in template
