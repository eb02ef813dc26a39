"""Text in and out: streams that hold back what is uncertain, templates, stop ids."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers, trainers

from podway.errors import UserError
from podway.model.chat import ChatTemplate
from podway.model.tokenizer import ModelTokenizer
from podway.serve.text_stream import TextStream


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer(tmp_path_factory.mktemp("bytes"), 256)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    """A small byte-level BPE, as Llama 3 and Qwen have it."""
    folder = tmp_path_factory.mktemp("bpe")
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    inner.train_from_iterator(["the cat sat on the mat, naïve café 🙂 日本語"] * 5, trainer)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": {"content": "</s>"},
                "bos_token": "<s>",
                "chat_template": "{{ bos_token }}{{ messages[0].content }}",
            }
        )
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    return ModelTokenizer(folder, 400)


def rendered(template: str, messages: list[dict[str, str]]) -> str:
    return ChatTemplate(template, {}, "t").render(messages, "messages")


texts = st.text(alphabet="ab é🙂日\n</s>", max_size=30)


@given(st.lists(st.integers(0, 399), max_size=30), st.lists(st.integers(1, 5), max_size=20), st.booleans())
def test_a_stream_of_any_tokens_is_what_they_decode_to(
    bpe: ModelTokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    """Bytes that are no text, characters cut in two and special tokens too."""
    stream, begin, out = TextStream(bpe, skip_special=skip), 0, ""
    for size in cuts:
        out += stream.push(ids[begin : begin + size])[0]
        begin += size
    out += stream.push(ids[begin:], last=True)[0]
    assert out == stream.text == bpe.decode(ids, skip)


@given(texts, st.lists(st.integers(1, 5), max_size=20))
def test_a_stream_gives_out_the_whole_text(
    plain: ModelTokenizer, bpe: ModelTokenizer, text: str, cuts: list[int]
) -> None:
    for tokenizer in (plain, bpe):
        ids = tokenizer.encode(text, special=False)
        stream, parts, at = TextStream(tokenizer), [], 0
        for cut in cuts:
            parts.append(stream.push(ids[at : at + cut])[0])
            at += cut
        parts.append(stream.push(ids[at:], last=True)[0])
        assert "".join(parts) == stream.text == tokenizer.decode(ids)
        assert all("�" not in part for part in parts[:-1])


@given(texts, st.lists(st.text(alphabet="ab é\n", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_string_cuts_where_the_whole_text_would_be_cut(
    plain: ModelTokenizer, text: str, stops: list[str]
) -> None:
    ids = plain.encode(text)
    for keep in (False, True):
        stream = TextStream(plain, stops, keep_stop=keep)
        out = ""
        for index, id in enumerate(ids):
            out += stream.push([id], last=index == len(ids) - 1)[0]
            assert out == stream.text
        ends = [text.find(stop) for stop in stops if stop in text]
        if not ends:
            assert out == text and not stream.stopped
        else:
            # One token at a time the first stop string to be complete wins.
            first = min(text.find(stop) + len(stop) for stop in stops if stop in text)
            assert stream.stopped and len(out) <= first and text.startswith(out)


def test_what_may_be_a_stop_string_is_held_back(plain: ModelTokenizer) -> None:
    stream = TextStream(plain, ["END"])
    assert [stream.push(list(part)) for part in (b"xE", b"N", b"Dy")] == [("x", 2), ("", 1), ("", 1)]
    stream = TextStream(plain, ["END"])
    assert [stream.push(list(part))[0] for part in (b"xE", b"N", b"xE")] == ["x", "", "ENx"]
    assert stream.push([], last=True) == ("E", 0)


def test_special_tokens_and_ends(bpe: ModelTokenizer, plain: ModelTokenizer) -> None:
    assert bpe.stop_ids == {1, 7} and plain.stop_ids == {0}
    assert (bpe.words["eos_token"], bpe.words["bos_token"], bpe.words.get("pad_token")) == ("</s>", "<s>", None)
    assert bpe.decode([0, *bpe.encode("cat", special=False), 1]) == "cat"
    assert bpe.token(1) == "</s>"


def test_templates_as_hugging_face_writes_them(bpe: ModelTokenizer) -> None:
    assert bpe.render([{"role": "user", "content": "hi"}]) == "<s>hi"
    out = rendered(
        "{% for m in messages %}\n  {% if m.role == 'skip' %}{% continue %}{% endif %}\n{{ m | tojson }}\n{% endfor %}",
        [{"role": "skip"}, {"role": "é<"}],
    )
    assert out == '{"role": "é<"}\n'
    assert rendered("{{ strftime_now('%Y') | length }}", []) == "4"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('only two') }}", "only two"),
        ("{{ messages[0].x.y }}", "no attribute"),
        ("{% if %}", "not a chat template"),
    ],
)
def test_what_a_template_refuses_is_said(template: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        rendered(template, [{}])


def test_a_template_cannot_reach_outside() -> None:
    with pytest.raises(UserError):
        rendered("{{ messages.__class__.__mro__[1].__subclasses__() }}", [])


def test_a_folder_without_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer"):
        ModelTokenizer(tmp_path, 32_000)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="not a tokenizer"):
        ModelTokenizer(tmp_path, 32_000)
    with pytest.raises(UserError, match="no chat template"):
        ModelTokenizer(tmp_path / "none", 256).render([{"role": "user", "content": "x"}])
