"""`python -m tools.bench.train`: tokens/s and MFU of the training step on this machine, in several variants.

1. A variant (a dict: model, batch, length, remat policy, moments, ...) becomes the program of a real run on one device.
2. `measure` compiles it, runs some steps to warm up, and takes the median of the steps after them.
3. The table shows tokens/s, TFLOP/s and, where the device's peak is known, MFU: useful FLOPs only, causal attention.

Anywhere, the small model of `VARIANTS` shows that everything runs and what each choice costs; `tools/h200_train.py` uses
the same measurement with real shapes on a GPU.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podway.model.families import find_model
from podway.model.flops import flops_per_token
from podway.model.layout import MeshShape
from podway.model.mesh import make_mesh
from podway.train import config as c
from podway.train.devices import peak_flops
from podway.train.state import start_state
from podway.train.step import Program, make_step

Variant = dict[str, Any]

WARMUP, STEPS = 3, 12
_SMALL: Variant = {"model": "tiny-llama3.2", "batch": 4, "length": 256, "policy": "none"}
VARIANTS: tuple[Variant, ...] = (
    _SMALL,
    _SMALL | {"policy": "minimal"},
    _SMALL | {"policy": "full"},
    _SMALL | {"policy": "none", "unroll": True},
    _SMALL | {"policy": "none", "microbatches": 2},
    _SMALL | {"policy": "none", "moments": "float32"},
    _SMALL | {"policy": "none", "products": "int8"},
    _SMALL | {"policy": "none", "products": "fp8"},
)


def config_of(v: Variant) -> c.TrainConfig:
    """The run that a variant stands for; a list in `policy` names the tensors to save."""
    policy = v.get("policy", "minimal")
    custom = isinstance(policy, list)
    return c.TrainConfig(
        model=c.ModelConfig(name=v["model"], kernel=v.get("kernel")),
        batch=c.BatchConfig(sequences=v["batch"], length=v["length"], microbatches=v.get("microbatches", 1)),
        schedule=c.ScheduleConfig(steps=100, kind="constant"),
        optimizer=c.OptimizerConfig(moments=v.get("moments", "bfloat16")),
        precision=c.PrecisionConfig(
            compute=v.get("compute", "bfloat16"),
            products=v.get("products"),
            weights=v.get("weights", "float32"),
        ),
        loss=c.LossConfig(chunks=v.get("chunks", 0), logits=v.get("logits", "float32")),
        remat=c.RematConfig(policy="custom" if custom else policy, save=tuple(policy) if custom else ()),
        compile=c.CompileConfig(unroll=v.get("unroll", False)),
    )


def build(v: Variant) -> tuple[Program, Any, Any, Any]:
    """(program, step, state, batch) of a variant, on one device."""
    program = Program(config_of(v), find_model(v["model"]), make_mesh(MeshShape(), jax.devices()[:1]))
    rows = np.random.default_rng(0).integers(0, program.shape.vocab, (v["batch"], v["length"] + 1), dtype=np.int32)
    batch = {"inputs": rows[:, :-1], "targets": rows[:, 1:], "loss_mask": np.ones(rows[:, 1:].shape, np.float32)}
    with jax.set_mesh(program.mesh):
        state = start_state(program)
        return program, make_step(program, state), state, jax.device_put(batch)


def measure(v: Variant, peak: float | None = None) -> dict[str, Any]:
    """Median seconds of a step, and what follows from it."""
    program, step, state, batch = build(v)
    asked = jnp.zeros((1,), jnp.int32)
    warmup, began = v.get("warmup", WARMUP), time.monotonic()
    with jax.set_mesh(program.mesh):
        compiled = step.lower(state, batch, asked).compile()
        compile_s = time.monotonic() - began
        seconds, losses = [], []
        for _ in range(warmup + v.get("steps", STEPS)):
            began = time.monotonic()
            state, happened = compiled(state, batch, asked)
            losses.append(float(happened.loss))  # waits for the step
            seconds.append(time.monotonic() - began)
        if v.get("trace"):  # the steps after those that count, for a look at their kernels
            with jax.profiler.trace(v["trace"]):
                for _ in range(v["profile"]):
                    state, happened = compiled(state, batch, asked)
                happened.loss.block_until_ready()
    kept = seconds[warmup:]
    rate = v["batch"] * v["length"] / statistics.median(kept)
    flops = rate * flops_per_token(program.shape, v["length"])
    device = jax.devices()[0]
    peak = peak or peak_flops(device.device_kind)
    memory = compiled.memory_analysis()
    return {
        "tokens_s": rate,
        "tflops": flops / 1e12,
        "mfu": flops / peak if peak else None,
        "step_s": statistics.median(kept),
        "spread": (max(kept) - min(kept)) / statistics.median(kept),
        "compile_s": compile_s,
        "temp_gib": getattr(memory, "temp_size_in_bytes", 0) / 2**30,
        "peak_gib": (device.memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30,
        "loss": [losses[0], losses[-1]],
        "device": device.device_kind,
        "jax": jax.__version__,
    }


def name_of(v: Variant) -> str:
    """A variant in words."""
    policy = v.get("policy", "minimal")
    words = [v["model"], f"b{v['batch']}", "+".join(policy) if isinstance(policy, list) else f"remat {policy}"]
    words += [f"moments {v.get('moments', 'bfloat16')}"]
    words += [f"{v['products']} products"] if v.get("products") else []
    words += ["unrolled"] if v.get("unroll") else []
    words += [f"{v['chunks']} chunks"] if v.get("chunks") else []
    words += [f"logits {v['logits']}"] if v.get("logits") else []
    words += [f"{v['microbatches']} microbatches"] if v.get("microbatches", 1) > 1 else []
    words += [flag.removeprefix("--xla_gpu_") for flag in v.get("flags", [])]
    return " ".join(words)


def main() -> int:
    """The table of this machine."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()  # it takes nothing, and says so
    print("| variant | tokens/s | TFLOP/s | MFU | step ms | temporary MiB | loss, first and last |")
    print("|---|---|---|---|---|---|---|")
    for v in VARIANTS:
        m = measure(v)
        mfu = "-" if m["mfu"] is None else f"{m['mfu']:.3f}"
        first, last = m["loss"]
        print(
            f"| {name_of(v)} | {m['tokens_s']:.0f} | {m['tflops']:.4f} | {mfu} | {m['step_s'] * 1e3:.1f} | "
            f"{m['temp_gib'] * 1024:.1f} | {first:.3f} {last:.3f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
