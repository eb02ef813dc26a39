"""What a task file asks of a slice: the `podway train` or `podway serve` command in its `run`, read without running it.

1. `commands_in(script, env)` finds those commands. Variables that the task sets are filled in; what only a shell could know
   (other variables, command substitution) stays as it is written.
2. `settings_of(command)` flattens a trainer's config file and its `key=value` words, later ones over earlier ones.
3. `needs_of(task)` turns the first command into `Needs`, for choosing a slice; `training_of` into the mesh and the step
   that would run on a slice; `misfit_reason(task, slice)` says in one line why the step cannot fit there, and
   `check_products(task)` refuses one that no trainer has.

A task without such a command has no needs that Podway can know: the answer is None, never a guess.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from podway.catalog.slices import Slice
from podway.errors import UserError
from podway.model.families import find_model
from podway.model.layout import MeshShape, parse_mesh
from podway.model.shape import no_quantized_products
from podway.plan.engine_costs import Precision
from podway.plan.picking import Needs
from podway.plan.plans import evaluate
from podway.plan.training import PODWAY, Adapters, Compute, Program, Training, saved_names
from podway.task.task import LocalDir, Task
from podway.task.yamlfile import Mapping as YamlMapping
from podway.task.yamlfile import Node, Scalar, Sequence, parse

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_SEPARATORS = {";", "&&", "||", "|", "&", "(", ")", "{", "}", "then", "do", "else"}
_BEFORE = {"exec", "time", "nohup", "sudo", "env"}  # words that may stand before the command they run
# What the trainer takes where a setting is absent (podway.train.config; tests/plan/test_task_needs.py compares them).
LENGTH, SHAPE, POLICY = 1024, "fsdp=*", "full"


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A `podway train` or `podway serve` in a script, and the words after it."""

    verb: Literal["train", "serve"]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(("podway", self.verb, *self.words))


def commands_in(script: str, env: Mapping[str, str]) -> list[Command]:
    """Every such command of a shell script, in order."""
    found: list[Command] = []
    for words in _simple_commands(script, env):
        while words and (words[0] in _BEFORE or re.fullmatch(r"\w+=.*", words[0], re.DOTALL)):
            words = words[1:]
        match words:
            case ["podway", "train", *rest]:
                found.append(Command(verb="train", words=tuple(rest)))
            case ["podway", "serve", *rest]:
                found.append(Command(verb="serve", words=tuple(rest)))
            case [_, "-m", "podway.train", *rest]:
                found.append(Command(verb="train", words=tuple(rest)))
            case [_, "-m", "podway.serve", *rest]:
                found.append(Command(verb="serve", words=tuple(rest)))
    return found


def _simple_commands(script: str, env: Mapping[str, str]) -> Iterator[list[str]]:
    """The words of each simple command, as far as can be told without running a shell."""
    for line in re.sub(r"\\\n", " ", script).splitlines():
        lexer = shlex.shlex(_filled_in(line, env), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        try:
            for word in lexer:
                if word in _SEPARATORS:
                    yield words
                    words = []
                else:
                    words.append(word)
        except ValueError:  # a quote that ends on another line: no command that could be read here
            continue
        yield words


def _filled_in(text: str, env: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        return env.get(name, found[0] if found[2] is None else found[2])

    return _VARIABLE.sub(value, text)


def command_of(task: Task) -> Command | None:
    """The first command of a task that Podway knows; None where it runs something else."""
    found = commands_in(task.run, task.env)
    return found[0] if found else None


def settings_of(command: Command, folder: Path | None = None) -> dict[str, str]:
    """A trainer's settings by their dotted names; a config file is looked for in `folder` too."""
    return settings_from(command, lambda file: _contents(file, folder))


def settings_from(command: Command, read: Callable[[str], bytes]) -> dict[str, str]:
    """The same, where `read` finds the config file: a server never opens a file of its own that a task names."""
    words = [word for word in command.words if not word.startswith("--")]
    found: dict[str, str] = {}
    if words and "=" not in words[0]:
        file = words.pop(0)
        found |= _parsed(read(file), file)
    for word in words:
        key, _, value = word.partition("=")
        found[key] = value
    return found


def _contents(file: str, folder: Path | None) -> bytes:
    path = next((p for p in (Path(file), (folder or Path()) / file) if p.is_file()), None)
    if path is None:
        raise UserError(f"the task trains by {file}, which is not here", "run this where the file is")
    return path.read_bytes()


def _parsed(data: bytes, file: str) -> dict[str, str]:
    documents = parse(data, file)
    return _flat(documents[0] if documents else None)


def _flat(node: Node | None, path: str = "") -> dict[str, str]:
    if isinstance(node, YamlMapping):
        found: dict[str, str] = {}
        for key, entry in node.entries.items():
            found |= _flat(entry.value, f"{path}.{key}" if path else key)
        return found
    if isinstance(node, Sequence):
        return {path: ",".join(item.text for item in node.items if isinstance(item, Scalar))}
    return {path: node.text} if isinstance(node, Scalar) and node.kind != "null" else {}


def flat_settings(path: Path) -> dict[str, str]:
    """The settings of a file by their dotted names."""
    return _parsed(_contents(str(path), None), str(path))


def folder_of(task: Task) -> Path | None:
    """Where the files of a task lie on this machine."""
    return Path(task.workdir.path) if isinstance(task.workdir, LocalDir) else None


def needs_of(task: Task) -> Needs | None:
    """What must run, as far as a slice depends on it; None where the task runs no command of Podway's."""
    command = command_of(task)
    if command is None:
        return None
    spot = any(one.spot == "yes" for one in task.resources)
    if command.verb == "serve":
        model = next((word for word in command.words if not word.startswith("-")), None)
        weights = "int8" if option_of(command, "--quantize") == "int8" else "bfloat16"
        kv = option_of(command, "--kv") or "auto"
        stored = Precision(weights=weights, kv="bfloat16" if kv == "auto" else kv)
        return None if model is None else Needs(model=model, kind="serve", precision=stored, spot=spot)
    settings = settings_of(command, folder_of(task))
    if "model.name" not in settings:
        return None
    adapters = _adapters(settings)
    tuned = adapters is not None or "model.weights" in settings
    return Needs(
        model=settings["model.name"],
        kind="finetune" if tuned else "train",
        seq=_number(settings, "batch.length", LENGTH),
        batch=_number(settings, "batch.sequences", 0) or None,
        adapters=adapters,
        spot=spot,
    )


def option_of(command: Command, name: str) -> str | None:
    """The value of an option of a command, written either way."""
    words = command.words
    for at, word in enumerate(words):
        if word == name and at + 1 < len(words):
            return words[at + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def training_of(settings: Mapping[str, str], devices: int, slices: int = 1) -> tuple[MeshShape, Training]:
    """The mesh and the step of a trainer's settings on this many devices (of all slices)."""
    text = settings.get("mesh.shape", SHAPE)
    if slices > 1 and "slices=" not in text:
        text = f"slices={slices},{text}"
    mesh = parse_mesh(text, chips=devices)
    policy, offload = _remat(settings)
    each = _number(settings, "batch.per_device", 1)
    training = Training(
        seq=_number(settings, "batch.length", LENGTH),
        batch=_number(settings, "batch.sequences", 0) or each * devices,
        microbatches=_number(settings, "batch.microbatches", 1),
        remat=policy,
        offload=offload,
        compute=_compute(settings),
        optimizer="adafactor" if settings.get("optimizer.kind") == "adafactor" else "adamw",
        params="bfloat16" if settings.get("precision.weights") == "bfloat16" else "float32",
        moments="bfloat16" if settings.get("optimizer.moments") == "bfloat16" else "float32",
        adapters=(adapters := _adapters(settings)),
        state_over_slices=adapters is None and settings.get("mesh.state_over_slices", "").lower() == "true",
        program=_program(settings),
    )
    return mesh, training


def _compute(settings: Mapping[str, str]) -> Compute:
    kinds: dict[str, Compute] = {"int8": "int8", "fp8": "fp8"}
    return kinds.get(settings.get("precision.products", ""), "bfloat16")


def _program(settings: Mapping[str, str]) -> Program:
    """Podway's trainer with the attention kernel that the settings ask for."""
    block = _number(settings, "model.attention_block", 0) or PODWAY.attention_block
    fused = {"true": True, "false": False}.get(
        settings.get("model.attention_fused", "").lower(), PODWAY.attention_fused
    )
    return msgspec.structs.replace(PODWAY, attention_block=block, attention_fused=fused)


def _remat(settings: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """What the backward pass finds in HBM, as a policy, and in host memory."""
    policy = settings.get("remat.policy", POLICY)
    saved, outside = (
        tuple(name for name in settings.get(key, "").strip("[] ").replace(" ", "").split(",") if name)
        for key in ("remat.save", "remat.offload")
    )
    if policy == "custom":
        return "+".join(saved) or POLICY, outside
    if policy.endswith("_offloaded"):
        return POLICY, saved_names(policy.removesuffix("_offloaded"))
    return policy, ()


def _adapters(settings: Mapping[str, str]) -> Adapters | None:
    rank = _number(settings, "lora.rank", 0)
    if not rank:
        return None
    base: Literal["bfloat16", "int8"] = "int8" if settings.get("lora.base") == "int8" else "bfloat16"
    targets = settings.get("lora.targets", "").strip("[] ").replace(" ", "")
    if not targets:
        return Adapters(rank=rank, base=base)
    return Adapters(rank=rank, base=base, targets=tuple(targets.split(",")))


def _number(settings: Mapping[str, str], name: str, default: int) -> int:
    text = settings.get(name)
    if text is None or "$" in text:  # a variable that only the host will know
        return default
    if not re.fullmatch("[0-9]{1,12}", text):
        raise UserError(f"{name} is {text!r}", "write a whole number")
    return int(text)


def check_products(task: Task) -> None:
    """Refuse a task that would train a mixture of experts with int8 or fp8 products, in the trainer's words."""
    command = command_of(task)
    if command is None or command.verb != "train":
        return
    try:
        settings = settings_of(command, folder_of(task))
        shape = find_model(settings.get("model.name", "tiny-llama3"))
    except UserError:
        return  # the trainer itself says what is wrong with it
    if why := no_quantized_products(shape, _compute(settings)):
        raise UserError(why, "leave precision.products out")


def misfit_reason(task: Task, slice: Slice) -> str | None:
    """Why the training step of a task does not fit a slice, in one line; None where it fits or nothing is known."""
    command = command_of(task)
    if command is None or command.verb != "train":
        return None
    settings = settings_of(command, folder_of(task))
    try:
        shape = find_model(settings.get("model.name", "tiny-llama3"))
        mesh, training = training_of(settings, slice.devices * task.slices, task.slices)
        memory = evaluate(shape, slice, mesh, training).memory
    except UserError:
        return None  # the trainer itself says what is wrong with it, better than a guess made here
    if memory.verdict != "does not fit":
        return None
    return f"{settings['model.name']} on {slice.accelerator_type} ({mesh}): {memory.excess}"
