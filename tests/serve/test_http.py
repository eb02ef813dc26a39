"""The API as clients see it: over a socket, with the official client."""

import json
import random
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.live import BYTES, Live, live
from tests.serve.tiny import greedy


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("model")) as running:
        yield running
        running.wait_until_empty()


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def text_of(tokens: list[int]) -> str:
    return bytes(t for t in tokens if t).decode(errors="replace")


def test_models(client: openai.OpenAI, server: Live) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["root"] == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_completion_is_what_the_model_says(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="hello", max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    expected = greedy(BYTES, list(b"hello"), 8)
    assert answer.choices[0].text == text_of(expected)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 8, 13)


def test_ids_lists_and_n(client: openai.OpenAI) -> None:
    def ask(prompt: object, **more: object) -> list[str]:
        made = client.completions.create(model="tiny", prompt=prompt, max_tokens=4, temperature=0, **more)  # type: ignore[call-overload]
        return [choice.text for choice in sorted(made.choices, key=lambda c: c.index)]

    one = ask("ab")
    assert ask([97, 98]) == one
    assert ask(["ab", "cd"])[0] == one[0]
    assert ask([[97, 98], [97, 98]]) == one * 2
    assert ask("ab", n=3) == one * 3


def test_streaming_gives_the_same_text_and_the_usage_last(client: openai.OpenAI) -> None:
    arguments = {"model": "tiny", "prompt": "stream me", "max_tokens": 20, "temperature": 0.7, "seed": 5}
    whole = client.completions.create(**arguments)  # type: ignore[call-overload]
    chunks = list(client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert all(c.usage is None for c in chunks[:-1])
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    free = client.completions.create(
        model="tiny", prompt="q", max_tokens=30, temperature=0, extra_body={"ignore_eos": True}
    )
    text = free.choices[0].text
    stop = text[5:8]
    for stream in (False, True):
        made = client.completions.create(
            model="tiny", prompt="q", max_tokens=30, temperature=0, stop=[stop, "never"], stream=stream,
            extra_body={"ignore_eos": True},
        )  # type: ignore[call-overload]  # fmt: skip
        got = "".join(c.choices[0].text for c in made) if stream else made.choices[0].text
        assert got == text[: text.index(stop)]


def test_logprobs_and_echo_as_lm_eval_asks(client: openai.OpenAI) -> None:
    prompt = list(b"some context")
    made = client.completions.create(
        model="tiny", prompt=[prompt], max_tokens=1, temperature=0, seed=1234, logprobs=1, echo=True
    )
    logprobs = made.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None and logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == len(prompt) + 1
    assert logprobs.token_logprobs[0] is None
    for token, score, top in list(
        zip(logprobs.tokens or [], logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    )[1:]:
        assert top[token] == score <= max(top.values()) <= 0
    assert made.choices[0].text.startswith("some context")


def test_prompt_logprobs_without_echo(client: openai.OpenAI) -> None:
    """The same numbers that echo gives, by token id; a stream has no place for them."""
    asked = {"model": "tiny", "prompt": "context", "max_tokens": 2, "temperature": 0}
    echoed = client.completions.create(**asked, echo=True, logprobs=1).choices[0].logprobs  # type: ignore[call-overload]
    choice = client.completions.create(**asked, extra_body={"prompt_logprobs": 1}).choices[0]  # type: ignore[call-overload]
    assert choice.logprobs is None and not choice.text.startswith("context")
    first, *rest = choice.prompt_logprobs
    assert first is None and len(rest) == len("context") - 1
    for byte, score, expected in zip(b"ontext", rest, echoed.token_logprobs[1:7], strict=True):
        assert score[str(byte)]["logprob"] == pytest.approx(expected, abs=1e-5)
        assert score[str(byte)]["decoded_token"] == chr(byte) and len(score) <= 2
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        client.completions.create(**asked, stream=True, extra_body={"prompt_logprobs": 1})  # type: ignore[call-overload]


def test_chat(client: openai.OpenAI, server: Live) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    made = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=6, temperature=0, logprobs=True, top_logprobs=3,
        extra_body={"ignore_eos": True},
    )  # type: ignore[call-overload]  # fmt: skip
    prompt = list(b"<system>be brief\n<user>hi\n<assistant>")
    assert made.choices[0].message.content == text_of(greedy(BYTES, prompt, 6))
    assert made.usage.prompt_tokens == len(prompt)
    content = made.choices[0].logprobs.content
    assert len(content) == 6 and all(len(one.top_logprobs) == 3 for one in content)
    assert all(one.logprob == one.top_logprobs[0].logprob for one in content)


def test_a_final_message_can_be_continued(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="tiny", max_tokens=3, temperature=0,
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False, "ignore_eos": True},
    )  # fmt: skip
    assert made.choices[0].message.content == text_of(greedy(BYTES, list(b"<user>hi\n<assistant>so"), 3))


def test_chat_streams_role_first_and_finish_last(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5, temperature=0, stream=True, n=2
        )
    )
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert mine[-1].finish_reason in ("length", "stop")


def test_json_schema_is_followed(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["age", "ok"],
        "additionalProperties": False,
    }
    made = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "who"}], max_tokens=60, temperature=1.0, seed=3,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
    )  # fmt: skip
    found = json.loads(made.choices[0].message.content or "")
    assert set(found) == {"age", "ok"} and 0 <= found["age"] <= 99
    assert made.choices[0].finish_reason == "stop"


def test_regex_and_choice(client: openai.OpenAI) -> None:
    def ask(**more: object) -> str:
        made = client.completions.create(model="tiny", prompt="x", max_tokens=20, seed=1, extra_body=more)
        return made.choices[0].text

    assert ask(guided_regex="[0-9]{3}-[a-f]{2}")[3] == "-"
    assert ask(guided_choice=["yes", "no"]) in ("yes", "no")


def test_a_tool_that_must_be_called(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False},
    }}  # fmt: skip
    arguments = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "tools": [tool], "max_tokens": 80,
                 "tool_choice": {"type": "function", "function": {"name": "weather"}}, "seed": 2}  # fmt: skip
    made = client.chat.completions.create(**arguments)  # type: ignore[call-overload]
    [call] = made.choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["unit"] in ("C", "F")
    assert made.choices[0].finish_reason == "tool_calls"
    chunks = [c.choices[0] for c in client.chat.completions.create(**arguments, stream=True) if c.choices]  # type: ignore[call-overload]
    parts = [part for c in chunks for part in c.delta.tool_calls or []]
    assert parts[0].function.name == "weather" and {part.index for part in parts} == {0}
    assert "".join(part.function.arguments or "" for part in parts) == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"
    history = [
        *arguments["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "20 C"},
    ]
    made = client.chat.completions.create(model="tiny", messages=history, tools=[tool], max_tokens=4)  # type: ignore[call-overload]
    assert made.choices[0].finish_reason in ("length", "stop")


def test_a_client_that_leaves_frees_its_pages(server: Live) -> None:
    body = {"prompt": "x" * 20, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
        next(response.iter_lines())
    server.wait_until_empty()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/completions",
            json={**body, "stream": False, "n": 20},
            timeout=httpx.Timeout(30, read=0.05),
        )
    server.wait_until_empty()
    assert 'finished_reason="abort"' in httpx.get(f"{server.url}/metrics").text


@pytest.mark.long
def test_many_streams_at_once_with_disconnects(server: Live) -> None:
    """40 clients, some of which leave in the middle: every answer that was read to its end is right."""
    wrong: list[str] = []

    def one(number: int) -> None:
        chance = random.Random(number)
        prompt = f"client {number % 7}" * (1 + number % 3)
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "stream": True, "ignore_eos": True}
        leave = chance.random() < 0.3
        got = ""
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    got += json.loads(line[6:])["choices"][0]["text"]
                    if leave:
                        return
        if got != text_of(greedy(BYTES, list(prompt.encode()), 12)):
            wrong.append(prompt)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    server.wait_until_empty()
    assert server.loop._waiting == 0


def test_tokens_back_and_forth(server: Live) -> None:
    made = httpx.post(f"{server.url}/tokenize", json={"prompt": "héy"}).json()
    assert made == {"tokens": [104, 195, 169, 121], "count": 4, "max_model_len": 256}
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "héy"}
    assert "chat_template" in httpx.get(f"{server.url}/tokenizer_info").json()


def test_pages_for_machines(server: Live) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    text = httpx.get(f"{server.url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in ("num_requests_running", "time_to_first_token_seconds", "kv_cache_usage_perc", "generation_tokens",
                 "request_success", "prefix_cache_hits", "inter_token_latency_seconds", "e2e_request_latency_seconds",
                 "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
                 "request_time_per_output_token_seconds", "request_params_max_tokens", "iteration_tokens_total"):  # fmt: skip
        assert all(sample.labels["model_name"] == "tiny" for sample in families[f"vllm:{name}"].samples), name
    counted = {sample.name: sample.value for sample in families["vllm:generation_tokens"].samples}
    assert counted["vllm:generation_tokens_total"] > 0
    ended = {
        part: sum(s.value for s in families[f"vllm:request_{part}_time_seconds"].samples if s.name.endswith("_sum"))
        for part in ("prefill", "decode", "inference")
    }
    assert ended["prefill"] > 0 and ended["inference"] >= ended["decode"] > 0
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize"} <= set(paths)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", b"{", 400, "not JSON"),
        ("/v1/completions", b"[]", 400, "object"),
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "other"),
        ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400, "temperature"),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": "x" * 300}, 400, "the limit is 256"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 9999}, 400, "the limit is 256"),
        ("/v1/completions", {"prompt": [300]}, 400, "not a token id"),
        ("/v1/completions", b'{"prompt": "\\ud800"}', 400, "not JSON"),
        ("/v1/completions", {"prompt": ""}, 400, "empty"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "guided_regex": "("}, 400, "regex"),
        ("/v1/chat/completions", {}, 400, "messages"),
        ("/v1/chat/completions", {"messages": []}, 400, "empty"),
        ("/v1/chat/completions", {"messages": [{"role": "cat", "content": "x"}]}, 400, "role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, 400, "no tools"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
        ("/v1/embeddings", {"input": "x"}, 404, "embeddings"),
        ("/v1/nothing", {}, 404, "/v1/nothing"),
        ("/detokenize", {"tokens": [999]}, 400, "999"),
    ],
)  # fmt: skip
def test_what_is_refused(server: Live, path: str, body: object, status: int, words: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(server.url + path, content=content)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert words in error["message"] and {"message", "type", "param", "code"} == set(error)


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nope", prompt="x")
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.completions.create(model="tiny", prompt="x" * 400)


def test_a_body_that_is_too_large(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    from podway.serve import http

    monkeypatch.setattr(http, "MAX_BYTES", 1000)
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * 2000})
    assert response.status_code == 413 and "error" in response.json()


def test_fuzzed_bodies_are_only_ever_refused(server: Live) -> None:
    chance = random.Random(0)
    odd: list[object] = [
        None,
        True,
        -1,
        0,
        1e308,
        "",
        "x",
        [],
        {},
        [None],
        {"a": []},
        "\x00",
        [[1]],
        10**30,
        {"type": "json_schema"},
    ]
    fields = ["model", "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "stream_options", "logprobs",
              "top_logprobs", "logit_bias", "seed", "tools", "tool_choice", "response_format", "echo", "min_tokens", "stop_token_ids",
              "guided_json", "chat_template_kwargs", "presence_penalty"]  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=30) as session:
        for _ in range(400):
            base: dict[str, object] = {"prompt": "ab", "max_tokens": 1} if chance.random() < 0.5 else {
                "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}  # fmt: skip
            for field in chance.sample(fields, chance.randrange(1, 4)):
                base[field] = chance.choice(odd)
            path = chance.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
            status = session.post(path, json=base).status_code
            assert status == 200 or 400 <= status < 500, (path, base, status)
    server.wait_until_empty()


def test_keys_warmth_and_a_full_queue(tmp_path_factory: pytest.TempPathFactory) -> None:
    with live(tmp_path_factory.mktemp("model"), keys=("secret", "other"), max_queue=2) as server:
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200
        good = {"Authorization": "Bearer other"}
        assert httpx.get(f"{server.url}/v1/models", headers=good).status_code == 200
        full = httpx.post(
            f"{server.url}/v1/completions", json={**body, "n": 60, "prompt": "y"}, headers=good, timeout=30
        )
        assert full.status_code == 429 and full.headers["retry-after"]
        server.wait_until_empty()
        loops, server.service.loops = server.service.loops, []
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=good).status_code == 503
        server.service.loops = loops


def test_an_engine_that_fails_says_so_to_everyone(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with live(tmp_path_factory.mktemp("model")) as server:
        body = {"prompt": "x", "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200

        def broken(*_: object) -> None:
            raise RuntimeError("out of memory on the device")

        monkeypatch.setattr(server.loop.engine, "launch", broken)
        for stream in (False, True):
            failed = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": stream}, timeout=10)
            assert failed.status_code == 500 and "error" in failed.json()
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert "out of memory on the device" in capfd.readouterr().err
