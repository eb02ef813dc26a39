"""Tokenizers: text to token ids, and what the ids of a document begin and end with (no jax).

Two kinds: `bytes` (each byte of UTF-8 is a token, byte 0 ends a document; a vocabulary of 256, nothing to download), and
a Hugging Face `tokenizer.json`, alone or in its folder with `tokenizer_config.json`.

A document is `prefix` + tokens + `suffix`. For a file tokenizer these are what its own post-processor puts around a
text (Llama's begin token, say), and the end token where the file itself adds none.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from podway.errors import UserError
from podway.train.optional import require_module

Ids = NDArray[np.uint32]


class Spelled(NamedTuple):
    """Token ids and the character of the text at which each begins."""

    ids: Ids
    begins: NDArray[np.int64]


class Tokenizer(Protocol):
    """Text to ids."""

    name: str
    size: int  # ids are below this
    plain_size: int  # the same without tokens added later, such as those of images, which text never becomes
    fingerprint: str  # changes when the tokens of any text might
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    words: dict[str, str]  # bos_token, eos_token, ...: what chat templates call them
    template: str | None  # the chat template that came with it

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, nothing added around it."""
        ...

    def spell(self, text: str) -> Spelled:
        """The ids of a text with their places in it."""
        ...


class ByteTokenizer:
    """Every byte is a token; NUL, which text does not hold, ends a document."""

    name = "bytes"
    size = plain_size = 256
    fingerprint = "bytes-1"
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = (0,)
    words: dict[str, str] = {"bos_token": "", "eos_token": "\0", "pad_token": "\0"}  # noqa: RUF012 - a constant
    template: str | None = None

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(_utf8(text), np.uint8).astype(np.uint32) for text in texts]

    def spell(self, text: str) -> Spelled:
        ids = self.encode([text])[0]
        begins = np.cumsum((ids & 0xC0) != 0x80) - 1  # bytes 10xxxxxx continue the character before them
        return Spelled(ids, begins.astype(np.int64))


class FileTokenizer:
    """A Hugging Face tokenizer, read from tokenizer.json and, when it is there, tokenizer_config.json."""

    def __init__(self, file: Path) -> None:
        tokenizers = require_module("tokenizers", "tokenizers", f"the tokenizer {file}")
        text = _read(file)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises plain Exception for whatever is wrong with the file
            raise UserError(f"{file} is not a tokenizer: {error}", "download tokenizer.json again") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = _settings(file.parent)
        self.name = str(file.parent if file.name == "tokenizer.json" else file)
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.plain_size = self._tokenizer.get_vocab_size(with_added_tokens=False)
        self.words = _words(settings)
        self.template = _template(file.parent, settings)
        self.prefix, self.suffix = self._around(settings)
        identity = [text, repr(self.prefix), repr(self.suffix), tokenizers.__version__]
        self.fingerprint = hashlib.sha256("\0".join(identity).encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        found = self._tokenizer.encode_batch_fast([_clean(text) for text in texts], add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in found]

    def spell(self, text: str) -> Spelled:
        encoding = self._tokenizer.encode(_clean(text), add_special_tokens=False)
        begins = np.array([begin for begin, _ in encoding.offsets], np.int64)
        return Spelled(np.array(encoding.ids, np.uint32), begins)

    def _around(self, settings: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the post-processor puts before and after a text, completed by what the settings ask for."""
        bare: list[int] = self._tokenizer.encode("a", add_special_tokens=False).ids
        full: list[int] = self._tokenizer.encode("a", add_special_tokens=True).ids
        at = next((i for i in range(len(full) + 1) if full[i : i + len(bare)] == bare), 0)
        prefix, suffix = tuple(full[:at]), tuple(full[at + len(bare) :])
        begin = self._tokenizer.token_to_id(self.words.get("bos_token", ""))
        end = self._tokenizer.token_to_id(self.words.get("eos_token", ""))
        if settings.get("add_bos_token") and begin is not None and begin not in prefix:
            prefix = (begin, *prefix)
        if end is not None and end not in suffix:
            suffix = (*suffix, end)
        return prefix, suffix


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, a tokenizer.json, or a folder that holds one."""
    if name == "bytes":
        return ByteTokenizer()
    place = Path(name).expanduser()
    if place.is_file():
        return FileTokenizer(place)
    if (place / "tokenizer.json").is_file():
        return FileTokenizer(place / "tokenizer.json")
    if (place / "tokenizer.model").is_file():
        raise UserError(
            f"{place} holds a tokenizer.model but no tokenizer.json",
            "make one with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
        )
    if place.is_dir():
        raise UserError(f"there is no tokenizer.json in {place}", "give a folder with tokenizer.json, or bytes")
    hint = "give a tokenizer.json, a folder that holds one, or bytes"
    if name.count("/") == 1 and not name.startswith(("/", ".", "~")):
        hint = f"nothing is downloaded here: run `hf download {name} --include 'tokenizer*'` and give its folder"
    raise UserError(f"there is no tokenizer at {name}", hint)


def check_vocabulary(tokenizer: Tokenizer, vocab: int, largest: int | None = None) -> None:
    """The model must have a row for every id; `largest` is that of the data, once it is known."""
    if largest is None and tokenizer.plain_size > vocab:
        what = f"the tokenizer {tokenizer.name} has {tokenizer.plain_size} tokens"
    elif largest is not None and largest >= vocab:
        what = f"the data holds token {largest} (tokenizer {tokenizer.name})"
    else:
        return
    raise UserError(
        f"{what}, but the model knows {vocab}", "use the model's own tokenizer, or a model with a larger vocabulary"
    )


def _clean(text: str) -> str:
    """Lone surrogates, which JSON may hold and UTF-8 may not, become U+FFFD."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _utf8(text: str) -> bytes:
    return _clean(text).encode()


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}", "check the file and its permissions") from None


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        settings = json.loads(_read(file))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}", "download it again") from None
    return settings if isinstance(settings, dict) else {}


def _words(settings: dict[str, Any]) -> dict[str, str]:
    """Special tokens by name; each is a string, or an object with the string in `content`."""
    words = {}
    for name, value in settings.items():
        word = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(word, str):
            words[name] = word
    return words


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The chat template: chat_template.jinja, or the one (or the one called default) in the settings."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read(file)
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
