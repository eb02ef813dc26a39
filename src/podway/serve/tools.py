"""Tools: which may be called, and what a model must write when it has to call one (no jax).

A model that may call (`auto`) writes calls the way its template taught it (`output_parser.py`). One that must call (`required`,
or one tool by name) is held to a bare JSON object with name and parameters by a grammar.
"""

from podway.serve.openai import ChatBody, JsonObject, JsonValue, RequestError
from podway.serve.output_events import Schemas

MAX_TOOLS = 512


def wanted_tools(body: ChatBody) -> list[JsonObject]:
    """The tools that the model may call; each must have a name."""
    if not body.tools or body.tool_choice == "none":
        return []
    if len(body.tools) > MAX_TOOLS:
        raise RequestError(f"{len(body.tools)} tools, and {MAX_TOOLS} are the limit", param="tools")
    for tool in body.tools:
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise RequestError("tools: each must be {type: function, function: {...}}", param="tools")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError("tools: a function has no name", param="tools")
    return body.tools


def forced_schema(body: ChatBody, tools: list[JsonObject]) -> JsonObject | None:
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


def _parameters(schema: JsonValue) -> JsonObject:
    """The schema of a function's arguments. Where it names some and does not speak of others, there are no others: a model
    that makes up arguments calls a function that has none of them (and some clients strip `additionalProperties`)."""
    if not isinstance(schema, dict) or not schema:
        return {"type": "object"}
    return {"additionalProperties": False, **schema} if schema.get("properties") else schema


def schemas_of(tools: list[JsonObject]) -> Schemas:
    """The schemas of the functions' arguments by name, as the parser of answers wants them."""
    parameters = ((tool["function"]["name"], tool["function"].get("parameters")) for tool in tools)
    return {name: schema if isinstance(schema, dict) else {} for name, schema in parameters}
