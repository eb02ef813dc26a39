"""The command line of the server, shared by `podway serve` and `python -m podway.serve` (no jax)."""

import argparse
import json
from pathlib import Path
from typing import NoReturn

from podway.errors import UserError
from podway.model.download import is_address
from podway.model.families import find_model
from podway.serve.output_parser import TOOL_FORMATS

MAX_DRAFT = 15


class _Parser(argparse.ArgumentParser):
    """A mistake is a UserError, as everywhere else."""

    def error(self, message: str) -> NoReturn:
        """In place of the usage and an exit."""
        raise UserError(message, "see: podway serve --help")


def parser() -> argparse.ArgumentParser:
    """The options; `podway serve` hands its arguments on as they are, and draws its help from these."""
    made = _Parser(prog="podway serve", description="Serve a model with an OpenAI-compatible API.", allow_abbrev=False)
    add = made.add_argument
    add(
        "model",
        metavar="MODEL",
        help="A folder with config.json and safetensors, an id of the Hugging Face hub (ORG/MODEL[@REVISION]), a gs:// address, "
        "or a known name with --random.",
    )
    add("--host", default="127.0.0.1", help="Address to listen on.  [default: 127.0.0.1]")
    add("--port", type=int, default=8000, help="Port to listen on; 0 takes a free one.  [default: 8000]")
    add("--name", help="What clients call the model.  [default: the folder's name or the id]")
    add("--api-key-file", type=Path, help="A file with an API key on each line; without it everyone may ask.")
    add("--tls-cert", type=Path, help="Certificate (PEM) to serve HTTPS with.")
    add("--tls-key", type=Path, help="Its private key.")
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="Web pages that may ask; * for all; repeatable.",
    )
    add("--access-log", action="store_true", help="Log a line for each request.")
    add("--tp", type=int, default=1, help="Devices that one copy of the model is split over.  [default: 1]")
    add("--replicas", type=int, default=1, help="Copies of the model, each on its own devices.  [default: 1]")
    add("--max-len", type=int, help="Tokens of prompt and answer together.")
    add("--max-seqs", type=int, help="Requests that run at once.")
    add("--max-queue", type=int, default=1024, help="Requests that may wait; others get 429.  [default: 1024]")
    add("--page", type=int, help="Tokens in a page of the cache.")
    add("--pages", type=int, help="Pages of the cache.  [default: what the memory holds]")
    add("--prompt-tokens", type=int, help="Tokens of prompts in one step.")
    add("--decode-steps", type=int, default=8, help="Tokens of a request in one dispatch.  [default: 8]")
    add(
        "--speculate", type=int, metavar="N",
        help="Draft N tokens by what followed the last ones before, and take those that are right.  [default: 0, off]",
    )  # fmt: skip
    add("--speculative-config", metavar="JSON", help="The same as vLLM spells it, with method ngram.")
    add("--enable-lora", action="store_true", help="Make room for LoRA adapters.")
    add(
        "--lora-modules", nargs="+", action="extend", default=[], metavar="NAME=PATH",
        help="Adapters to serve, one or several, each under a name of its own: folders as PEFT writes them.",
    )  # fmt: skip
    add("--max-loras", type=int, help="Adapters that may be loaded at once.  [default: 4, or as many as are named]")
    add("--max-lora-rank", type=int, default=16, help="The largest rank of an adapter.  [default: 16]")
    add(
        "--allow-lora-updates", action="store_true",
        help="Let clients load and unload adapters, from folders of this machine (/v1/load_lora_adapter).",
    )  # fmt: skip
    add(
        "--dtype",
        help="Type of weights and activations: bfloat16, float16 or float32.  [default: bfloat16; float32 on a CPU]",
    )
    add("--quantize", default="none", choices=["none", "int8"], help="How the weights are quantized.  [default: none]")
    add(
        "--kv", default="auto", choices=["auto", "int8", "fp8"],
        help="Type of the cached keys and values.  [default: as the model computes]",
    )  # fmt: skip
    add("--memory-fraction", type=float, default=0.9, help="Part of a device's memory to use.  [default: 0.9]")
    add("--compile-cache", type=Path, help="Where compiled programs are kept.  [default: ~/.cache/podway/compiled]")
    add("--tool-format", choices=TOOL_FORMATS, help="How the model writes tool calls.  [default: by its chat template]")
    add(
        "--reasoning", action=argparse.BooleanOptionalAction, default=None,
        help="Whether the model thinks between <think> and </think>.  [default: by its chat template]",
    )  # fmt: skip
    add("--drain-seconds", type=float, default=30.0, help="Time for requests under way after SIGTERM.  [default: 30]")
    add("--random", action="store_true", help="Random weights, to try it out or to measure.")
    return made


def check(args: argparse.Namespace) -> None:
    """What argparse cannot say in words."""
    if not args.random and not Path(args.model).is_dir() and not is_address(args.model):
        raise UserError(
            f"{args.model}: no such directory",
            "give a folder with config.json and safetensors, an id such as Qwen/Qwen3-8B, or add --random to a known name",
        )
    if args.random:
        find_model(args.model)  # a wrong name is told before jax is imported, which takes seconds
    for name in ("tp", "replicas", "max_queue", "decode_steps"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}", "it must be at least 1")
    draft_size(args)
    adapter_room(args)
    if (args.tls_cert is None) != (args.tls_key is None):
        raise UserError("--tls-cert and --tls-key belong together", "give both")
    for name in ("tls_cert", "tls_key"):
        if (file := getattr(args, name)) is not None and not file.is_file():
            raise UserError(f"{file}: no such file", f"check --{name.replace('_', '-')}")
    if not 0 <= args.drain_seconds <= 86_400:
        raise UserError(f"--drain-seconds is {args.drain_seconds:g}", "it must lie between 0 and 86400")
    if not 0 <= args.port < 65536:
        raise UserError(f"--port is {args.port}", "a port lies between 0 and 65535")
    if not 0.05 <= args.memory_fraction <= 0.99:
        raise UserError(f"--memory-fraction is {args.memory_fraction}", "it must lie between 0.05 and 0.99")


def draft_size(args: argparse.Namespace) -> int:
    """Tokens that are drafted, by --speculate or by vLLM's --speculative-config."""
    if args.speculative_config is None:
        size, name = args.speculate or 0, "--speculate"
    else:
        size, name = _ngram_config(args.speculative_config), "num_speculative_tokens"
        if args.speculate is not None:
            raise UserError("--speculate and --speculative-config mean the same", "give one of them")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_DRAFT:
        raise UserError(f"{name} is {str(size)[:40]}", f"it must lie between 0 and {MAX_DRAFT}")
    return size


def adapter_modules(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(name, folder) of each of --lora-modules, written NAME=PATH or as JSON with name and path."""
    found = []
    for word in args.lora_modules:
        name, _, path = word.partition("=")
        if word.lstrip().startswith("{"):
            try:
                known = json.loads(word)
                name, path = str(known["name"]), str(known["path"])
            except (ValueError, RecursionError, KeyError):
                raise UserError(f"--lora-modules {word[:80]}: not JSON with name and path", "write NAME=PATH") from None
        if not name or not path:
            raise UserError(f"--lora-modules {word[:80]}: a name or a path is missing", "write NAME=PATH")
        found.append((name, path))
    return found


def adapter_room(args: argparse.Namespace) -> tuple[int, int] | None:
    """How many adapters may be loaded and their largest rank; None: the server has no room for any."""
    named = len(adapter_modules(args))
    if not (args.enable_lora or named or args.max_loras is not None or args.allow_lora_updates):
        return None
    count = args.max_loras if args.max_loras is not None else max(4, named)
    if not max(1, named) <= count <= 1024:
        raise UserError(
            f"--max-loras is {count}",
            f"it must lie between {max(1, named)} and 1024" + (", for those named" if named else ""),
        )
    if not 1 <= args.max_lora_rank <= 512:
        raise UserError(f"--max-lora-rank is {args.max_lora_rank}", "it must lie between 1 and 512")
    return count, args.max_lora_rank


def _ngram_config(text: str) -> object:
    """`num_speculative_tokens` of the JSON. Which n-grams are looked for is not set: a draft costs nothing to try."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise UserError("--speculative-config is not a JSON object", 'such as {"method": "ngram", …}')
    if (method := config.get("method", "ngram")) != "ngram":
        raise UserError(f"--speculative-config: there is no method {str(method)[:40]!r} here", "use ngram")
    return config.get("num_speculative_tokens")


def api_keys(path: Path | None, environment: str | None) -> list[str]:
    """The keys of a file and of PODWAY_API_KEY."""
    keys = [environment.strip()] if environment and environment.strip() else []
    if path is None:
        return keys
    try:
        found = [line.strip() for line in path.read_text().splitlines()]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", "check --api-key-file") from None
    keys += [line for line in found if line and not line.startswith("#")]
    if not keys:
        raise UserError(f"{path} holds no key", "write one key on each line")
    return keys
