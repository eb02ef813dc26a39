"""Conversations: rendered as Hugging Face does, with the loss on what the assistant wrote."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import UserError
from podway.model.chat import CHATML, ChatTemplate
from podway.model.tokenizer import ByteTokenizer, load_tokenizer
from podway.train.data import DataConfig, own_template, tokenizer_folder
from podway.train.readers import Item
from podway.train.sft import chat_documents

FIXTURES = Path(__file__).parent.parent / "model" / "fixtures"
RECORDED = json.loads((FIXTURES / "chat.json").read_text())
BYTES = ByteTokenizer()
CHAT = ChatTemplate(CHATML, BYTES.words, "chatml")


def learned(
    record: Any, template: ChatTemplate | None = CHAT, field: str | None = None, only: bool = True
) -> list[str]:
    """The text that the loss is on, for each document of a record."""
    found = []
    for document in chat_documents(Item("here:1", record), BYTES, template, field, only):
        assert document.answers is not None
        assert len(document.answers) == len(document.tokens)
        found.append(bytes(document.tokens[document.answers > 0].astype(np.uint8)).decode())
    return found


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: f"{case['name']}-{len(case['messages'])}")
def test_templates_render_as_recorded_from_transformers(case: dict[str, Any]) -> None:
    template = ChatTemplate(case["template"], RECORDED["words"], case["name"])
    assert template.render(case["messages"], "x", tools=case["tools"]) == case["text"]
    assert template.render(case["messages"], "x", ask=True, tools=case["tools"]) == case["asked"]
    tokenizer = load_tokenizer(str(FIXTURES / "chat-tokenizer.json"))
    record = {"messages": case["messages"], "tools": case["tools"]}
    documents = chat_documents(Item("x", record), tokenizer, template, None, True)
    assert documents[-1].tokens.tolist() == case["ids"]
    if "assistant" in case:
        assert documents[-1].answers is not None
        assert documents[-1].answers.tolist() == case["assistant"]


def test_what_a_model_was_trained_with_goes_along(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    assert own_template(DataConfig(template="chatml")) == CHATML
    assert own_template(DataConfig(template=str(tmp_path / "mine.jinja"))) == "{{ messages }}"
    assert own_template(DataConfig()) is None
    assert tokenizer_folder(DataConfig(tokenizer="bytes")) is None and tokenizer_folder(DataConfig()) is None
    assert tokenizer_folder(DataConfig(tokenizer=str(FIXTURES / "chat-tokenizer.json"))) == FIXTURES
    assert tokenizer_folder(DataConfig(tokenizer=str(FIXTURES / "llama3"))) == FIXTURES / "llama3"


def test_each_answer_of_a_conversation_is_learned() -> None:
    messages = RECORDED["cases"][1]["messages"]
    assert learned({"messages": messages}) == ["1<|im_end|>\n2<|im_end|>\n"]
    assert learned({"messages": messages}, only=False) == [CHAT.render(messages, "x")]


def test_where_the_last_answer_looks_otherwise_each_has_a_text_of_its_own() -> None:
    case = next(c for c in RECORDED["cases"] if c["name"] == "reasoning" and len(c["messages"]) == 5)
    template = ChatTemplate(case["template"], RECORDED["words"], "reasoning")
    assert learned({"messages": case["messages"]}, template) == ["<think></think>1</s>", "<think></think>2</s>"]


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text(max_size=8)), max_size=6))
def test_marks_and_differences_agree(turns: list[tuple[str, str]]) -> None:
    """A template that marks its answers, and the same one without marks, learn the same."""
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}.{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    marked = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}."
        "{% endgeneration %}{% else %}{{ m.content }}.{% endif %}{% endfor %}"
    )
    messages = [{"role": role, "content": text.encode("utf-8", "replace").decode()} for role, text in turns]
    by_mark = ChatTemplate(marked, {}, "marked").conversations(messages, "x")
    by_difference = ChatTemplate(plain, {}, "plain").conversations(messages, "x")
    assert by_mark == by_difference


def test_the_other_forms_of_a_record() -> None:
    assert learned({"prompt": "2+2=", "completion": "4"}) == ["4\0"]
    assert learned("all of it") == ["all of it\0"]
    assert learned({"text": "all of it"}) == ["all of it\0"]
    shared = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    assert learned({"conversations": shared}) == ["yo<|im_end|>\n"]
    assert learned({"talk": [{"role": "assistant", "content": "x"}]}, field="talk") == ["x<|im_end|>\n"]
    earlier = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert learned({"prompt": earlier, "completion": [{"role": "assistant", "content": "d"}]}) == ["d<|im_end|>\n"]


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"messages": "hello"}, "is not a conversation"),
        ({}, "no fields"),
        ({"messages": [{"content": "x"}]}, "has no role"),
        ({"messages": [7]}, "has no role"),
        ({"messages": [{"role": "user", "content": 3}]}, None),
        ({"prompt": "x"}, "is not a conversation"),
    ],
)
def test_bad_records_are_named(record: dict[str, Any], what: str | None) -> None:
    if what is None:
        assert learned(record) == [""]
        return
    with pytest.raises(UserError) as caught:
        learned(record)
    assert "here:1" in caught.value.what
    assert what in caught.value.what


def test_bad_templates_are_named() -> None:
    with pytest.raises(UserError, match="has no chat template"):
        learned({"messages": []}, None)
    with pytest.raises(UserError, match="is not a chat template"):
        ChatTemplate("{% for", {}, "mine.jinja")
    refusing = ChatTemplate(RECORDED["cases"][0]["template"], RECORDED["words"], "turns")
    with pytest.raises(UserError, match=r"here:1: the chat template refuses.*unknown role tool"):
        learned({"messages": [{"role": "tool", "content": "x"}]}, refusing)
    unfit = ChatTemplate("{{ messages[0].content + 1 }}", {}, "t")
    with pytest.raises(UserError, match="here:1"):
        learned({"messages": [{"role": "user", "content": "x"}]}, unfit)
    outside = ChatTemplate("{{ messages.__class__.__mro__ }}", {}, "t")
    with pytest.raises(UserError, match="here:1"):
        learned({"messages": [{"role": "user", "content": "x"}]}, outside)
