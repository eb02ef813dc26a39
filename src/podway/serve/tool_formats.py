"""How models write tool calls: a parser for each family (no jax, no HTTP).

  hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>                                 Hermes, Qwen 2.5, Qwen 3
            <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>    Qwen3-Coder
  llama3    {"name": …, "parameters": {…}}, several by ";" or in a list, or [f(a=1), g()]        Llama 3 and 4
  mistral   [TOOL_CALLS][{"name": …, "arguments": {…}}] or [TOOL_CALLS]NAME{…}                   Mistral
  deepseek  <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜> and the older form with ```json
  harmony   <|channel|>commentary to=functions.NAME<|message|>{…}<|call|>                        GPT-OSS

A call of a function that was not offered is text.
"""

import ast
import json
import re
from collections.abc import Generator

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
    drop,
    json_call,
    json_object,
    skip_space,
    text_then,
    until,
)

# --- Hermes, Qwen


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")


def hermes(source: Input, schemas: Schemas) -> Parts:
    while (yield from text_then(source, "<tool_call>")):
        yield from skip_space(source)
        if source.text.startswith("{"):
            yield from json_call(source, schemas)
        else:
            if (yield from begins(source, "<function=")):
                while ">" not in source.text and not source.ended:
                    yield None
            found = _FUNCTION.match(source.text)
            if found is None or found[1] not in schemas:
                yield Content("<tool_call>")
                continue
            source.match(_FUNCTION)
            yield CallStart(found[1])
            yield from _xml_arguments(source, schemas[found[1]])
        yield from until(source, ("</tool_call>",), drop)


def _xml_arguments(source: Input, schema: dict[str, object]) -> Parts:
    """<parameter=KEY>VALUE</parameter>…</function> as JSON, one parameter at a time."""
    properties = schema.get("properties")
    kinds = properties if isinstance(properties, dict) else {}
    begun = False
    while (yield from until(source, ("<parameter=", "</function>"), drop)) == "<parameter=":
        source.text = "<parameter=" + source.text
        while ">" not in source.text and not source.ended:
            yield None
        found = source.match(_PARAMETER)
        if found is None:
            break
        value: list[str] = []
        yield from until(source, ("</parameter>",), lambda text, value=value: value.append(text) or Content(""))  # type: ignore[misc]
        text = _typed("".join(value).removeprefix("\n").removesuffix("\n"), kinds.get(found[1]))
        yield CallArguments(f"{', ' if begun else '{'}{json.dumps(found[1])}: {text}")
        begun = True
    yield CallArguments("}" if begun else "{}")


def _typed(text: str, kind: object) -> str:
    """A value as JSON: a string unless the schema says that it is something else, and it is."""
    wanted = kind.get("type") if isinstance(kind, dict) else None
    if wanted != "string":
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        if wanted is not None or not isinstance(value, str):
            return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


# --- Llama


_TAG = "<|python_tag|>"


def llama3(source: Input, schemas: Schemas) -> Parts:
    """Calls stand at the beginning of an answer, or after the python tag."""
    while True:
        if (yield from begins(source, _TAG)):
            source.text = source.text.lstrip().removeprefix(_TAG)
            yield from skip_space(source)
        if source.text.lstrip().startswith(("{", "[")):
            yield from _bare_calls(source, schemas)
        if not (yield from _until_tag(source)):
            return


def _until_tag(source: Input) -> Generator[Event | None, None, bool]:
    found = yield from until(source, (_TAG,), Content)
    if found:
        source.text = _TAG + source.text
    return bool(found)


def _bare_calls(source: Input, schemas: Schemas) -> Parts:
    source.text = source.text.lstrip()
    while len(source.text) < 2 and not source.ended:
        yield None
    if source.text.startswith("["):
        after = source.text[1:].lstrip()
        while not after and not source.ended:
            yield None
            after = source.text[1:].lstrip()
        if not after.startswith(("{", "]", "[", '"')):
            yield from _pythonic(source, schemas)
            return
    yield from json_call(source, schemas)
    while (yield from begins(source, ";")):
        source.text = source.text.lstrip().removeprefix(";")
        yield from skip_space(source)
        if source.text.startswith("{"):
            yield from json_call(source, schemas)


def _pythonic(source: Input, schemas: Schemas) -> Parts:
    """[f(a=1), g(b="x")]: each call when its parenthesis closes; the list as text where it is none."""
    scanned, depth, quote, begin, escaped = 1, 0, "", 1, False
    calls = 0
    while True:
        while scanned < len(source.text):
            c, scanned = source.text[scanned], scanned + 1
            if quote:
                escaped, quote = c == "\\" and not escaped, "" if c == quote and not escaped else quote
            elif c in "\"'":
                quote = c
            elif c in "([{":
                depth += 1
            elif c in ")]}":
                depth -= 1
                if depth == 0 and c == ")":
                    found = _python_call(source.text[begin:scanned].lstrip(" ,\n\t"), schemas)
                    if found is None:
                        break
                    yield from found
                    calls, begin = calls + 1, scanned
                elif depth < 0:  # the end of the list
                    if not calls:
                        break
                    source.take(scanned)
                    return
        else:
            if not source.ended:
                yield None
                continue
        break
    if not calls:
        yield Content(source.take(len(source.text)))
    else:
        source.take(len(source.text))


def _python_call(text: str, schemas: Schemas) -> list[Event] | None:
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
            return None
        name = ast.unparse(call.func)
        arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
        written = json.dumps(arguments, ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return [CallStart(name), CallArguments(written)] if name in schemas else None


# --- Mistral


_MISTRAL_NAME = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\][\w\-]*\s*)?(?:\[ARGS\])?\s*(?=\{)")
_MARKER = "[TOOL_CALLS]"


def mistral(source: Input, schemas: Schemas) -> Parts:
    while (yield from text_then(source, _MARKER)):
        yield from skip_space(source)
        if source.text.startswith("["):
            source.take(1)
            while True:
                yield from skip_space(source)
                if source.text.startswith(","):
                    source.take(1)
                elif source.text.startswith("{"):
                    yield from json_call(source, schemas)
                else:
                    source.take(1 if source.text.startswith("]") else 0)
                    break
            continue
        while "{" not in source.text and not source.ended:
            yield None
        found = _MISTRAL_NAME.match(source.text)
        if found is None or found[1] not in schemas:
            yield Content(_MARKER)
            continue
        source.match(_MISTRAL_NAME)
        yield CallStart(found[1])
        yield from json_object(source, CallArguments)
        yield from skip_space(source)


# --- DeepSeek


_DS_CALL, _DS_SEP, _DS_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DS_CALLS, _DS_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DS_OLD = re.compile(r"\s*([\w.\-]+)\s*```(?:json)?\s*(?=\{)")


def deepseek(source: Input, schemas: Schemas) -> Parts:
    while (yield from text_then(source, _DS_CALLS)):
        while True:
            marker = yield from until(source, (_DS_CALL, _DS_CALLS_END), drop)
            if marker != _DS_CALL:
                break
            head: list[str] = []
            yield from until(source, (_DS_SEP,), lambda text, head=head: head.append(text) or Content(""))  # type: ignore[misc]
            name = "".join(head).strip()
            while "{" not in source.text and not source.ended:
                yield None
            if name == "function" and (found := source.match(_DS_OLD)) is not None:
                name = found[1]
            yield from skip_space(source)
            if name in schemas and source.text.startswith("{"):
                yield CallStart(name)
                yield from json_object(source, CallArguments)
                yield from until(source, (_DS_END,), drop)
            else:
                yield Content(name)
                yield from until(source, (_DS_END,), Content)


# --- GPT-OSS


_ENDS = ("<|end|>", "<|call|>", "<|return|>")


def harmony(source: Input, schemas: Schemas) -> Parts:
    """Messages with a header each: the channel says what the body is."""
    if source.text == "" and not source.ended:
        yield None
    while source.text or not source.ended:
        head: list[str] = []
        found = yield from until(source, ("<|message|>",), lambda text, head=head: head.append(text) or Content(""))  # type: ignore[misc]
        header = "".join(head)
        if not found:
            yield Content(re.sub(r"<\|\w+\|>", "", header))  # not harmony after all
            return
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        to = re.search(r"to=functions\.([\w.\-]+)", header)
        if to is not None and to[1] in schemas:
            yield CallStart(to[1])
            yield from until(source, _ENDS, CallArguments)
        elif channel is not None and channel[1] == "analysis":
            yield from until(source, _ENDS, Reasoning)
        else:
            yield from until(source, _ENDS, Content)
        while not source.text and not source.ended:
            yield None
