"""Clients that people use, against the server whose address is the argument. Run with an interpreter that has them:

python -m venv .cache/clients && .cache/clients/bin/pip install litellm langchain-openai 'lm-eval[api]'
"""

import json
import sys
import tempfile
from pathlib import Path


def litellm_asks(url: str) -> None:
    import litellm

    made = litellm.completion(
        model="hosted_vllm/tiny",
        api_base=f"{url}/v1",
        api_key="none",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=4,
    )
    assert made.usage.completion_tokens in range(1, 5), made
    chunks = litellm.completion(
        model="hosted_vllm/tiny", api_base=f"{url}/v1", api_key="none", messages=[{"role": "user", "content": "hi"}], max_tokens=4,
        stream=True,
    )  # fmt: skip
    assert [c.choices[0].finish_reason for c in chunks][-1] in ("length", "stop")


def langchain_asks(url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="tiny", max_tokens=4, temperature=0)
    whole = model.invoke("hello")
    assert whole.usage_metadata["output_tokens"] in range(1, 5)
    parts = list(model.stream("hello", stream_usage=True))
    assert "".join(p.content for p in parts) == whole.content
    assert parts[-1].usage_metadata or any(p.usage_metadata for p in parts)


def lm_eval_asks(url: str) -> None:
    """A tiny multiple-choice task over local-completions: log likelihoods of token ids with echo."""
    import lm_eval

    with tempfile.TemporaryDirectory() as folder:
        rows = [json.dumps({"q": f"a{i}", "c": ["x", "yy"], "l": 0}) for i in range(4)]
        Path(folder, "d.jsonl").write_text("\n".join(rows))
        Path(folder, "t.yaml").write_text(
            f"task: tinytask\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/d.jsonl\n"
            "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{c}}'\ndoc_to_target: l\n"
            "metric_list:\n  - metric: acc\n"
        )
        results = lm_eval.simple_evaluate(
            model="local-completions",
            model_args=f"base_url={url}/v1/completions,model=tiny,tokenizer_backend=remote,num_concurrent=2,max_length=200",
            tasks=["tinytask"], task_manager=lm_eval.tasks.TaskManager(include_path=folder, include_defaults=False),
        )  # fmt: skip
    assert results["results"]["tinytask"]["acc,none"] >= 0


if __name__ == "__main__":
    for client in (litellm_asks, langchain_asks, lm_eval_asks):
        if len(sys.argv) < 3 or client.__name__ in sys.argv[2:]:
            client(sys.argv[1])
            print(client.__name__, "works", flush=True)
