"""Measure the training step on one NVIDIA GPU: tokens/s and MFU of Podway's step beside Hugging Face + torch.compile.

    PYTHONPATH=src python tools/h200_train.py --suite check,3b --budget 560

1. `check` holds every path (cuDNN attention, chunked cross-entropy, unrolled layers, remat) to the plain one on small shapes, and
   `kernels` attention alone and in real models.
2. Every variant runs in a process of its own, so that its XLA flags are read and its memory is given back. It reports
   the median of the steps after the warm-up as one JSON line, to the screen and to $OUT/h200.jsonl.
3. At the end a table. MFU = (6 x parameters in matrix products + causal attention, forward and backward) x tokens/s over
   989 TFLOP/s, for both; recomputation counts nothing.

It needs jax (and torch and transformers for the comparison), nothing else: msgspec, which Podway's records are made of,
is stood in for where it is not installed. `--tiny` runs everything small on any machine.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

PEAK = 989e12  # NVIDIA H200 data sheet: dense bf16
LENGTH = 4096
WARMUP, STEPS = 3, 12  # as in tools.bench.train
DYNAMIC_SLICE = "--xla_gpu_enable_dynamic_slice_fusion=true"
DOUBLE_BUFFER = "--xla_gpu_enable_while_loop_double_buffering=true"
NO_TRITON = "--xla_gpu_enable_triton_gemm=false"
HIDING = "--xla_gpu_enable_latency_hiding_scheduler=true"
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
CUDNN_PRODUCTS = "--xla_gpu_cudnn_gemm_fusion_level=3"
EVERY_TILE = "--xla_gpu_exhaustive_tiling_search=true"


def stand_in_for_msgspec() -> None:
    """A module with the little of msgspec that the model and the step use, where the real one is missing."""
    if importlib.util.find_spec("msgspec") is not None:
        return

    class Struct:
        def __init_subclass__(cls, frozen: bool = False, kw_only: bool = False, **_: Any) -> None:
            dataclasses.dataclass(frozen=frozen, kw_only=kw_only)(cls)

    module: Any = types.ModuleType("msgspec")
    module.Struct = Struct
    module.Meta = lambda **_: None
    module.ValidationError = ValueError
    structs: Any = types.ModuleType("msgspec.structs")
    structs.replace = dataclasses.replace
    structs.asdict = lambda one: {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
    structs.fields = dataclasses.fields
    module.structs = structs
    sys.modules |= {"msgspec": module, "msgspec.structs": structs}


def shape_of(name: str) -> Any:
    from podway.model.families import find_model  # after the stand-in, as all of Podway here

    return find_model(name)


# --- one variant, in a process of its own ---------------------------------------------------------------------------


def podway_step(v: dict[str, Any]) -> dict[str, Any]:
    """Podway's own step."""
    from tools.bench.train import measure

    if not v.get("profile"):
        return measure(v, PEAK)
    import gpu_profile

    folder = Path(os.environ.get("OUT", ".")) / f"profile-{v['model']}"
    measured = measure(v | {"trace": str(folder)}, PEAK)
    measured["profile"] = gpu_profile.read(folder, v["profile"])
    shutil.rmtree(folder)
    return measured


def kernels(v: dict[str, Any]) -> dict[str, Any]:
    """The attention kernel of this machine against the reference, alone and in real models: tests/model/on_gpu.py."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.model import on_gpu

    with contextlib.redirect_stdout(io.StringIO()) as said:
        on_gpu.main()
    return {"ok": True, "said": said.getvalue().splitlines()}


def hugging_face(v: dict[str, Any]) -> dict[str, Any]:
    """The same shape and batch with transformers, bf16 weights, torch.compile and the fused AdamW."""
    import torch
    import transformers

    from podway.model.flops import flops_per_token
    from podway.model.hf import shape_to_hf

    shape = shape_of(v["model"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {k: x for k, x in shape_to_hf(shape).items() if k not in ("architectures", "model_type")}
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    config = transformers.LlamaConfig(**settings, use_cache=False)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.train()
    if v.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda")
    run = torch.compile(model) if v.get("compile", True) else model
    tokens = torch.randint(0, shape.vocab, (v["batch"], v["length"]), device=device)
    seconds = []
    for _ in range(v.get("warmup", WARMUP) + v.get("steps", STEPS)):
        began = time.monotonic()
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        last = float(loss)
        seconds.append(time.monotonic() - began)
    kept = seconds[v.get("warmup", WARMUP) :]
    rate = v["batch"] * v["length"] / statistics.median(kept)
    return {
        "tokens_s": rate, "mfu": rate * flops_per_token(shape, v["length"]) / PEAK, "step_s": statistics.median(kept),
        "spread": (max(kept) - min(kept)) / statistics.median(kept), "compile_s": seconds[0], "loss": [last],
        "torch": torch.__version__, "transformers": transformers.__version__,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0,
    }  # fmt: skip


# --- correctness ------------------------------------------------------------------------------------------------------


def check(v: dict[str, Any]) -> dict[str, Any]:
    """The largest relative differences between each path and the plain one."""
    import jax

    return {"ok": True, "attention": _check_attention(), "loss": _check_loss(), "step": _check_step(v)} | {
        "device": jax.devices()[0].device_kind
    }


def _far(a: Any, b: Any) -> float:
    import jax.numpy as jnp

    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return float(jnp.max(jnp.abs(a - b)) / (jnp.max(jnp.abs(b)) + 1e-9))


def _check_attention() -> dict[str, float]:
    """cuDNN against the reference, values and gradients; bf16, so about 1 %."""
    import jax
    import jax.numpy as jnp

    from podway.model.attention import Pattern, attend
    from podway.model.layout import TRAIN_RULES

    found = {}
    if jax.default_backend() != "gpu":
        return {"skipped: no GPU": 0.0}
    for heads, kv, dim in ((8, 2, 128), (8, 8, 64)):
        keys = jax.random.split(jax.random.key(0), 4)
        q, k, v, out = (
            jax.random.normal(key, (2, 512, n, dim), jnp.bfloat16)
            for key, n in zip(keys, (heads, kv, kv, heads), strict=True)
        )
        pattern = Pattern(dim**-0.5, None, None)

        def run(kernel: Any, q: Any = q, k: Any = k, v: Any = v, out: Any = out, pattern: Any = pattern) -> Any:
            f = lambda *x: attend(*x, None, pattern, TRAIN_RULES, kernel=kernel)  # noqa: E731
            value, pull = jax.vjp(f, q, k, v)
            return (value, *pull(out))

        for name, a, b in zip(("out", "dq", "dk", "dv"), run("cudnn"), run("reference"), strict=True):
            found[f"{name} d{dim}"] = _far(a, b)
    assert max(found.values()) < 0.03, found
    return found


def _check_loss() -> dict[str, float]:
    """Chunked cross-entropy against log_softmax, values and gradients, in float32."""
    import jax
    import jax.numpy as jnp

    from podway.model.layout import TRAIN_RULES
    from podway.train.loss import Head, cross_entropy

    keys = jax.random.split(jax.random.key(1), 3)
    x = jax.random.normal(keys[0], (2, 64, 128))
    w = jax.random.normal(keys[1], (128, 1000)) * 0.1
    t = jax.random.randint(keys[2], (2, 64), 0, 1000)
    ones = jnp.ones((2, 64))

    def ours(x: Any, w: Any) -> Any:
        return cross_entropy(x, w, t, ones, Head(chunks=4), TRAIN_RULES)[0]

    def plain(x: Any, w: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), t[..., None], -1).sum()

    with jax.default_matmul_precision("highest"):
        (a, ga), (b, gb) = jax.value_and_grad(ours, (0, 1))(x, w), jax.value_and_grad(plain, (0, 1))(x, w)
    found = {"value": _far(a, b), "dx": _far(ga[0], gb[0]), "dw": _far(ga[1], gb[1])}
    assert max(found.values()) < 1e-3, found
    return found


def _check_step(v: dict[str, Any]) -> dict[str, Any]:
    """Losses of three steps: the reference kernel with no remat against every other path."""
    import jax
    import jax.numpy as jnp
    from tools.bench.train import build

    small = {"model": "tiny-llama3", "batch": 4, "length": 256, "moments": "float32", "policy": "none"}
    gpu = jax.default_backend() == "gpu"
    paths: dict[str, dict[str, Any]] = {
        "plain": {"kernel": "reference"},
        "minimal": {"policy": "minimal"},
        "full": {"policy": "full"},
        "unrolled": {"unroll": True, "policy": "minimal"},
        "microbatches": {"microbatches": 2},
        "moments": {"moments": "bfloat16"},
        "logits": {"logits": "bfloat16", "chunks": 2},
        "fp8": {"products": "fp8"},
    }
    losses = {}
    for name, change in paths.items():
        program, step, state, batch = build(small | {"kernel": None if gpu else "reference"} | change)
        with jax.set_mesh(program.mesh):
            losses[name] = []
            for _ in range(3):
                state, happened = step(state, batch, jnp.zeros((1,), jnp.int32))
                losses[name].append(float(happened.loss))
    for name, values in losses.items():
        assert all(abs(a - b) < 0.02 * b for a, b in zip(values, losses["plain"], strict=True)), (name, losses)
    return losses


# --- the suites ----------------------------------------------------------------------------------------------------------


def suites(tiny: bool) -> dict[str, list[dict[str, Any]]]:
    """What is run, most telling first."""
    three, one = ({"model": name, "length": LENGTH} for name in ("llama3.2-3b", "llama3.2-1b"))
    flagged = [[DYNAMIC_SLICE], [DOUBLE_BUFFER], [NO_TRITON], [HIDING], [NO_GRAPHS]]
    lean = ["qkv", "context", "mlp_in"]
    lighter = {"logits": "bfloat16", "chunks": 4}
    quick = {"policy": "none", "unroll": True, "warmup": 2, "steps": 6}
    table: dict[str, list[dict[str, Any]]] = {
        "check": [{"kind": "check"}],
        "kernels": [{"kind": "kernels"}],
        "3b": [
            three | {"batch": 6},
            three | {"batch": 8},
            three | {"batch": 6, "unroll": True},
            three | {"batch": 8, "flags": [DYNAMIC_SLICE]},
            three | {"batch": 4, "policy": "none"},
            three | {"batch": 8, "policy": lean},
            three | {"batch": 10, "policy": lean},
            three | {"batch": 6, "moments": "float32"},
            three | {"batch": 16, "policy": "full"},
        ],
        "3b-flags": [three | {"batch": 6, "flags": flags} for flags in flagged],
        "1b": [
            one | {"batch": 8},
            one | {"batch": 8, "policy": "none"},
            one | {"batch": 16},
            one | {"batch": 8, "policy": "none", "unroll": True},
            one | {"batch": 16, "policy": "none"},
            one | {"batch": 16, "flags": [DYNAMIC_SLICE]},
            one | {"batch": 8, "moments": "float32"},
        ],
        "1b-flags": [one | {"batch": 16, "flags": flags} for flags in flagged],
        "best": [  # one row of each model and of each trainer, for a run that must be short
            one | {"batch": 16, **quick, **lighter},
            three | {"batch": 8, **quick, **lighter},
            one | {"kind": "hf", "batch": 8, "warmup": 2, "steps": 6},
            three | {"kind": "hf", "batch": 4, "warmup": 2, "steps": 6},
            one | {"batch": 16, **quick, **lighter, "profile": 2},
            one | {"batch": 16, **quick, **lighter, "flags": [CUDNN_PRODUCTS]},
            one | {"batch": 16, **quick, **lighter, "flags": [EVERY_TILE]},
        ],
        "fp8": [  # beside the same steps in bf16
            three | {"batch": 8, **quick, **lighter, "flags": [CUDNN_PRODUCTS]},
            three | {"batch": 8, **quick, **lighter, "products": "fp8"},
            one | {"batch": 16, **quick, **lighter, "flags": [CUDNN_PRODUCTS]},
            one | {"batch": 16, **quick, **lighter, "products": "fp8"},
        ],
        "unrolled": [
            three | {"batch": 8, "policy": "none", "unroll": True},
            one | {"batch": 16, "policy": "none", "unroll": True},
            three | {"batch": 6, "policy": "none", "unroll": True},
            three | {"batch": 8, "unroll": True},
            one | {"batch": 16, "policy": "none", "unroll": True, "flags": [HIDING]},
            three | {"batch": 6, "policy": "none", "unroll": True, "flags": [NO_TRITON]},
        ],
        "hf": [
            one | {"kind": "hf", "batch": 8},
            three | {"kind": "hf", "batch": 4},
            three | {"kind": "hf", "batch": 8, "checkpointing": True},
        ],
    }  # fmt: skip
    if tiny:
        small = {"model": "tiny-llama3.2", "length": 128, "kernel": "reference", "steps": 3, "warmup": 1}
        few = {name: rows[:2] + [r for r in rows[2:4] if r.get("unroll")] for name, rows in table.items()}
        table = {
            name: [row | small | {"batch": 2, "flags": []} if "model" in row else row for row in rows]
            for name, rows in few.items()
        }
    return table


def name_of(v: dict[str, Any]) -> str:
    kind = v.get("kind", "podway")
    if kind == "podway":
        from tools.bench.train import name_of

        return f"podway {name_of(v)}"
    words = [kind, v.get("model", ""), f"b{v['batch']}" if "batch" in v else ""]
    return " ".join(word for word in [*words, "checkpointing" if v.get("checkpointing") else ""] if word)


def run_one(v: dict[str, Any], seconds: float) -> dict[str, Any]:
    """A variant in its own process; whatever happens there ends as a row."""
    out = Path(os.environ.get("OUT", "."))
    environment = os.environ | {
        "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *v.get("flags", [])]).strip(),
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",  # jax would leave a quarter of the memory alone
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    command = [sys.executable, __file__, "--worker", json.dumps(v)]
    began = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=max(seconds, 1))
        text, errors = done.stdout, done.stderr
        code: int | None = done.returncode
    except subprocess.TimeoutExpired:
        text, errors, code = "", "out of time", None
    rows = [line for line in text.splitlines() if line.startswith("{")]
    result = json.loads(rows[-1]) if rows else {"error": _short(errors), "code": code}
    row = {"name": name_of(v), "variant": v, "wall_s": time.monotonic() - began} | result
    with (out / "h200.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def _short(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [x for x in lines if any(w in x for w in ("RESOURCE_EXHAUSTED", "OutOfMemory", "Unknown flag", "Error"))]
    return (telling or lines or ["nothing was said"])[-1][:400]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'variant':<72} {'tokens/s':>9} {'MFU':>6} {'step s':>7} {'GiB':>6} {'compile':>7}"]
    for row in rows:
        if "mfu" in row:
            lines.append(
                f"{row['name'][:72]:<72} {row['tokens_s']:>9.0f} {row['mfu']:>6.3f} {row['step_s']:>7.3f} "
                f"{row.get('peak_gib', 0):>6.1f} {row['compile_s']:>6.0f}s"
            )
        elif row.get("ok"):
            lines.append(f"{row['name'][:72]:<72} every path agrees")
        else:
            lines.append(f"{row['name'][:72]:<72} {row.get('error', '')[:90]}")
    return "\n".join(lines)


def worker(v: dict[str, Any]) -> None:
    kinds = {"check": check, "kernels": kernels, "hf": hugging_face}
    try:
        print(json.dumps(kinds.get(v.get("kind", ""), podway_step)(v)), flush=True)
    except Exception as error:  # a row of the table, whatever it was; memory above all
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        print(json.dumps({"error": f"{type(error).__name__}: {first[:380]}"}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--suite", default="check,3b", help="names of suites, with commas: " + ", ".join(suites(False)))
    parser.add_argument("--budget", type=float, default=560, help="seconds for everything")
    parser.add_argument("--only", default="", help="run only variants whose name holds this text")
    parser.add_argument("--variant", action="append", default=[], help="one more variant, as JSON")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a machine without a GPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    stand_in_for_msgspec()
    if options.worker:
        worker(json.loads(options.worker))
        return
    known = suites(options.tiny)
    asked = [name for name in options.suite.split(",") if name]
    for name in asked:
        if name not in known:
            parser.error(f"no suite {name!r}; there are {', '.join(known)}")
    variants = [v for name in asked for v in known[name]] + [json.loads(text) for text in options.variant]
    deadline, rows = time.monotonic() + options.budget, []
    for v in variants:
        left = deadline - time.monotonic()
        if options.only not in name_of(v):
            continue
        if left < 20:
            rows.append({"name": name_of(v), "error": "not run: the budget is spent"})
            continue
        rows.append(run_one(v, left))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows), flush=True)


if __name__ == "__main__":
    main()
