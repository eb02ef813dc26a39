"""Tokenizers: bytes, and Hugging Face files with what they put around a text."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from podway.errors import UserError
from podway.model.tokenizer import ByteTokenizer, ModelTokenizer, check_vocabulary, load_tokenizer


def make_tokenizer(folder: Path, *, post: bool = False, **settings: object) -> Path:
    """A byte-level pair tokenizer with a begin and an end token, as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=270, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    made.train_from_iterator(["the cat sat on the mat and the dog sat on the log"] * 4, trainer)
    if post:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(folder / "tokenizer.json"))
    words: dict[str, object] = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(words | settings))
    return folder


@given(st.text())
def test_bytes_are_utf8_and_know_their_places(text: str) -> None:
    spelled = ByteTokenizer().spell(text)
    clean = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    assert bytes(spelled.ids.astype("uint8")) == clean.encode()
    if clean == text:
        for begin, character in enumerate(text):
            mine = spelled.ids[spelled.begins == begin]
            assert bytes(mine.astype("uint8")).decode() == character


@given(st.text(max_size=40))
def test_a_file_tokenizer_takes_any_text(text: str) -> None:
    folder = Path(__file__).parent / "fixtures" / "chat-tokenizer.json"
    ids = load_tokenizer(str(folder)).encode([text, "x"])
    assert len(ids) == 2
    assert len(ids[1]) == 1


@pytest.mark.parametrize(
    ("post", "settings", "prefix"), [(False, {}, ()), (True, {}, (0,)), (False, {"add_bos_token": True}, (0,))]
)
def test_what_stands_around_a_document(tmp_path: Path, post: bool, settings: dict[str, object], prefix: object) -> None:
    found = load_tokenizer(str(make_tokenizer(tmp_path / "t", post=post, **settings)))
    assert found.prefix == prefix
    assert found.suffix == (1,), "the end token ends a document, although no post-processor adds it"
    assert found.size == 270
    assert list(found.encode(["the cat"])[0]) == list(found.spell("the cat").ids)
    assert 0 not in found.encode(["the cat"])[0]


def test_a_file_without_settings_has_no_end(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(str(folder / "tokenizer.json")).suffix == ()


def test_fingerprints_follow_what_changes_tokens(tmp_path: Path) -> None:
    plain = load_tokenizer(str(make_tokenizer(tmp_path / "a"))).fingerprint
    assert plain == load_tokenizer(str(make_tokenizer(tmp_path / "b"))).fingerprint
    assert plain != load_tokenizer(str(make_tokenizer(tmp_path / "c", add_bos_token=True))).fingerprint


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert load_tokenizer(str(make_tokenizer(tmp_path / "a", chat_template="S"))).template == "S"
    assert load_tokenizer(str(make_tokenizer(tmp_path / "b", chat_template=named))).template == "D"
    folder = make_tokenizer(tmp_path / "c", chat_template="S")
    (folder / "chat_template.jinja").write_text("F")
    assert load_tokenizer(str(folder)).template == "F"


@pytest.mark.parametrize(
    ("name", "content", "what", "hint"),
    [
        ("missing", None, "no tokenizer at", "a folder that holds one"),
        ("./nothing", None, "no tokenizer at", "a folder that holds one"),
        ("folder", {}, "no tokenizer.json in", "tokenizer.json, or bytes"),
        ("folder", {"tokenizer.model": "x"}, "but no tokenizer.json", "save_pretrained"),
        ("folder", {"tokenizer.json": "{]"}, "is not a tokenizer", "download"),
        ("folder", {"tokenizer.json": None, "tokenizer_config.json": "{]"}, "is not JSON", "download"),
    ],
)
def test_bad_tokenizers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: dict[str, str | None] | None,
    what: str,
    hint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        make_tokenizer(tmp_path / "spare")
        Path(name).mkdir()
        for file, text in content.items():
            Path(name, file).write_text((tmp_path / "spare" / file).read_text() if text is None else text)
    with pytest.raises(UserError) as caught:
        load_tokenizer(name)
    assert what in caught.value.what
    assert hint in caught.value.hint


def test_a_vocabulary_larger_than_the_models() -> None:
    check_vocabulary(ByteTokenizer(), 256)
    check_vocabulary(ByteTokenizer(), 256, 255)
    with pytest.raises(UserError, match="bytes has 256 tokens, but the model knows 255"):
        check_vocabulary(ByteTokenizer(), 255)
    with pytest.raises(UserError, match=r"holds token 256 .*, but the model knows 256"):
        check_vocabulary(ByteTokenizer(), 256, 256)


@pytest.fixture
def sentencepiece(tmp_path: Path) -> ModelTokenizer:
    """As Llama 2 and Gemma have it: a mark for spaces, and single bytes for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "s", "▁s", "é"]
    made = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: at for at, piece in enumerate(pieces)},
            merges=[("▁", "s")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<s>", "</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    return ModelTokenizer(tmp_path, 300)


def test_tokens_of_sentencepiece_keep_their_spaces_and_bytes(sentencepiece: ModelTokenizer) -> None:
    ids = sentencepiece.encode("s ss 日", special=False)
    assert b"".join(map(sentencepiece.token_bytes, ids)) == " s ss 日".encode()
    assert sentencepiece.decode(ids) == "s ss 日" and sentencepiece.strips_first_space
    first, bare, smile = ids[0], ids[2], sentencepiece.encode("日", special=False)[-1]
    assert (sentencepiece.token(first), sentencepiece.token(bare), sentencepiece.token(smile)) == (
        " s",
        "s",
        "bytes:\\xa5",
    )
    assert sentencepiece.token(2) == "</s>"


@given(st.text(max_size=20))
def test_bytes_of_byte_level_tokens_are_those_of_the_text(text: str) -> None:
    tokenizer = load_tokenizer(str(Path(__file__).parent / "fixtures" / "chat-tokenizer.json"))
    ids = tokenizer.encode_prompt(text, special=False)
    clean = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    assert b"".join(map(tokenizer.token_bytes, ids)) == clean.encode()
