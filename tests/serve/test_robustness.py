"""Requests that would harm others, and fields that must not be ignored: each was a defect of the running server."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from podway.model.tokenizer import ModelTokenizer
from podway.serve import completion_output
from podway.serve import grammar as grammars
from podway.serve.__main__ import web_config
from podway.serve.body_weight import weight, weight_outside_strings
from podway.serve.delivery import Delivery
from podway.serve.grammar import Grammars
from podway.serve.http import make_app
from podway.serve.openai import CompletionBody, sampling_params
from podway.serve.service import Service
from tests.conftest import wait_until
from tests.serve.live import Live, live


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("model")) as running:
        yield running
        running.wait_until_empty()


def complete(server: Live, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 8, **body}, timeout=60)


def chat(server: Live, **body: object) -> httpx.Response:
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **body}
    return httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60)


# --- nothing long on the event loop


def test_a_grammar_is_compiled_once_and_beside_the_event_loop(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    compile_ = Grammars._compile

    def watched(self: Grammars, grammar: grammars.Grammar) -> object:
        threads.append(threading.current_thread().name)
        return compile_(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", watched)
    for _ in range(2):
        answer = complete(server, n=8, guided_choice=["first", "second"]).json()
        assert {choice["text"] for choice in answer["choices"]} <= {"first", "second"}
    assert len(threads) == 1 and threads[0].startswith("grammar")


def test_a_grammar_that_is_too_large_or_too_slow_is_refused(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}
    refused = complete(server, guided_json=large)
    assert refused.status_code == 400 and "bytes" in refused.json()["error"]["message"]
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.05)
    release = threading.Event()
    monkeypatch.setattr(Grammars, "_compile", lambda self, grammar: release.wait(30))
    try:
        slow = complete(server, guided_regex="slow")
    finally:
        release.set()
    assert slow.status_code == 400 and "to compile" in slow.json()["error"]["message"]


def test_what_is_too_long_is_refused_before_it_is_tokenized(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("tokenized")

    monkeypatch.setattr(server.service.tokenizer, "encode", refuse)
    monkeypatch.setattr(server.service.tokenizer, "render", refuse)
    many = [{"role": "user", "content": "a"}] * 100_000
    answers = [
        complete(server, prompt="x" * 1_000_000), complete(server, prompt=[5] * 100_000), chat(server, messages=many),
        chat(server, messages=[{"role": "user", "content": "x" * 1_000_000}]),
        chat(server, tools=[{"type": "function", "function": {"name": "f"}}] * 1000),
        httpx.post(f"{server.url}/tokenize", json={"prompt": "x" * (5 << 20)}, timeout=60),
    ]  # fmt: skip
    assert [answer.status_code for answer in answers] == [400] * len(answers)
    assert httpx.post(f"{server.url}/tokenize", content=b" " * (9 << 20), timeout=60).status_code == 413


def test_long_texts_are_tokenized_in_threads(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    encode = server.service.tokenizer.encode
    monkeypatch.setattr(
        server.service.tokenizer, "encode",
        lambda *given: threads.append(threading.current_thread().name) or encode(*given),
    )  # fmt: skip
    assert httpx.post(f"{server.url}/tokenize", json={"prompt": "x" * 100_000}, timeout=60).json()["count"] == 100_000
    assert threads[0].startswith("text")


def test_bodies_that_take_long_to_read_are_refused(server: Live) -> None:
    """By count, before they are decoded or looked at one by one."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" + "0," * 1_100_000 + "0]"}}
    items = [{"type": "message", "role": "user", "content": "hi"}] * 20_000
    answers = {
        "too many values": complete(server, metadata=[{}] * 300_000),
        "1,000,000 numbers": complete(server, **{f"x{number}": 1 for number in range(100_000)}),
        "20000 items": httpx.post(f"{server.url}/v1/responses", json={"input": items}, timeout=60),
        "call have too many": chat(server, messages=[{"role": "assistant", "tool_calls": [call]}]),
        "fields, and 256": complete(server, **{f"field{number}": 1 for number in range(300)}),
        "at most 300 words": complete(server, bad_words=["a"] * 301),
        "of at most 256 characters": complete(server, bad_words=["ab" * 200]),
    }
    for words, answer in answers.items():
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], (words, answer.text[:300])


def test_marks_in_strings_are_not_values(server: Live) -> None:
    """A long text of JSON is refused for its length or tokenized, not for its commas."""
    text = '{"a": [1, 2]}, ' * 60_000
    assert complete(server, prompt=text).json()["error"]["code"] == "context_length_exceeded"
    made = httpx.post(f"{server.url}/tokenize", json={"prompt": text}, timeout=60)
    assert made.json()["count"] == len(text)


json_values = st.recursive(
    st.integers(-9, 9) | st.text('a,:"[{\\\n', max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('b"\\', max_size=3), inner, max_size=4),
)


@given(value=json_values)
def test_the_weight_of_a_body_is_that_of_its_values(value: object) -> None:
    raw = json.dumps(value).encode()
    bare = re.sub(rb'"(\\.|[^"\\])*"', b'""', raw)
    assert weight_outside_strings(raw) == weight(bare) <= weight(raw)


def test_what_is_nested_too_deep_for_a_template_is_refused(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def deep(*_: object, **__: object) -> None:
        raise RecursionError

    monkeypatch.setattr(server.service.tokenizer, "render", deep)
    refused = chat(server)
    assert refused.status_code == 400 and "nested too deep" in refused.json()["error"]["message"]


def test_idle_connections_outlive_the_pools_of_clients(server: Live) -> None:
    assert web_config(make_app(server.service), None, None).timeout_keep_alive > 120


def test_what_the_prompts_of_a_body_share_is_made_once(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    encode = server.service.tokenizer.encode

    def watched(text: str, special: bool = True) -> list[int]:
        made.append(f"{text} {threading.current_thread().name}")
        return encode(text, special)

    monkeypatch.setattr(server.service.tokenizer, "encode", watched)
    answer = complete(server, prompt=["ab"] * 40, max_tokens=1, bad_words=["z"])
    assert len(answer.json()["choices"]) == 40
    assert sum(one.startswith("z ") for one in made) == 1
    assert all("text" in one for one in made if one.startswith("ab "))  # many are tokenized in a thread


def test_large_answers_are_written_in_a_thread(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    written = completion_output.completion_logprobs
    monkeypatch.setattr(
        completion_output, "completion_logprobs",
        lambda *given: threads.append(threading.current_thread().name) or written(*given),
    )  # fmt: skip
    made = complete(server, prompt=[[7] * 250], echo=True, logprobs=20, max_tokens=1)
    assert len(made.json()["choices"][0]["logprobs"]["tokens"]) == 251
    assert threads and all(name.startswith("text") for name in threads)


def test_the_event_loop_is_woken_once_for_a_step() -> None:
    """The updates of all rows of a step, from another thread, while the event loop is busy with something else."""

    class Row:
        def __init__(self) -> None:
            self.got: list[int] = []

        def receive(self, update: int) -> None:
            self.got.append(update)

    async def run() -> int:
        delivery, rows = Delivery[int](), [Row() for _ in range(100)]
        events, wakes = asyncio.get_running_loop(), 0
        wake = events.call_soon_threadsafe

        def counted(*given: object) -> object:
            nonlocal wakes
            wakes += 1
            return wake(*given)  # type: ignore[arg-type]

        events.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]
        step = threading.Thread(target=lambda: [delivery.put(row, 1) for row in rows])
        step.start()
        step.join()
        while not rows[-1].got:
            await asyncio.sleep(0)
        assert [row.got for row in rows] == [[1]] * 100
        return wakes

    assert asyncio.run(run()) == 1


# --- answers that are valid or errors


def test_a_choice_of_thousands_is_one_of_them(server: Live) -> None:
    options = [f"option {number}" for number in range(2000)]
    made = complete(server, guided_choice=options, max_tokens=30, seed=4).json()["choices"][0]
    assert made["text"] in options and made["finish_reason"] == "stop"
    assert complete(server, guided_choice=[]).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_go_on_is_an_error_and_never_an_answer(server: Live, stream: bool) -> None:
    """The one choice needs tokens that are not allowed: from the first on, or after one that was."""
    for allowed in ([97, 98], [121]):
        answer = complete(server, guided_choice=["yes"], allowed_token_ids=allowed, stream=stream)
        text = answer.text.strip().split("data: ")[-1] if stream else answer.text
        assert "cannot follow its choice" in json.loads(text)["error"]["message"]
    made = complete(server, guided_choice=["yes"], min_tokens=6).json()["choices"][0]
    assert (made["text"], made["finish_reason"]) == ("yes", "stop"), "what the grammar has is all there is"


# --- clients that leave


def test_a_queued_stream_whose_client_has_left_leaves_the_queue(server: Live) -> None:
    """The engine is held up, so that what is asked waits for certain."""
    go_on = threading.Event()
    server.loop._asked.put(lambda: go_on.wait(60) and None)
    before = server.loop.metrics.prompt_tokens.value()
    body = {"prompt": "x" * 20, "max_tokens": 200, "ignore_eos": True, "stream": True}
    try:
        for _ in range(5):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.2))
        wait_until(lambda: not server.service.open, 30, "the server to see that its clients have left")
    finally:
        go_on.set()
    server.wait_until_empty(30)
    assert server.loop.metrics.prompt_tokens.value() == before, "nothing was computed for them"


# --- log probabilities and usage


def test_tokens_after_a_stop_string_are_not_counted(server: Live) -> None:
    free = complete(server, prompt="q", max_tokens=30, temperature=0, ignore_eos=True).json()["choices"][0]["text"]
    stop = free[4:6]
    expected = free[: free.index(stop)]
    made = complete(server, prompt="q", max_tokens=30, temperature=0, ignore_eos=True, stop=stop, logprobs=1).json()
    tokens = made["choices"][0]["logprobs"]["tokens"]
    assert made["choices"][0]["text"] == expected
    assert made["usage"]["completion_tokens"] == len(tokens) == len(made["choices"][0]["logprobs"]["text_offset"])
    assert len("".join(tokens).encode()) < len(free.encode())


def test_cached_tokens_are_not_counted_for_every_choice(server: Live) -> None:
    prompt = "a prompt of several pages, asked twice"
    complete(server, prompt=prompt)
    found = complete(server, prompt=prompt, n=4).json()["usage"]
    assert 0 < found["prompt_tokens_details"]["cached_tokens"] <= found["prompt_tokens"] == len(prompt)


def test_offsets_count_characters(server: Live) -> None:
    prompt = "é日x"
    made = complete(server, prompt=prompt, echo=True, logprobs=1, max_tokens=1, temperature=0).json()["choices"][0]
    assert made["logprobs"]["text_offset"][:6] == [0, 0, 1, 1, 1, 2]
    assert made["logprobs"]["tokens"][0] == "bytes:\\xc3"


# --- fields


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 3), ("best_of", 4), ("chat_template", "{{ messages }}"), ("use_beam_search", True), ("suffix", "x"),
        ("bad_words", ["several tokens"]), ("allowed_token_ids", []), ("truncate_prompt_tokens", 0), ("documents", [{}]),
        ("structured_outputs", {"choice": []}), ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"nothing": 1}), ("guided_json", "{"),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_heeded_are_refused_by_name(server: Live, field: str, value: object) -> None:
    refused = complete(server, **{field: value})
    assert refused.status_code == 400 and field.partition("_outputs")[0] in refused.json()["error"]["message"], (
        refused.text
    )


def test_fields_of_other_servers_that_work(server: Live) -> None:
    assert complete(server, structured_outputs={"choice": ["yes", "no"]}).json()["choices"][0]["text"] in ("yes", "no")
    assert complete(server, structured_outputs={"regex": "[ab]{3}"}).json()["choices"][0]["text"].strip("ab") == ""
    tag = {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f>"]}
    assert complete(server, response_format={"type": "structural_tag", **tag}).status_code == 200
    only = complete(server, allowed_token_ids=[97, 98], max_tokens=12).json()["choices"][0]["text"]
    assert set(only) <= {"a", "b"} and len(only) == 12
    free = complete(server, temperature=0, ignore_eos=True).json()["choices"][0]["text"]
    kept_out = complete(server, temperature=0, ignore_eos=True, bad_words=[free[0]]).json()["choices"][0]["text"]
    assert free[0] not in kept_out
    short = complete(server, prompt="0123456789", truncate_prompt_tokens=3, return_token_ids=True).json()
    assert short["choices"][0]["prompt_token_ids"] == list(b"789") and short["usage"]["prompt_tokens"] == 3
    assert len(short["choices"][0]["token_ids"]) == short["usage"]["completion_tokens"]
    assert complete(server, best_of=1, priority=0, n=1).status_code == 200


def test_a_cache_salt_keeps_prompts_apart(server: Live) -> None:
    prompt = "another prompt of more than one page"
    complete(server, prompt=prompt, cache_salt="mine")

    def cached(**more: object) -> int:
        found = complete(server, prompt=prompt, **more).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return int(found)

    assert cached(cache_salt="yours") == 0 and cached(cache_salt="mine") > 0


def test_unknown_fields_are_named_in_a_header(server: Live) -> None:
    answer = complete(server, surprise=1, user="me", metadata={})
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "surprise"
    assert "x-ignored-fields" not in complete(server, user="me").headers


def test_usage_with_every_event(server: Live) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        options = {"include_usage": True, "continuous_usage_stats": True}
        asked = {"model": "tiny", "prompt": "x", "max_tokens": 12, "stream": True, "stream_options": options}
        events = list(client.completions.create(**asked, extra_body={"ignore_eos": True}))  # type: ignore[call-overload]
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(counts) and counts[-1] == 12 and counts[0] > 0


# --- the end


def test_a_server_that_drains_refuses_and_then_ends_streams_with_an_error(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    from podway.serve.__main__ import drain

    class Ending:
        should_exit = False

    with live(tmp_path_factory.mktemp("drained")) as server:
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 8}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.service.draining = True
            assert httpx.get(f"{server.url}/health").status_code == 503
            assert complete(server).status_code == 503
            ending = Ending()
            drain(server.service, ending, 0.0)  # type: ignore[arg-type]
            assert ending.should_exit
            last = [line for line in lines if line][-1]
        assert "the server is stopping" in last
        server.wait_until_empty()


def test_web_pages_of_named_origins_may_ask_and_requests_are_logged(server: Live) -> None:
    lines: list[str] = []
    app = make_app(server.service, ["secret"], origins=["https://page.example"], access_log=lines.append)
    with TestClient(app) as client:
        asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        allowed = client.options("/v1/chat/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        other = client.options("/v1/chat/completions", headers={**asked, "Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
        assert client.get("/ping").status_code == 200 and client.post("/ping").status_code == 200
        assert client.get("/v1/models?key=secret", headers={"x-request-id": "\x1b[2J"}).status_code == 401
    assert len(lines) == 5 and "GET /v1/models 401" in lines[-1]
    assert "secret" not in "".join(lines) and "\x1b" not in "".join(lines)


def test_the_defaults_of_the_model_are_used(tmp_path: Path) -> None:
    config = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "repetition_penalty": 1.05,
        "min_p": "no",
        "eos_token_id": 0,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    service = Service("m", ModelTokenizer(tmp_path, 256), 100)
    assert service.defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.05}
    plain = sampling_params(CompletionBody(seed=1), 256, False, service.defaults, [])
    assert (plain.temperature, plain.top_k, plain.top_p, plain.repetition, plain.min_p) == (0.6, 20, 0.9, 1.05, 0.0)
    asked = sampling_params(CompletionBody(seed=1, temperature=0, top_p=1.0), 256, False, service.defaults, [])
    assert (asked.temperature, asked.top_p) == (0.0, 1.0)
