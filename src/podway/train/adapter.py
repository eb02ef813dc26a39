"""LoRA's adapters as PEFT keeps them, both ways: `adapter_config.json` and `adapter_model.safetensors` in a folder.

Letters: L layers, r rank.

The format is in `model/adapter_files.py`; the trainer has the matrices stacked over the layers and turned, `q_lora_a`
(L, inputs..., r) and `q_lora_b` (L, r, outputs...), those of experts over these too. PEFT has a pair for each expert's matrix, beside the
modules that checkpoints name (`….experts.3.up_proj`).
"""

import json
import shutil
from collections.abc import Iterable, Sized
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import NDArray
from safetensors.numpy import save_file

from podway.errors import UserError
from podway.model.adapter_files import CONFIG_FILE, WEIGHTS_FILE, modules, read_files, tensor_of
from podway.model.decoder import Tree
from podway.model.params import Param
from podway.model.shape import ModelShape
from podway.train import lora
from podway.train.config import TrainConfig


def save_adapter(trained: Tree, config: TrainConfig, shape: ModelShape, folder: Path) -> None:
    """Write the adapters; host 0 does, and a folder of that name is complete."""
    if jax.process_index() == 0:
        targets = lora.targets_of(config.lora, shape)
        tensors: dict[str, NDArray[np.float32]] = {}
        for name, param in targets.items():
            a, b = (_on_host(trained["layers"][name + suffix]) for suffix in (lora.A, lora.B))
            each = list(modules(param))
            for (module, inputs, outputs), a_one, b_one in zip(each, _split(a, each), _split(b, each), strict=True):
                tensors[f"{module}.lora_A.weight"] = np.ascontiguousarray(a_one.reshape(inputs, -1).T)
                tensors[f"{module}.lora_B.weight"] = np.ascontiguousarray(b_one.reshape(-1, outputs).T)
        about = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": config.model.weights or config.model.name,
            "r": config.lora.rank,
            "lora_alpha": config.lora.alpha,
            "lora_dropout": 0.0,
            "target_modules": _module_names(targets.values()),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        draft = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        save_file(tensors, draft / WEIGHTS_FILE, metadata={"format": "pt"})
        (draft / CONFIG_FILE).write_text(json.dumps(about, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("podway: the adapter is written")


def load_adapter(config: TrainConfig, shape: ModelShape) -> dict[str, NDArray[np.float32]]:
    """The adapters in `lora.adapter`, stacked and turned as the trainer has them, by name."""
    assert config.lora.adapter is not None
    folder = Path(config.lora.adapter).expanduser()
    about, tensors = read_files(folder)
    _check(about, config, shape, folder)
    found: dict[str, NDArray[np.float32]] = {}
    for name, param in lora.targets_of(config.lora, shape).items():
        stacks, inward, outward = param.split_dims
        a, b = [], []
        for module, inputs, outputs in modules(param):
            a.append(tensor_of(tensors, f"{module}.lora_A.weight", (config.lora.rank, inputs), folder).T)
            b.append(tensor_of(tensors, f"{module}.lora_B.weight", (outputs, config.lora.rank), folder).T)
        found[name + lora.A] = np.stack(a).reshape(*stacks, *inward, config.lora.rank)
        found[name + lora.B] = np.stack(b).reshape(*stacks, config.lora.rank, *outward)
    return found


def _check(about: object, config: TrainConfig, shape: ModelShape, folder: Path) -> None:
    """The adapter must be what the settings say: another rank or alpha would change what it means."""
    known = about if isinstance(about, dict) else {}
    wanted = {
        "peft_type": "LORA",
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "target_modules": _module_names(lora.targets_of(config.lora, shape).values()),
    }
    for key, value in wanted.items():
        has = sorted(known[key]) if isinstance(known.get(key), list) else known.get(key)
        if has != value:
            raise UserError(
                f"the adapter in {folder} has {key} {has}, and the settings ask for {value}",
                "set lora.rank, lora.alpha and lora.targets as the adapter has them",
            )
    if known.get("use_rslora") or known.get("use_dora"):
        raise UserError(f"the adapter in {folder} uses rsLoRA or DoRA", "only plain LoRA can be continued")


def _module_names(targets: Iterable[Param]) -> list[str]:
    """The ends of modules' names by which PEFT finds what is adapted; of experts one for each, as others may end in the same word."""
    found = set()
    for param in targets:
        module = param.hf.removesuffix(".weight")
        if "{expert}" in module:
            own = module[module.index("experts.") :]
            found |= {own.format(expert=expert) for expert in range(param.dims[1])}
        else:
            found.add(module.rpartition(".")[2])
    return sorted(found)


def _split(stack: NDArray[np.float32], each: Sized) -> NDArray[np.float32]:
    """One matrix for each module."""
    return stack.reshape(len(each), -1)


def _on_host(array: jax.Array) -> NDArray[np.float32]:
    """Adapters are whole on every device."""
    return np.asarray(array.addressable_data(0), np.float32)
