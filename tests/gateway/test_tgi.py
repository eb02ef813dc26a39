"""Models that speak TGI's API, asked by OpenAI's client."""

import asyncio
import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.gateway import tgi
from podway.gateway.table import RoutedService

from .live import Live, Replica, Seen, live, says
from .test_proxy import body_of, run, status, used

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
SERVED = {"format": "tgi", "chat_template": TEMPLATE, "eos_token": "</s>"}
ASK: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
WHOLE = {
    "generated_text": "Hello!</s>",
    "details": {"finish_reason": "eos_token", "generated_tokens": 3, "seed": 1, "prefill": [], "tokens": []},
}


def token(text: str, **more: object) -> bytes:
    found = {"index": 1, "token": {"id": 5, "text": text, "logprob": -0.1, "special": False}, "generated_text": None}
    return b"data:" + json.dumps({**found, "details": None, **more}).encode() + b"\n\n"


def tells(*events: bytes) -> Any:
    """A stream as TGI writes it, with events cut anywhere."""

    async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        text = b"".join(events)
        for begin in range(0, len(text), 37):
            part = text[begin : begin + 37]
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    return answer


async def ask(up: Live, **more: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key="none", max_retries=0)
    async with client:
        found = await client.chat.completions.create(model="m", messages=ASK, **more)
        return [one async for one in found] if more.get("stream") else found


def test_a_chat() -> None:
    async def test() -> None:
        async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
            body = json.dumps(WHOLE).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-prompt-tokens: 11\r\n")
            writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)

        replica = Replica("a", answer)
        async with live(replica, **SERVED) as up:
            found = await ask(up, temperature=0, max_tokens=7, stop=["END"], seed=4, top_p=1.0)
            assert found.choices[0].message.content == "Hello!" and found.choices[0].finish_reason == "stop"
            assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (11, 3)
            seen = replica.seen[0]
            assert seen.target == "/generate" and "accept-encoding" not in seen.headers
            assert json.loads(seen.body) == {
                "inputs": "<system>Be kind.<user>hi<assistant>",
                "parameters": {
                    "do_sample": False,
                    "max_new_tokens": 7,
                    "stop": ["END", "</s>"],
                    "details": True,
                    "seed": 4,
                },
                "stream": False,
            }
            assert used(up) == [("-", "chat", "m", 1, 11, 3)]

    run(test)


def test_several_answers() -> None:
    async def test() -> None:
        other = {"generated_text": "Hi.", "finish_reason": "length", "generated_tokens": 2}
        details = {**WHOLE["details"], "best_of_sequences": [other]}  # type: ignore[dict-item]
        replica = Replica("a", says(json.dumps({**WHOLE, "details": details}).encode()))
        async with live(replica, **SERVED) as up:
            found = await ask(up, n=2)
            assert [(one.message.content, one.finish_reason) for one in found.choices] == [
                ("Hello!", "stop"),
                ("Hi.", "length"),
            ]
            assert json.loads(replica.seen[0].body)["parameters"]["best_of"] == 2

    run(test)


def test_a_stream() -> None:
    async def test() -> None:
        end = {"finish_reason": "stop_sequence", "generated_tokens": 6, "seed": None, "input_length": 12}
        replica = Replica(
            "a",
            tells(
                token("Hel"),
                token("lo E"),
                token("NE"),
                token("N"),
                token("D", generated_text="Hello ENEND", details=end),
            ),
        )
        async with live(replica, **SERVED) as up:
            events = await ask(up, stream=True, stop="END", stream_options={"include_usage": True})
            text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
            assert text == "Hello EN"
            assert events[0].choices[0].delta.role == "assistant"
            assert events[-2].choices[0].finish_reason == "stop"
            assert events[-1].usage.prompt_tokens == 12 and events[-1].usage.completion_tokens == 6
            assert replica.seen[0].target == "/generate_stream"
            assert used(up) == [("-", "chat", "m", 1, 12, 6)]

    run(test)


def test_a_stream_that_fails_is_raised() -> None:
    async def test() -> None:
        failed = b'data:{"error":"Request failed during generation","error_type":"generation"}\n\n'
        async with live(Replica("a", tells(token("Hel"), failed)), **SERVED) as up:
            with pytest.raises(openai.APIError, match="during generation"):
                await ask(up, stream=True)

    run(test)


def test_plain_completions_and_errors() -> None:
    async def test() -> None:
        refused = json.dumps({"error": "inputs must have less than 10 tokens", "error_type": "validation"}).encode()
        replica = Replica("a", says(json.dumps(WHOLE).encode()))
        async with live(replica, **SERVED) as up:
            answer = await up.post("/v1/completions", b'{"model":"m","prompt":"once"}')
            assert json.loads(body_of(answer))["choices"][0]["text"] == "Hello!"
            assert json.loads(replica.seen[0].body)["inputs"] == "once"
            replica.answer = says(refused, status=422)
            answer = await up.post("/v1/completions", b'{"model":"m","prompt":"once"}')
            assert status(answer) == 422 and "less than 10" in json.loads(body_of(answer))["error"]["message"]
            replica.answer = says(b"<html>")
            answer = await up.post("/v1/completions", b'{"model":"m","prompt":"once"}')
            assert json.loads(body_of(answer))["error"]["code"] == "bad_answer"

    run(test)


@pytest.mark.parametrize(
    ("path", "body", "says_what"),
    [
        ("/v1/embeddings", {"input": "x"}, "no /v1/embeddings"),
        ("/v1/chat/completions", {"messages": ASK, "tools": [{}]}, "no tools"),
        ("/v1/chat/completions", {"messages": ASK, "logprobs": True}, "no logprobs"),
        ("/v1/chat/completions", {"messages": ASK, "stream": True, "n": 2}, "no n above 1"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"content": [{"type": "image_url"}]}]}, "text only"),
        ("/v1/chat/completions", {"messages": ASK, "response_format": {"type": "json_object"}}, "json_object"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "one prompt"),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}, "temperature"),
    ],
)
def test_what_tgi_has_not_is_refused(path: str, body: dict[str, object], says_what: str) -> None:
    async def test() -> None:
        replica = Replica("a", says(b"{}"))
        async with live(replica, **SERVED) as up:
            answer = await up.post(path, json.dumps({"model": "m", **body}).encode())
            assert status(answer) == 400 and says_what in json.loads(body_of(answer))["error"]["message"]
            assert not replica.seen

    run(test)


def test_without_a_template_the_replica_is_asked_as_openai_is() -> None:
    async def test() -> None:
        replica = Replica("a", says(b"{}"))
        async with live(replica, format="tgi") as up:
            assert status(await up.post()) == 200
            assert replica.seen[0].target == "/v1/chat/completions"

    run(test)


@given(st.text("abE", max_size=30), st.lists(st.text("abE", min_size=1, max_size=4), max_size=3), st.data())
def test_text_ends_before_a_stop_sequence(text: str, stops: list[str], data: st.DataObject) -> None:
    trimmer = tgi.StopTrimmer(tuple(stops))
    shown, at = "", 0
    while at < len(text):
        size = data.draw(st.integers(1, 5))
        shown += trimmer.feed(text[at : at + size])
        at += size
        assert text.startswith(shown) and not any(stop in shown for stop in stops)
    shown += trimmer.end()
    assert not any(stop in shown for stop in stops)
    if not any(stop in text for stop in stops):
        assert shown == text


@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_an_answer(data: bytes, streamed: bool) -> None:
    service = RoutedService(name="chat", model="m", format="tgi", chat_template=TEMPLATE)
    question = json.dumps({"model": "m", "prompt": "x", "stream": streamed}).encode()
    answer = tgi.TgiAnswer(tgi.translate(service, b"/v1/completions", question))
    answer.head(200, [])
    assert isinstance(answer.feed(b"data:" + data) + answer.end(), bytes)
