"""Tokenizers: text to token ids, and what the ids of a document begin and end with (no jax).

Two kinds: `bytes` (each byte of UTF-8 is a token, byte 0 ends a document; a vocabulary of 256, nothing to download), and
a Hugging Face `tokenizer.json`, alone or in its folder with `tokenizer_config.json`.

A document is `prefix` + tokens + `suffix`. For a file tokenizer these are what its own post-processor puts around a
text (Llama's begin token, say), and the end token where the file itself adds none.

`ModelTokenizer` is what a server needs of a model's folder: one of the two, the tokens that end an answer
(`generation_config.json`), and its chat template, compiled once.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from podway.errors import UserError
from podway.extras import load
from podway.model.chat import ChatTemplate, Message, Tools
from podway.model.download import fetch

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
    tool_template: str | None  # another one for conversations with tools, where there is one
    special_ids: frozenset[int]  # tokens that are no part of a text
    longest: int  # bytes of the longest token: so many times fewer tokens than bytes a text may have
    strips_first_space: bool  # a text that begins with a word of its own is decoded without the space before it

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, nothing added around it."""
        ...

    def spell(self, text: str) -> Spelled:
        """The ids of a text with their places in it."""
        ...

    def encode_prompt(self, text: str, special: bool) -> list[int]:
        """The ids of one text; `special` adds what the tokenizer itself puts around it."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of these ids."""
        ...

    def token_bytes(self, id: int) -> bytes:
        """What a token adds to the text, in bytes: it may be less than a character."""
        ...

    def token_id(self, text: str) -> int | None:
        """The id of a token by its text in the vocabulary."""
        ...

    def pieces(self) -> list[bytes] | None:
        """The bytes of each token, where the text of ids is just their bytes in a row; None where it is not."""
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
    tool_template: str | None = None
    special_ids: frozenset[int] = frozenset({0})
    longest = 1
    strips_first_space = False

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(_utf8(text), np.uint8).astype(np.uint32) for text in texts]

    def spell(self, text: str) -> Spelled:
        ids = self.encode([text])[0]
        begins = np.cumsum((ids & 0xC0) != 0x80) - 1  # bytes 10xxxxxx continue the character before them
        return Spelled(ids, begins.astype(np.int64))

    def encode_prompt(self, text: str, special: bool) -> list[int]:
        return list(_utf8(text))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return bytes(i for i in ids if 0 < i < 256).decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if 0 < id < 256 else b""

    def token_id(self, text: str) -> int | None:
        return None

    def pieces(self) -> list[bytes] | None:
        return [b"", *(bytes([id]) for id in range(1, 256))]


class FileTokenizer:
    """A Hugging Face tokenizer, read from tokenizer.json and, when it is there, tokenizer_config.json."""

    def __init__(self, file: Path) -> None:
        tokenizers = load("tokenizers", "serve", f"the tokenizer {file}")
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
        self.template, self.tool_template = _templates(file.parent, settings)
        form = json.loads(text)
        self._byte_level = _mentions(form.get("decoder"), "ByteLevel")
        self._bytes_in_a_row = self._byte_level and form["decoder"]["type"] == "ByteLevel"
        self.strips_first_space = _mentions(form.get("decoder"), "Strip") or _mentions(form.get("decoder"), "Metaspace")
        self._added = {entry["id"]: entry["content"] for entry in form.get("added_tokens") or []}
        self.special_ids = frozenset(entry["id"] for entry in form.get("added_tokens") or [] if entry.get("special"))
        self.longest = max(
            (len(piece.encode()) for piece in self._tokenizer.get_vocab(with_added_tokens=True)), default=1
        )
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

    def encode_prompt(self, text: str, special: bool) -> list[int]:
        # A batch of one: that call releases the interpreter while it works.
        [found] = self._tokenizer.encode_batch([_clean(text)], add_special_tokens=special)
        ids: list[int] = found.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_bytes(self, id: int) -> bytes:
        if id in self._added:
            return str(self._added[id]).encode()
        piece = str(self._tokenizer.id_to_token(id) or "")
        if self._byte_level:
            return bytes(_BYTE_OF.get(character, 0x3F) for character in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):  # SentencePiece's single bytes
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    def token_id(self, text: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def pieces(self) -> list[bytes] | None:
        if not self._bytes_in_a_row:
            return None
        found = [b""] * self.size
        for word, id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            mapped = [_BYTE_OF.get(character) for character in word]
            found[id] = word.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)
        for id, word in self._added.items():  # these stand in the vocabulary as they are
            found[id] = word.encode()
        return found

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
    """`bytes`, a tokenizer.json, a folder that holds one, or what `fetch` takes."""
    if name == "bytes":
        return ByteTokenizer()
    place = fetch(name, weights=False)
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
    raise UserError(f"there is no tokenizer at {name}", "give a tokenizer.json, a folder that holds one, or bytes")


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
    return read_json(folder / "tokenizer_config.json")


def _words(settings: dict[str, Any]) -> dict[str, str]:
    """Special tokens by name; each is a string, or an object with the string in `content`."""
    words = {}
    for name, value in settings.items():
        word = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(word, str):
            words[name] = word
    return words


def _templates(folder: Path, settings: dict[str, Any]) -> tuple[str | None, str | None]:
    """The chat template, and that for conversations with tools where it is another: chat_template.jinja, or the one (or
    those by name) in the settings or in chat_template.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read(file), None
    found = settings.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        texts = [named.get(name) for name in ("default", "tool_use")]
        default, tools = (text if isinstance(text, str) else None for text in texts)
        return default, tools
    return (found if isinstance(found, str) else None), None


def _mentions(part: object, kind: str) -> bool:
    """Whether a part of a tokenizer.json is of this type, or a sequence with one."""
    if not isinstance(part, dict):
        return False
    inner = part.get("decoders") or []
    return part.get("type") == kind or any(_mentions(one, kind) for one in inner)


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable ones for themselves, the others for
    characters from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class ModelTokenizer:
    """The tokenizer of a model's folder, as a server uses it. A folder without one is of bytes."""

    def __init__(self, folder: Path, vocab: int) -> None:
        self.folder, self.vocab = folder, vocab
        self.path: Path | None = folder / "tokenizer.json"
        self._inner: Tokenizer
        if self.path.is_file():
            self._inner = FileTokenizer(self.path)
        elif vocab > 512:
            raise UserError(f"{folder} has no tokenizer.json", "copy the tokenizer of the model into the folder")
        else:
            self.path, self._inner = None, ByteTokenizer()
        self.settings = _settings(folder)
        self.words = self._inner.words if self.path is not None else _words(self.settings)
        template, tool_template = self._inner.template, self._inner.tool_template
        if self.path is None:
            template, tool_template = _templates(folder, self.settings)
        self.template = self._compiled(template)
        self._tool_template = self._compiled(tool_template) or self.template
        self.generation = read_json(folder / "generation_config.json")
        self.stop_ids = self._stop_ids()
        self.strips_first_space, self.special_ids = self._inner.strips_first_space, self._inner.special_ids
        self.longest = self._inner.longest
        self.pieces = self._inner.pieces()

    def _compiled(self, source: str | None) -> ChatTemplate | None:
        return None if source is None else ChatTemplate(source, self.words, f"the template of {self.folder.name}")

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text; `special` adds what the tokenizer puts around it."""
        return self._inner.encode_prompt(text, special)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of these ids."""
        return self._inner.decode(ids, skip_special)

    def token_bytes(self, id: int) -> bytes:
        """What a token adds to the text."""
        return self._inner.token_bytes(id)

    def is_special(self, text: str) -> bool:
        """Whether this is one of the special tokens."""
        return self._inner.token_id(text) in self.special_ids

    def token(self, id: int) -> str:
        """One token as text, special ones too; bytes that are not text by themselves are escaped, as OpenAI does."""
        raw = self._inner.token_bytes(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def render(self, messages: Sequence[Message], *, tools: Tools = None, ask: bool = True, **more: object) -> str:
        """A conversation as the model's own template writes it."""
        template = self._tool_template if tools else self.template
        if template is None:
            raise UserError(
                "this model has no chat template", "use /v1/completions, or put chat_template.jinja into its folder"
            )
        return template.render(messages, "messages", ask=ask, tools=tools, **more)

    def _stop_ids(self) -> frozenset[int]:
        found: set[int] = set()
        for settings in (self.generation, read_json(self.folder / "config.json")):
            ids = settings.get("eos_token_id")
            listed = ids if isinstance(ids, list) else [ids]
            found |= {i for i in listed if isinstance(i, int) and 0 <= i < self.vocab}
            if found:
                break
        if self.path is None:
            return frozenset(found or {0})
        if (own := self._inner.token_id(self.words.get("eos_token", ""))) is not None:
            found.add(own)
        return frozenset(found)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file; an empty one where there is no file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(_read(file))
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}", "download it again") from None
    return content if isinstance(content, dict) else {}
