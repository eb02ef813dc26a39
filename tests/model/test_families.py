import pytest
from hypothesis import given
from hypothesis import strategies as st

from podway.errors import UserError
from podway.model.families import find_model, known_models
from podway.model.params import active_count, count
from podway.model.shape import ModelShape

# Totals that the publishers state (safetensors metadata on the Hugging Face hub; tied heads counted once). The Gemma 3
# rows from 4b up are the language model alone: the published total less its vision tower (416,866,032) and projector.
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 4_300_079_472 - 416_866_032 - (1152 * 2560 + 1152),
    "gemma3-12b": 12_187_325_040 - 416_866_032 - (1152 * 3840 + 1152),
    "gemma3-27b": 27_432_406_640 - 416_866_032 - (1152 * 5376 + 1152),
}
# facts of the 16B-128B jobs, to the digits given there
JOBS = {"16b": 16.274e9, "32b": 32.548e9, "64b": 64.760e9, "128b": 129.185e9}
ACTIVE = {"mixtral-8x7b": 12.9e9, "mixtral-8x22b": 39e9, "qwen3-30b-a3b": 3.3e9, "qwen3-235b-a22b": 22e9}


def test_every_published_model_is_counted() -> None:
    named = {name for name in known_models() if not name.startswith("tiny-")}
    assert named == set(PUBLISHED) | set(JOBS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_as_published(name: str) -> None:
    assert count(find_model(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", JOBS)
def test_the_jobs_of_2023_have_the_dimensions_of_2023(name: str) -> None:
    shape = find_model(name)
    assert count(shape) == pytest.approx(JOBS[name], rel=5e-5)
    assert (shape.vocab, shape.block, shape.activation, shape.embedding.tied) == (32_768, "parallel", "relu", True)
    assert shape.embedding.logit_scale == shape.d_model**-0.5


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_as_published(name: str) -> None:
    assert active_count(find_model(name)) == pytest.approx(ACTIVE[name], rel=0.02)


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama2-7b"),
        ("LLAMA3.2_1B", "llama3.2-1b"),
        ("llama 3.3 70b", "llama3.3-70b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("google/gemma-2-9b-it", "gemma2-9b"),
        ("google/gemma-3-27b-it-qat-q4_0-unquantized", "gemma3-27b"),
        ("16B", "16b"),
    ],
)
def test_names_are_forgiven(written: str, known: str) -> None:
    assert find_model(written) is known_models()[known]


def test_no_two_names_are_squeezed_to_one() -> None:
    assert all(find_model(name) is shape for name, shape in known_models().items())


def test_an_unknown_name_is_met_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown model 'lama3\.1-8b'") as error:
        find_model("lama3.1-8b")
    assert "llama3.1-8b" in error.value.hint


def test_a_wild_name_is_met_with_all() -> None:
    with pytest.raises(UserError) as error:
        find_model("zzzzzz")
    assert "llama2-7b" in error.value.hint
    assert "tiny" not in error.value.hint


def test_a_directory_that_is_not_there() -> None:
    with pytest.raises(UserError, match="no directory"):
        find_model("./not-there")


@given(st.text(max_size=300))
def test_any_text_is_a_model_or_a_user_error(text: str) -> None:
    try:
        assert isinstance(find_model(text), ModelShape)
    except UserError as error:
        assert error.hint
