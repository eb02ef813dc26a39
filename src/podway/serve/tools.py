"""Tool calls: what a model must write when it has to call one, and what of its text is a call (no jax).

A model that may call (`auto`) writes calls the way its template taught it; two ways are known: JSON between <tool_call> and
</tool_call> (Hermes, Qwen), and a bare JSON object with name and parameters (Llama 3). A model that must call (`required`,
or one tool by name) is held to the second form by a grammar.
"""

import json
import re
import uuid
from typing import Any

from podway.serve.openai import ChatBody, RequestError

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)
_OPENINGS = ("<tool_call>", "{", "[")


def wanted_tools(body: ChatBody) -> list[dict[str, Any]]:
    """The tools that the model may call; each must have a name."""
    if not body.tools or body.tool_choice == "none":
        return []
    for tool in body.tools:
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise RequestError("tools: each must be {type: function, function: {...}}", param="tools")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError("tools: a function has no name", param="tools")
    return body.tools


def forced_schema(body: ChatBody, tools: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The JSON schema of a call that must be made, or None where the model decides."""
    choice = body.tool_choice
    if choice in (None, "auto", "none") or not tools:
        if choice not in (None, "auto", "none"):
            raise RequestError("tool_choice asks for a call, and there are no tools", param="tool_choice")
        return None
    functions = [tool["function"] for tool in tools]
    if isinstance(choice, dict):
        named = choice.get("function")
        name = named.get("name") if isinstance(named, dict) else None
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise RequestError(f"tool_choice: there is no tool {str(name)[:60]!r}", param="tool_choice")
    elif choice != "required":
        raise RequestError(f"tool_choice: unknown value {choice[:40]!r}", param="tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": f["name"]}, "parameters": _parameters(f.get("parameters"))},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for f in functions
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _parameters(schema: Any) -> Any:
    """The schema of a function's arguments. Where it names some and does not speak of others, there are no others: a model
    that makes up arguments calls a function that has none of them (and some clients strip `additionalProperties`)."""
    if not isinstance(schema, dict) or not schema:
        return {"type": "object"}
    return {"additionalProperties": False, **schema} if schema.get("properties") else schema


def may_be_call(text: str) -> bool | None:
    """Whether an answer that begins so is a call; None: too early to say."""
    start = text.lstrip()
    if any(start.startswith(opening) for opening in _OPENINGS):
        return True
    return None if any(opening.startswith(start) for opening in _OPENINGS) else False


def calls_in(text: str, tools: list[dict[str, Any]]) -> tuple[str | None, list[dict[str, Any]]]:
    """(the text around the calls, the calls) of a whole answer."""
    names = {tool["function"]["name"] for tool in tools}
    pieces = _TAGGED.findall(text)
    rest = _TAGGED.sub("", text).strip() if pieces else ""
    found: list[Any] = []
    for piece in pieces or [text]:
        try:
            value = json.loads(piece)
        except ValueError:
            continue
        found += value if isinstance(value, list) else [value]
    calls = []
    for value in found:
        if isinstance(value, dict) and value.get("name") in names:
            arguments = value.get("arguments", value.get("parameters", {}))
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            function = {"name": value["name"], "arguments": written}
            calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
    return (rest or None, calls) if calls else (text, [])
