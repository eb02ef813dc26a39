"""Hugging Face transformers on the same machine and the same requests as `tools/h200_serve.py`, in a process of its own.

    python tools/h200_hf.py --mix FILE [--tiny]

Llama 3 8B's shape, random bfloat16 weights. FILE has a {"prompt": [ids], "max_tokens": n} on each line. Two lines of JSON come out:

  static      `generate` at batch 32, 256 tokens in, 64 out
  continuous  `continuous_batching_context_manager` over all requests of FILE at once, as the installed version sets it up by
              itself; warmed up, and eight short requests answered, before the clock starts
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, __version__


def make_model(tiny: bool) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if tiny:
        sizes |= {
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        }  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def static(model: LlamaForCausalLM, tiny: bool) -> dict[str, object]:
    batch, length, answer = (32, 256, 64) if not tiny else (2, 8, 4)
    ids = torch.randint(1, model.config.vocab_size, (batch, length), device=model.device)
    how = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    model.generate(ids, max_new_tokens=4, min_new_tokens=4, **how)
    settle()
    begun = time.perf_counter()
    made = model.generate(ids, max_new_tokens=answer, min_new_tokens=answer, **how)
    settle()
    seconds = time.perf_counter() - begun
    tokens = batch * (made.shape[1] - length)
    return {"what": f"static, batch {batch}, {length} in, {answer} out", "seconds": seconds, "output_tokens": tokens,
            "output_tokens_per_s": tokens / seconds}  # fmt: skip


def continuous(model: LlamaForCausalLM, mix: list[dict[str, object]]) -> dict[str, object]:
    config = GenerationConfig(do_sample=False, max_new_tokens=1024, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(generation_config=config, block=True, timeout=20) as manager:

        def answer(rows: list[dict[str, object]]) -> tuple[float, int]:
            begun = time.perf_counter()
            for row in rows:
                manager.add_request(row["prompt"], max_new_tokens=row["max_tokens"], eos_token_id=-1)
            tokens, left = 0, len(rows)
            while left:
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError("continuous batching gave no result for a minute")
                if result.is_finished():
                    tokens, left = tokens + len(result.generated_tokens), left - 1
            return time.perf_counter() - begun, tokens

        answer([{**row, "max_tokens": min(row["max_tokens"], 8)} for row in mix[:8]])
        seconds, tokens = answer(mix)
    return {"what": f"continuous batching, {len(mix)} requests at once", "seconds": seconds, "output_tokens": tokens,
            "asked_tokens": sum(row["max_tokens"] for row in mix), "output_tokens_per_s": tokens / seconds}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    mix = [json.loads(line) for line in arguments.mix.read_text().splitlines()]
    versions = {"transformers": __version__, "torch": torch.__version__}
    with torch.no_grad():
        model = make_model(arguments.tiny)
        print(json.dumps({**static(model, arguments.tiny), **versions}), flush=True)
        print(json.dumps({**continuous(model, mix), **versions}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
