"""Chat templates as Hugging Face renders them: jinja2 in a sandbox, with the same names at hand (no jax).

One environment for training and serving, so a model is asked in the tokens that it was trained on. `render` gives a
conversation's text. `conversations` also says which stretches of that text the assistant wrote: those inside
`{% generation %}` where a template marks them, and otherwise what stands between the text that asks for an answer and
the text that has it.
"""

import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from podway.errors import UserError
from podway.extras import load

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Characters that Unicode says are never text (noncharacters): they mark a generation block while it is rendered.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"

Message = dict[str, Any]
Tools = Sequence[object] | None


class Rendered(NamedTuple):
    """A text, and the stretches [begin, end) of it that the loss is on."""

    text: str
    answers: list[tuple[int, int]]


class ChatTemplate:
    """One template, compiled once."""

    def __init__(self, source: str, words: dict[str, str], name: str) -> None:
        jinja2 = load("jinja2", "serve", f"the chat template {name}")
        self.source, self.name, self._words = source, name, words
        self._error: type[Exception] = jinja2.TemplateError
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(
                f"{name} is not a chat template: {error}", "give a jinja2 file with data.template"
            ) from None
        self._marks = "endgeneration" in source

    def render(
        self, messages: Sequence[Message], where: str, *, ask: bool = False, tools: Tools = None, **more: object
    ) -> str:
        """The text of a conversation; with `ask`, up to where the assistant is to answer. `more` is for the template."""
        return self._marked(messages, where, ask, tools, more).replace(_OPEN, "").replace(_CLOSE, "")

    def conversations(self, messages: Sequence[Message], where: str, tools: Tools = None) -> list[Rendered]:
        """One text with every answer marked.

        Some templates show an earlier answer otherwise than the last one (without its reasoning, say). Then each answer
        has a text of its own, with all that came before it as the model will see it.
        """
        if self._marks:
            return [_read_marks(self._marked(messages, where, False, tools, {}))]
        whole = self.render(messages, where, tools=tools)
        turns = []
        for at, message in enumerate(messages):
            if message.get("role") == "assistant":
                done = self.render(messages[: at + 1], where, tools=tools)
                asked = self._asked(messages[:at], where, tools)
                turns.append(Rendered(done, [(_shared(asked, done), len(done))]))
        if all(whole.startswith(turn.text) for turn in turns):
            return [Rendered(whole, [turn.answers[0] for turn in turns])]
        return turns

    def _asked(self, messages: Sequence[Message], where: str, tools: Tools) -> str:
        """The text that asks for an answer; of a conversation that begins with one, many templates cannot say it."""
        try:
            return self.render(messages, where, ask=True, tools=tools)
        except UserError:
            if messages:
                raise
            return ""

    def _marked(self, messages: Sequence[Message], where: str, ask: bool, tools: Tools, more: dict[str, object]) -> str:
        given = {"documents": None, **self._words, "add_generation_prompt": ask, **more, "tools": tools}
        try:
            return str(self._template.render(given, messages=list(messages)))
        except self._error as error:
            raise UserError(
                f"{where}: the chat template refuses this conversation: {error}",
                "change the messages, or use another template",
            ) from None
        except Exception as error:  # a template is a program: whatever it does with odd messages is the messages' fault
            raise UserError(
                f"{where}: the chat template does not fit this conversation: {error}",
                "each message needs a role and a content that is text",
            ) from None


def _environment() -> Any:
    """The names and rules of Hugging Face's apply_chat_template."""
    from jinja2 import TemplateError, nodes  # here, because only conversations need jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} ... {% endgeneration %}`: what the assistant wrote."""

        tags = {"generation"}  # noqa: RUF012 - the form jinja2 asks for

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _read_marks(text: str) -> Rendered:
    answers: list[tuple[int, int]] = []
    plain: list[str] = []
    length = 0
    for number, part in enumerate(text.split(_OPEN)):
        inside, found, after = part.partition(_CLOSE) if number else ("", "", part)
        if found:
            answers.append((length, length + len(inside)))
        plain += [inside, after]
        length += len(inside) + len(after)
    return Rendered("".join(plain), answers)


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    if other.startswith(one):
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
