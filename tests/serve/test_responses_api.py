"""/v1/responses with the official client: whole and streamed answers agree, tools and structured output work."""

import json
from collections.abc import Iterator

import httpx
import openai
import pytest

from podway.serve.responses_api import ResponsesBody, chat_body
from tests.serve.live import Live, live

TOOL = {
    "type": "function", "name": "weather",
    "parameters": {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("model")) as running:
        yield running
        running.wait_until_empty()


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_whole_and_streamed_answers_agree(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "input": "hello", "instructions": "be brief", "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**asked, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
    chatted = client.chat.completions.create(
        model="tiny", max_tokens=12, temperature=0, extra_body={"ignore_eos": True},
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
    )  # fmt: skip
    assert whole.output_text == chatted.choices[0].message.content
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 12 and whole.usage.input_tokens == chatted.usage.prompt_tokens
    events = list(client.responses.create(**asked, stream=True, extra_body={"ignore_eos": True}))  # type: ignore[call-overload]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text


def test_tools_and_structured_output(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "input": "?", "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 80}
    [call] = client.responses.create(**asked).output  # type: ignore[call-overload]
    assert call.type == "function_call" and call.name == "weather" and json.loads(call.arguments)["unit"] in ("C", "F")
    events = list(client.responses.create(**asked, stream=True))  # type: ignore[call-overload]
    parts = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    [done] = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert json.loads(parts)["unit"] in ("C", "F") and done.arguments == parts
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "?"}]}, {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": call.arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "20"},
    ]  # fmt: skip
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    made = client.responses.create(model="tiny", input=history, text=text, max_output_tokens=40)  # type: ignore[call-overload]
    assert json.loads(made.output_text)["ok"] in (True, False) and made.status == "completed"


def test_calls_become_one_message() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    made = chat_body(ResponsesBody(input=[call, {**call, "call_id": "b"}], instructions="x"))
    assert [m["role"] for m in made.messages] == ["system", "assistant"] and len(made.messages[1]["tool_calls"]) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("previous_response_id", "resp_1"), ("background", True), ("tools", [{"type": "web_search"}]), ("input", []),
     ("input", [{"type": "item_reference", "id": "x"}])],
)  # fmt: skip
def test_what_is_refused(server: Live, field: str, value: object) -> None:
    refused = httpx.post(f"{server.url}/v1/responses", json={"input": "x", field: value})
    assert refused.status_code == 400, refused.text
