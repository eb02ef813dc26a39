"""What a training run is: small frozen records, one for each concern, composed in `TrainConfig` (no jax).

A run is read from a YAML file and `key=value` words (`settings.py`), checked against the model and the devices before
anything is compiled (`checks.py`), and printed at the start. Each record owns the rules that need nothing but itself.
"""

import hashlib
import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from podway.errors import UserError
from podway.model.expert_dispatch import Dispatch, DispatchKind
from podway.model.shape import EXPERT_CAPACITY
from podway.train.data import DataConfig

Count = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[int, msgspec.Meta(ge=0)]
Factor = Annotated[float, msgspec.Meta(gt=0)]
Rate = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Float = Literal["float32", "bfloat16"]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable, and strict about its keys."""


class ModelConfig(Part, frozen=True, kw_only=True):
    """Which model, and what its weights start from."""

    name: str = "tiny-llama3"  # a known name, a directory with a config.json, or an id of the Hugging Face hub
    weights: str | None = (
        None  # a directory of safetensors, an id of the hub or a gs:// address to start from; none: random
    )
    seed: int = 0  # of random weights and of LoRA's
    kernel: Literal["reference", "splash", "cudnn"] | None = None  # of attention; none: the best for this machine
    attention_block: Literal[128, 256, 512, 1024, 2048] | None = (
        None  # side of splash's blocks; none: by generation and shape
    )
    attention_fused: bool | None = None  # one backward kernel in splash in place of two; none: by generation and shape
    expert_dispatch: DispatchKind | None = None  # how tokens reach experts of other chips; none: by group and model
    # all-to-all: rows that a chip of an expert group sends to another at a time, over the mean; the rest follows in further rounds.
    expert_capacity: Factor = EXPERT_CAPACITY
    expert_drop: bool = False  # no further rounds: assignments beyond expert_capacity are not answered
    # Rows, inner side and columns of a tile of the experts' products on a TPU; none: by generation and shape; []: as the compiler chooses.
    expert_tile: tuple[int, ...] | None = None

    @property
    def dispatch(self) -> Dispatch:
        """How tokens reach experts."""
        return Dispatch(self.expert_dispatch, self.expert_capacity, self.expert_drop)


class BatchConfig(Part, frozen=True, kw_only=True):
    """How much one step sees."""

    sequences: Count | None = None  # of the whole step, over all devices
    per_device: Count | None = None  # the same, for each device
    length: Count = 1024
    microbatches: Count = 1  # gradients are added up over this many parts of the batch

    def __post_init__(self) -> None:
        if self.sequences and self.per_device:
            raise UserError("batch.sequences and batch.per_device are both given", "give one of them")

    def global_size(self, devices: int) -> int:
        """Sequences in one step."""
        return self.sequences or (self.per_device or 1) * devices


class ScheduleConfig(Part, frozen=True, kw_only=True):
    """How long, and how the learning rate goes: up over `warmup`, then by its kind."""

    steps: Count = 100
    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup: Amount = 0
    decay: Amount = 0  # wsd: the last steps, over which the rate falls
    final: Fraction = 0.1  # of the peak, at the last step

    def __post_init__(self) -> None:
        if self.warmup + self.decay > self.steps:
            raise UserError(
                f"schedule: {self.warmup} steps of warm-up and {self.decay} of decay do not fit in {self.steps}",
                "make schedule.steps larger, or the other two smaller",
            )
        if self.kind == "wsd" and not self.decay:
            raise UserError("schedule: wsd has no decay", "set schedule.decay to the number of last steps")


class OptimizerConfig(Part, frozen=True, kw_only=True):
    """AdamW or Adafactor; norms and biases are not decayed."""

    kind: Literal["adamw", "adafactor"] = "adamw"
    rate: Rate = 3e-4  # the peak
    b1: Fraction = 0.9
    b2: Fraction = 0.95
    eps: Rate = 1e-8
    decay: Rate = 0.1
    clip: Rate = 1.0  # of the global norm of the gradient; 0: none
    moments: Float = "float32"


class PrecisionConfig(Part, frozen=True, kw_only=True):
    """In which types numbers are kept and multiplied."""

    compute: Float = "bfloat16"
    products: Literal["int8", "fp8"] | None = None  # those of the layers, forward and backward; none: as compute
    weights: Float = "float32"  # the master copy
    gradients: Float = "float32"  # where they are added up over microbatches


class LossConfig(Part, frozen=True, kw_only=True):
    """Cross-entropy, and what is added to it."""

    z: Rate = 0.0  # times the mean square of log Z, keeps logits near zero
    balance: Rate | None = None  # times the balance loss of a mixture of experts; none: the model's own weight
    logits: Float = "float32"  # how the logits of a chunk are kept; sums over them are made in float32 either way
    chunks: Amount = 0  # parts of a sequence whose logits are made one after the other; 0: as many as memory asks


class MeshConfig(Part, frozen=True, kw_only=True):
    """How devices are arranged; `*` takes what is left."""

    shape: str = "fsdp=*"
    tile: tuple[int, ...] | None = None
    # Slices share the weights and the optimizer's state as they are kept, instead of each having all of them: gradients are scattered
    # over slices and weights gathered once a step, the same bytes as the sum that they take the place of.
    state_over_slices: bool = False


class RematConfig(Part, frozen=True, kw_only=True):
    """What the backward pass finds, and what it computes again (`remat.py` lists the policies)."""

    policy: str = "full"
    save: tuple[str, ...] = ()  # with policy custom
    offload: tuple[str, ...] = ()


class CompileConfig(Part, frozen=True, kw_only=True):
    """Flags of the compiler, beside those that `flags.py` has for the chip."""

    tuned: bool = True  # take those of flags.py
    flags: tuple[str, ...] = ()  # more, or the same with other values
    cache: str | None = None  # directory of compiled programs
    unroll: bool = False  # write the layers out one after the other: slower to compile, no copies in and out of a loop


class CheckpointConfig(Part, frozen=True, kw_only=True):
    """What is kept under `output`, and what leaves at the end."""

    every: Amount = 0  # steps; 0: only at the end and when the run is asked to stop
    keep: Count = 2
    resume: bool = True
    restart_data: bool = False  # where data or their order have changed: begin with the first row, in place of refusing
    save: bool = True
    export: bool = False  # write Hugging Face safetensors at the end
    export_dtype: Float = "bfloat16"


class LoggingConfig(Part, frozen=True, kw_only=True):
    """What is logged while it runs."""

    every: Count = 1
    warmup: Amount = 3  # first steps, left out of averages: they compile and fill queues
    tensorboard: bool = True
    profile_at: Amount = 0  # the step at which a profile starts; 0: none
    profile_steps: Count = 3
    convention: Literal["causal", "full", "full-2023"] = "causal"  # of counting FLOPs (model/flops.py)
    bad_steps: Count = 3  # steps with a loss that is not a number, one after the other, before the run gives up


class EvaluationConfig(Part, frozen=True, kw_only=True):
    """Loss on what `data.eval_fraction` holds out."""

    every: Amount = 0  # steps; 0: never
    batches: Count = 8


class LoraConfig(Part, frozen=True, kw_only=True):
    """Adapters beside frozen matrices: w + (alpha / rank) * a @ b."""

    rank: Amount = 0  # 0: train all weights
    alpha: Rate = 16.0
    targets: tuple[str, ...] = ("q", "k", "v", "o")
    base: Literal["bfloat16", "float32", "int8"] = "bfloat16"  # how the frozen weights are kept
    adapter: str | None = None  # a folder of PEFT's to start from; none: fresh adapters
    export: Literal["merged", "adapter", "both"] = "merged"  # what checkpoint.export writes


class TrainConfig(Part, frozen=True, kw_only=True):
    """One training run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    loss: LossConfig = LossConfig()
    mesh: MeshConfig = MeshConfig()
    remat: RematConfig = RematConfig()
    compile: CompileConfig = CompileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    lora: LoraConfig = LoraConfig()
    output: str = "out"  # directory, or gs:// address, of checkpoints, metrics and the exported model

    @property
    def folder(self) -> Path:
        """Where host 0 writes what is not a checkpoint: `output`, or a folder that is copied there (`output.py`)."""
        if "://" not in self.output:
            return Path(self.output).expanduser()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return cache / "podway" / "outputs" / hashlib.sha256(self.output.encode()).hexdigest()[:16]

    @property
    def checkpoints(self) -> str:
        """Where checkpoints lie, a directory or an address."""
        return f"{self.output.rstrip('/')}/checkpoints" if "://" in self.output else str(self.folder / "checkpoints")
