"""What can be known to be wrong before anything is compiled: the run against the model and the devices (no jax)."""

from pathlib import Path

from podway.errors import UserError
from podway.model.download import is_address
from podway.model.families import find_model
from podway.model.layout import TRAIN_RULES, MeshShape, kept_whole, parse_mesh
from podway.model.shape import ModelShape, no_quantized_products
from podway.train.config import TrainConfig
from podway.train.remat import kept_tensors


def resolve_mesh(config: TrainConfig, devices: int, slices: int = 1) -> MeshShape:
    """The mesh over this many devices; several slices are an axis of their own unless the config names it."""
    text = config.mesh.shape
    if slices > 1 and "slices=" not in text:
        text = f"slices={slices},{text}"
    return parse_mesh(text, chips=devices, tile=config.mesh.tile)


def check_settings(config: TrainConfig) -> None:
    """What is wrong whatever the devices are: paths, policies, combinations."""
    kept_tensors(config.remat)
    if not is_address(config.model.name):
        find_model(config.model.name)  # one of the hub is asked for when the run begins
    if config.model.weights is not None and not is_address(config.model.weights):
        _check_weights(Path(config.model.weights).expanduser())
    if config.lora.adapter is not None and not config.lora.rank:
        raise UserError("lora.adapter is given, but lora.rank is 0", "set lora.rank to the rank of the adapter")
    if config.precision.products is not None and config.lora.rank:
        raise UserError(
            f"precision.products={config.precision.products} does not go with LoRA",
            "leave precision.products out: lora.base=int8 keeps the frozen weights in int8",
        )
    if config.model.expert_tile and (
        len(config.model.expert_tile) != 3 or any(side < 128 or side % 128 for side in config.model.expert_tile)
    ):
        raise UserError(
            f"model.expert_tile is {list(config.model.expert_tile)}",
            "give rows, inner side and columns, each a multiple of 128, such as [256, 4096, 1024]; [] leaves them to the compiler",
        )
    if config.model.expert_drop and config.model.expert_dispatch == "gather":
        raise UserError(
            "model.expert_drop=true goes with model.expert_dispatch=all-to-all: gathered tokens are never dropped",
            "leave one of the two out",
        )
    if config.evaluation.every and not config.data.synthetic and not config.data.eval_fraction:
        raise UserError(
            "there is nothing to evaluate on: data.eval_fraction is 0",
            "hold a part of the data out, such as data.eval_fraction=0.01, or set evaluation.every=0",
        )


def check_fit(config: TrainConfig, shape: ModelShape, mesh: MeshShape) -> list[str]:
    """Refuse what cannot run on this mesh; lines about what can, but wastes something."""
    batch, parts = config.batch.global_size(mesh.chips), config.batch.microbatches
    ways = mesh.slices * mesh.data * mesh.fsdp * mesh.expert
    if batch % (ways * parts):
        unit = ways * parts
        near = sorted({max(unit, batch // unit * unit), (batch // unit + 1) * unit})
        raise UserError(
            f"a batch of {batch} sequences cannot be split over {ways} devices and {parts} microbatches",
            f"batch.sequences must be a multiple of {unit}, such as {' or '.join(map(str, near))}",
        )
    if config.batch.length % mesh.context:
        raise UserError(
            f"{config.batch.length} tokens of a sequence cannot be split over context={mesh.context}",
            f"make batch.length a multiple of {mesh.context}",
        )
    if shape.heads % mesh.tensor:
        raise UserError(
            f"{shape.heads} attention heads cannot be split over tensor={mesh.tensor}",
            "choose a tensor size that divides the heads, and give the rest to fsdp",
        )
    if mesh.expert > 1 and (shape.experts is None or shape.experts.count % mesh.expert):
        count = shape.experts.count if shape.experts else 0
        raise UserError(
            f"{count} experts cannot be split over expert={mesh.expert}",
            "choose an expert size that divides them" if count else "this model has no experts: leave expert out",
        )
    if why := no_quantized_products(shape, config.precision.products):
        raise UserError(why, "leave precision.products out")
    notes = list(kept_whole(shape, mesh, TRAIN_RULES))
    if config.batch.length > shape.max_position:
        notes.append(f"sequences of {config.batch.length} are longer than the model's own {shape.max_position}")
    return notes


def check_kernel(config: TrainConfig, platform: str, mesh: MeshShape) -> None:
    """What the attention kernel of this machine cannot do."""
    unit = 128 * mesh.context
    if (config.model.kernel or ("splash" if platform == "tpu" else "")) == "splash" and config.batch.length % unit:
        raise UserError(
            f"attention on a TPU cannot cut sequences of {config.batch.length} tokens into blocks",
            f"make batch.length a multiple of {unit}",
        )
    if config.model.kernel == "cudnn" and platform != "gpu":
        raise UserError(f"the cudnn kernel needs an NVIDIA GPU, and this is a {platform}", "leave model.kernel out")
    if config.model.kernel == "splash" and platform != "tpu":
        raise UserError(f"the splash kernel needs a TPU, and this is a {platform}", "leave model.kernel out")


def _check_weights(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(
            f"model.weights: {folder} is not a directory",
            "give a folder, an id such as Qwen/Qwen3-8B, or a gs:// address",
        )
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"model.weights: no safetensors in {folder}", "download the model there first")
