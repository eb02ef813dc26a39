"""Fine-tuning data: records of conversations into tokens, with the answers marked (no jax).

A record is one of three forms:

- `messages` (or the field that `data.field` names): a list of {role, content}; ShareGPT's `conversations` of
  {from, value} are read as the same. The chat template turns it into text.
- `prompt` and `completion`: two texts, or two lists of messages.
- `text`: plain text, all of it learned.
"""

from typing import Any

import numpy as np

from podway.errors import UserError
from podway.model.chat import ChatTemplate, Message, Rendered
from podway.model.tokenizer import Tokenizer
from podway.train.readers import Item
from podway.train.token_cache import Document

_SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def chat_documents(
    item: Item, tokenizer: Tokenizer, template: ChatTemplate | None, field: str | None, answers_only: bool
) -> list[Document]:
    """The documents of one record: one, or one for each answer where the template asks for it."""
    record = {"text": item.value} if isinstance(item.value, str) else item.value
    found = _messages(record, field, item.where)
    if found is not None:
        messages, learned_from = found
        if template is None:
            raise UserError(
                f"{item.where} is a conversation, but the tokenizer {tokenizer.name} has no chat template",
                "give a jinja2 file with data.template, or data.template=chatml",
            )
        conversations = template.conversations(messages, item.where, record.get("tools"))
        if learned_from and answers_only:
            before = len(template.render(messages[:learned_from], item.where, tools=record.get("tools")))
            conversations = [_only_after(rendered, before) for rendered in conversations]
        return [_document(rendered, tokenizer, answers_only) for rendered in conversations]
    if isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
        text = record["prompt"] + record["completion"]
        return [_plain(Rendered(text, [(len(record["prompt"]), len(text))]), tokenizer, answers_only)]
    if isinstance(record.get("text"), str):
        return [_plain(Rendered(record["text"], [(0, len(record["text"]))]), tokenizer, answers_only)]
    raise UserError(
        f"{item.where}: a record with {', '.join(sorted(record)) or 'no fields'} is not a conversation",
        "it needs messages, or prompt and completion, or text; data.field names another field of messages",
    )


def _messages(record: dict[str, Any], field: str | None, where: str) -> tuple[list[Message], int] | None:
    """The messages of a record, and how many of them are only a prompt."""
    if field is not None and field not in record:
        raise UserError(
            f"{where}: there is no field {field!r}", f"set data.field to one of {', '.join(sorted(record))}"
        )
    for name in [field] if field else ["messages", "conversations"]:
        if isinstance(record.get(name), list):
            return [_message(value, where, name) for value in record[name]], 0
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        asked = [_message(value, where, "prompt") for value in prompt]
        return asked + [_message(value, where, "completion") for value in completion], len(asked)
    return None


def _message(value: Any, where: str, name: str) -> Message:
    if isinstance(value, dict) and value.get("from") in _SHAREGPT:
        return {"role": _SHAREGPT[value["from"]], "content": value.get("value")}
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise UserError(f"{where}: a message of {name} has no role", "each message is an object of role and content")
    return value


def _only_after(rendered: Rendered, begin: int) -> Rendered:
    return Rendered(rendered.text, [answer for answer in rendered.answers if answer[0] >= begin])


def _document(rendered: Rendered, tokenizer: Tokenizer, answers_only: bool) -> Document:
    """The template has already said how a conversation begins and ends; nothing is put around it."""
    ids, begins = tokenizer.spell(rendered.text)
    marks = np.zeros(len(ids), np.uint8) if answers_only else np.ones(len(ids), np.uint8)
    for begin, end in rendered.answers:
        marks[(begins >= begin) & (begins < end)] = 1
    return Document(ids, marks)


def _plain(rendered: Rendered, tokenizer: Tokenizer, answers_only: bool) -> Document:
    """A text outside any template, with what the tokenizer puts around a document; its end is learned."""
    inner = _document(rendered, tokenizer, answers_only)
    assert inner.answers is not None
    before, after = np.array(tokenizer.prefix, np.uint32), np.array(tokenizer.suffix, np.uint32)
    marks = [np.zeros(len(before), np.uint8), inner.answers, np.ones(len(after), np.uint8)]
    return Document(np.concatenate([before, inner.tokens, after]), np.concatenate(marks))
