"""Clients that people use, each against the server whose address is the first argument. Run with the interpreter of `tools/clients`:

.cache/clients/bin/python tests/serve/clients.py http://127.0.0.1:8000 litellm_asks
"""

import json
import sys
import tempfile
from pathlib import Path

SCHEMA = {
    "title": "who", "type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"], "additionalProperties": False,
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": {
        "type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False,
    }},
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "hi"}]


def litellm_asks(url: str) -> None:
    import litellm

    def ask(**more):  # type: ignore[no-untyped-def]
        return litellm.completion(
            model="hosted_vllm/tiny", api_base=f"{url}/v1", api_key="none", messages=MESSAGES, temperature=0, **more
        )

    made = ask(max_tokens=6)
    assert made.usage.completion_tokens in range(1, 7), made
    chunks = list(ask(max_tokens=6, stream=True))
    assert [c.choices[0].finish_reason for c in chunks][-1] in ("length", "stop")
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == made.choices[0].message.content
    form = {"type": "json_schema", "json_schema": {"name": "who", "schema": SCHEMA, "strict": True}}
    formed = ask(max_tokens=40, response_format=form)
    assert 0 <= json.loads(formed.choices[0].message.content)["age"] <= 99
    called = ask(max_tokens=80, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}})
    [call] = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["unit"] in ("C", "F")
    written = litellm.text_completion(
        model="hosted_vllm/tiny", api_base=f"{url}/v1", api_key="none", prompt="once", max_tokens=4, logprobs=2
    )
    assert len(written.choices[0].logprobs.tokens) == written.usage.completion_tokens
    try:
        litellm.completion(model="hosted_vllm/other", api_base=f"{url}/v1", api_key="none", messages=MESSAGES)
    except litellm.NotFoundError as error:
        assert "other" in str(error)
    else:
        raise AssertionError("a model that is not there was answered")


def langchain_asks(url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="tiny", max_tokens=6, temperature=0)
    whole = model.invoke("hello")
    assert whole.usage_metadata["output_tokens"] in range(1, 7)
    parts = list(model.stream("hello", stream_usage=True))
    assert "".join(p.content for p in parts) == whole.content
    assert any(p.usage_metadata for p in parts)
    assert len(model.batch(["a", "b", "c"])) == 3
    longer = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="tiny", max_tokens=80, temperature=0)
    formed = longer.with_structured_output(SCHEMA, method="json_schema").invoke("who")
    assert 0 <= formed["age"] <= 99
    called = longer.bind_tools([TOOL], tool_choice="weather").invoke("?")
    assert called.tool_calls[0]["name"] == "weather" and called.tool_calls[0]["args"]["unit"] in ("C", "F")
    scored = longer.bind(logprobs=True, top_logprobs=2, max_tokens=3).invoke("hi")
    assert len(scored.response_metadata["logprobs"]["content"]) == scored.usage_metadata["output_tokens"]


def lm_eval_asks(url: str) -> None:
    """A tiny multiple-choice task over local-completions (log likelihoods of token ids with echo), and one that generates."""
    import lm_eval

    with tempfile.TemporaryDirectory() as folder:
        rows = [json.dumps({"q": f"a{i}", "c": ["x", "yy"], "l": 0}) for i in range(4)]
        Path(folder, "d.jsonl").write_text("\n".join(rows))
        data = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/d.jsonl\ntest_split: test\n"
        Path(folder, "choose.yaml").write_text(
            f"task: choose\n{data}output_type: multiple_choice\ndoc_to_text: '{{{{q}}}}'\ndoc_to_choice: '{{{{c}}}}'\n"
            "doc_to_target: l\nmetric_list:\n  - metric: acc\n"
        )
        Path(folder, "write.yaml").write_text(
            f"task: write\n{data}output_type: generate_until\ndoc_to_text: '{{{{q}}}}'\ndoc_to_target: '{{{{c[0]}}}}'\n"
            "generation_kwargs:\n  until: ['zz']\n  max_gen_toks: 6\n  do_sample: false\nmetric_list:\n  - metric: exact_match\n"
        )
        results = lm_eval.simple_evaluate(
            model="local-completions",
            model_args=f"base_url={url}/v1/completions,model=tiny,tokenizer_backend=remote,num_concurrent=2,max_length=200",
            tasks=["choose", "write"],
            task_manager=lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False),
        )
    assert 0 <= results["results"]["choose"]["acc,none"] <= 1
    assert 0 <= results["results"]["write"]["exact_match,none"] <= 1
    assert [len(results["samples"][task]) for task in ("choose", "write")] == [4, 4]


if __name__ == "__main__":
    for client in (litellm_asks, langchain_asks, lm_eval_asks):
        if len(sys.argv) < 3 or client.__name__ in sys.argv[2:]:
            client(sys.argv[1])
            print(client.__name__, "works", flush=True)
