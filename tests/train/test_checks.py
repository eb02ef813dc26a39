"""What is refused before anything is compiled."""

from pathlib import Path

import pytest

from podway.errors import UserError
from podway.model.families import find_model
from podway.model.layout import MeshShape, parse_mesh
from podway.train.checks import check_fit, check_kernel, check_settings, resolve_mesh
from podway.train.settings import read_config


def test_mesh_takes_what_is_left() -> None:
    assert resolve_mesh(read_config(None), 8) == MeshShape(fsdp=8)
    assert resolve_mesh(read_config(None, ["mesh.shape=fsdp=*,tensor=4"]), 16) == MeshShape(fsdp=4, tensor=4)


def test_several_slices_are_an_axis() -> None:
    assert resolve_mesh(read_config(None), 512, slices=2) == MeshShape(slices=2, fsdp=256)


@pytest.mark.parametrize(
    ("words", "mesh", "said"),
    [
        (["batch.sequences=6"], "fsdp=4", "multiple of 4, such as 4 or 8"),
        (["batch.sequences=8", "batch.microbatches=4"], "fsdp=4", "4 devices and 4 microbatches"),
        (["batch.sequences=4", "batch.length=30"], "context=4", "make batch.length a multiple of 4"),
        (["batch.sequences=4"], "tensor=8", "4 attention heads cannot be split over tensor=8"),
        (["batch.sequences=4"], "expert=2", "this model has no experts"),
    ],
)
def test_what_does_not_fit_the_mesh(words: list[str], mesh: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_fit(read_config(None, words), find_model("tiny-llama3"), parse_mesh(mesh))
    assert said in str(caught.value)


def test_quantized_products_have_limits() -> None:
    asked = read_config(None, ["precision.products=int8", "batch.sequences=4"])
    with pytest.raises(UserError, match="are for dense models"):
        check_fit(asked, find_model("tiny-mixtral"), MeshShape())
    with pytest.raises(UserError, match="does not go with LoRA"):
        check_settings(read_config(None, ["precision.products=fp8", "lora.rank=4"]))


def test_a_mesh_that_does_not_fit_the_devices() -> None:
    with pytest.raises(UserError, match="there are 6"):
        resolve_mesh(read_config(None, ["mesh.shape=fsdp=4"]), 6)


def test_what_is_kept_whole_is_told() -> None:
    notes = check_fit(read_config(None, ["batch.sequences=4"]), find_model("tiny-llama3"), parse_mesh("tensor=4"))
    assert any("kv_heads 2 does not divide over tensor=4" in note for note in notes)


def test_kernels_belong_to_machines() -> None:
    with pytest.raises(UserError, match="multiple of 128"):
        check_kernel(read_config(None, ["batch.length=100"]), "tpu", MeshShape())
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        check_kernel(read_config(None, ["model.kernel=cudnn"]), "cpu", MeshShape())


def test_paths_and_policies(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a directory"):
        check_settings(read_config(None, [f"model.weights={tmp_path}/none"]))
    with pytest.raises(UserError, match="no safetensors"):
        check_settings(read_config(None, [f"model.weights={tmp_path}"]))
    with pytest.raises(UserError, match="did you mean `minimal`"):
        check_settings(read_config(None, ["remat.policy=minmal"]))
    with pytest.raises(UserError, match="no tensor is named"):
        check_settings(read_config(None, ["remat.policy=custom", "remat.save=[qvk]"]))
    with pytest.raises(UserError, match="eval_fraction"):
        check_settings(read_config(None, ["evaluation.every=5", "data.paths=[a.txt]"]))
    with pytest.raises(UserError, match=r"lora\.rank is 0"):
        check_settings(read_config(None, ["lora.adapter=somewhere"]))


def test_a_wrong_model_name_is_told_before_jax_is_imported() -> None:
    with pytest.raises(UserError, match="unknown model 'lama3-8b'") as caught:
        check_settings(read_config(None, ["model.name=lama3-8b"]))
    assert "llama3-8b" in caught.value.hint
    check_settings(read_config(None, ["model.name=org/of-the-hub"]))
