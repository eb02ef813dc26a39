"""Text to tokens and back: tokenizers, chat templates, and streams of text that hold back what is not certain yet (no jax).

A model's folder says how it is spoken to: `tokenizer.json`, `tokenizer_config.json` (special tokens, chat template),
`chat_template.jinja`, `generation_config.json` (which tokens end an answer). A folder without a tokenizer is one of bytes:
token i is byte i and 0 ends the text, as the trainer has it.

`TextStream` turns tokens into text as they come. It holds back the bytes of an unfinished character, and the beginning of
what might become a stop string; both are given out when the next tokens decide.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from podway.errors import UserError

_UNFINISHED = "�"  # what a decoder makes of half a character


class Tokenizer:
    """Of one model folder."""

    def __init__(self, folder: Path, vocab: int) -> None:
        self.folder = folder
        self.vocab = vocab
        self.config = _read(folder / "tokenizer_config.json")
        self._inner: Any = None
        path = folder / "tokenizer.json"
        if path.exists():
            from tokenizers import Tokenizer as Inner  # only models with a tokenizer need it

            try:
                self._inner = Inner.from_file(str(path))
            except Exception as error:
                raise UserError(f"{path} cannot be read: {error}", "download it again") from None
        elif vocab > 512:
            raise UserError(f"{folder} has no tokenizer.json", "copy the tokenizer of the model into the folder")
        self.template = _template(folder, self.config)
        self.stop_ids = self._stop_ids()

    @property
    def path(self) -> Path | None:
        """The tokenizer's file, if it has one."""
        return self.folder / "tokenizer.json" if self._inner is not None else None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text; `special` adds what the tokenizer puts around it."""
        if self._inner is None:
            return list(text.encode())
        ids: list[int] = self._inner.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of these ids."""
        if self._inner is None:
            return bytes(i for i in ids if 0 < i < 256).decode(errors="replace")
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token(self, id: int) -> str:
        """One token as text, special ones too; bytes that are no text by themselves as they are escaped in Python."""
        if self._inner is None:
            return "" if not 0 < id < 256 else chr(id) if id < 128 else f"bytes:\\x{id:02x}"
        text = self.decode([id], skip_special=False)
        if _UNFINISHED in text:
            return f"bytes:{self._inner.id_to_token(id)}"
        return text

    def word(self, name: str) -> str:
        """A special token by its name in the configuration (bos_token, eos_token), or nothing."""
        value = self.config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else ""

    def _stop_ids(self) -> frozenset[int]:
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            ids = _read(self.folder / name).get("eos_token_id")
            found |= {
                i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int) and 0 <= i < self.vocab
            }
            if found:
                break
        if self._inner is None:
            return frozenset(found or {0})
        if (own := self._inner.token_to_id(self.word("eos_token"))) is not None:
            found.add(own)
        return frozenset(found)

    def render(self, messages: list[dict[str, Any]], **more: Any) -> str:
        """A conversation as the model's own template writes it."""
        if self.template is None:
            raise UserError(
                "this model has no chat template", "use /v1/completions, or put chat_template.jinja into its folder"
            )
        words = {name: self.word(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return render(self.template, messages, **words, **more)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        raise UserError(f"{path} is not JSON", "download it again") from None
    return content if isinstance(content, dict) else {}


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template: a file of its own, else in the tokenizer's configuration, one or several by name."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    found = config.get("chat_template") or _read(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {row.get("name"): row.get("template") for row in found if isinstance(row, dict)}
        found = named.get("default") or next(iter(named.values()), None)
    return found if isinstance(found, str) else None


def render(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    """A template over messages, in the dialect of Jinja that Hugging Face templates are written in."""
    from jinja2 import TemplateError  # only conversations need it
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=lambda f: datetime.now().strftime(f))
    variables.setdefault("tools", None)
    variables.setdefault("documents", None)
    try:
        return environment.from_string(template).render(messages=messages, **variables)
    except TemplateError as error:
        raise UserError(f"the chat template refuses this conversation: {error}", "change the messages") from None
    except Exception as error:  # a template is a program: whatever it does with odd messages is the message's fault
        raise UserError(f"the chat template fails on this conversation: {error}", "change the messages") from None


class TextStream:
    """Tokens of one answer in, text out."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, skip_special: bool = True, keep_stop: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._skip, self._keep = skip_special, keep_stop
        self._ids: list[int] = []
        self._base = (
            0  # ids before this are decoded and done with; some are kept, since spaces depend on what is before
        )
        self._read = 0  # ids before this have been given out as text
        self._held = ""
        self.stopped = False
        self.text = ""  # all that was given out

    def push(self, ids: Sequence[int], last: bool = False) -> str:
        """The text that is certain now; with `last` all of it."""
        if self.stopped:
            return ""
        self._ids += ids
        before = self._tokenizer.decode(self._ids[self._base : self._read], self._skip)
        after = self._tokenizer.decode(self._ids[self._base :], self._skip)
        fresh = ""
        if last or (len(after) > len(before) and not after.endswith(_UNFINISHED)):
            fresh = after[len(before) :]
            self._base, self._read = self._read, len(self._ids)
        self._held += fresh
        out = self._release(last)
        self.text += out
        return out

    def _release(self, last: bool) -> str:
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            at, stop = min(found)
            out, self._held, self.stopped = self._held[: at + (len(stop) if self._keep else 0)], "", True
            return out
        keep = 0 if last else max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def _overlap(self, stop: str) -> int:
        """How many characters at the end of what is held might begin this stop string."""
        most = min(len(stop) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)
