"""One chat template for training and serving: every recorded case renders as `transformers` renders it, on both paths."""

import json
from pathlib import Path
from typing import Any

import pytest

from podway.model.chat import ChatTemplate
from podway.model.tokenizer import ModelTokenizer
from podway.train.readers import Item
from podway.train.sft import chat_documents

FIXTURES = Path(__file__).parent / "fixtures"
RECORDED = json.loads((FIXTURES / "chat.json").read_text())


@pytest.fixture
def served(tmp_path: Path, case: dict[str, Any]) -> ModelTokenizer:
    """The case's template in a model's folder, as a server finds it."""
    (tmp_path / "tokenizer.json").write_text((FIXTURES / "chat-tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(RECORDED["words"]))
    (tmp_path / "chat_template.jinja").write_text(case["template"])
    return ModelTokenizer(tmp_path, 300)


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: f"{case['name']}-{len(case['messages'])}")
def test_training_and_serving_render_as_transformers(served: ModelTokenizer, case: dict[str, Any]) -> None:
    assert served.render(case["messages"], tools=case["tools"], ask=False) == case["text"]
    assert served.render(case["messages"], tools=case["tools"], ask=True) == case["asked"]
    assert served.encode(served.render(case["messages"], tools=case["tools"], ask=False), special=False) == case["ids"]
    trained = ChatTemplate(case["template"], RECORDED["words"], case["name"])
    assert trained.render(case["messages"], "x", tools=case["tools"]) == case["text"]
    record = {"messages": case["messages"], "tools": case["tools"]}
    [*_, document] = chat_documents(Item("x", record), served._inner, trained, None, True)
    assert document.tokens.tolist() == case["ids"]


def test_a_template_for_tools_is_taken_where_there_are_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    tokenizer = ModelTokenizer(tmp_path, 256)
    assert tokenizer.render([]) == "plain"
    assert tokenizer.render([], tools=[{}, {}]) == "tools 2"
