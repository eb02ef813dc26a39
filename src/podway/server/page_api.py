"""The records of the routes that the web page has beside those of the command line."""

from typing import Annotated, Any, Literal

import msgspec

from podway.hosts.logs.steps import StepProfile, TrainingStep
from podway.server.api import Body, Reply


class SessionLinkReply(Reply, frozen=True):
    """Where a browser opens a session of the page: once, within two minutes."""

    path: str


class SessionReply(Reply, frozen=True):
    """Whose session it is; `csrf` goes into the header X-Podway-CSRF of every change."""

    user: str
    role: str
    csrf: str
    version: str


class ChangeFrame(Reply, frozen=True):
    """One line of the stream of changes; one without a change is a sign of life."""

    changed: bool = False


class PriceView(Reply, frozen=True):
    """Dollars an hour of a slice in one place."""

    place: str
    on_demand: float | None
    spot: float | None


class SliceView(Reply, frozen=True):
    """One slice type; prices are the least known, in dollars an hour of the whole slice."""

    type: str
    generation: str
    chips: int
    hosts: int
    topology: str
    hbm_gib: float
    peak_tflops: float
    on_demand: float | None
    spot: float | None
    prices: list[PriceView]


class SlicesReply(Reply, frozen=True):
    """The catalog."""

    slices: list[SliceView]


class PlanBody(Body, frozen=True, kw_only=True):
    """A training run to plan: a model by name or by its config.json, and slices by name, generation or list."""

    model: str = ""
    config: dict[str, Any] | None = None
    tpu: str
    seq: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 4096
    batch: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] | None = None
    tokens: Annotated[float, msgspec.Meta(gt=0, le=1e18)] | None = None
    days: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    budget: Annotated[float, msgspec.Meta(gt=0, le=1e12)] | None = None
    spot: bool = False


class PlanView(Reply, frozen=True):
    """One plan: what to run it on, and what it will do. Bytes and seconds are of one device and one step."""

    slice: str
    topology: str
    chips: int
    hosts: int
    mesh: str
    axes: dict[str, int]
    boxes: dict[str, list[int]]  # of each axis: the chips along x, y, z that one group of it spans
    batch: int
    microbatches: int
    seq: int
    remat: str
    offload: list[str]
    step_s: float
    tokens_s: float
    mfu: float
    hourly_cost: float | None
    hours: float | None
    cost: float | None
    memory: dict[str, float]
    memory_limit: float
    time: dict[str, float]


class PlanReply(Reply, frozen=True):
    """Plans, best first."""

    model: str
    parameters: float
    plans: list[PlanView]


class PlannedReply(Reply, frozen=True):
    """What the planner says of the step that a job trains; `code` and `note` say why it says nothing."""

    plan: PlanView | None = None
    model: str = ""
    classes: dict[str, float] = msgspec.field(
        default_factory=dict
    )  # seconds of a step by the kinds of work that a profile tells apart
    code: Literal["", "not_training", "no_slice", "not_planned"] = ""
    note: str = ""


class MetricsFrame(Reply, frozen=True):
    """One line of the stream of a training run's metrics; `cursor` is where another request goes on."""

    steps: list[TrainingStep] = msgspec.field(default_factory=list)
    profile: StepProfile | None = None
    cursor: str = ""
    devices: int = 0  # in the first line: rates are of one of them
    attempt: int = 1
    ended: bool = False


class ServedView(Reply, frozen=True):
    """A job that serves a model by `podway serve`."""

    cluster: str
    job: int
    name: str
    url: str  # as the first host itself sees it


class ServedReply(Reply, frozen=True):
    """All of them."""

    served: list[ServedView]


class ServedModelsReply(Reply, frozen=True):
    """The names that such a job answers to, and whether it answers yet; while it does not, `note` says what it does."""

    models: list[str]
    ready: bool
    note: str


class ChatMessage(Body, frozen=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatBody(Body, frozen=True):
    """A conversation to go on with, or for a model without a chat template a text: OpenAI's fields of the same names."""

    model: str
    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    stop: list[str] | None = None


class RehearsalBody(Body, frozen=True, kw_only=True):
    """A training step to compile with the TPU compiler, as a plan has it."""

    model: str = ""
    config: dict[str, Any] | None = None
    slice: str
    topology: str | None = None
    mesh: str
    batch: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
    microbatches: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1
    seq: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 4096
    remat: str = "full"
    offload: list[str] = msgspec.field(default_factory=list)


class BufferView(Reply, frozen=True):
    """One of the largest buffers at the fullest moment, of one device."""

    name: str
    shape: str
    bytes: float


class CompiledView(Reply, frozen=True):
    """What the compiler says of a step: bytes and seconds are of one device."""

    fits: bool
    bytes: float | None
    limit: float | None
    planned_bytes: float | None
    step_s: float | None
    planned_s: float | None
    tokens_s: float | None
    mfu: float | None
    compile_s: float
    libtpu: str
    parts: dict[str, float] = msgspec.field(default_factory=dict)
    buffers: list[BufferView] = msgspec.field(default_factory=list)
    fixes: list[str] = msgspec.field(default_factory=list)
    failed: str = ""


class RehearsalView(Reply, frozen=True, kw_only=True):
    """A rehearsal that was asked for; the last one of a stream has ended."""

    id: str
    user: str
    model: str
    slice: str
    mesh: str
    state: Literal["waiting", "running", "done", "failed", "cancelled"]
    stage: str = ""
    asked: float
    began: float | None = None
    ended: float | None = None
    note: str = ""
    compiled: CompiledView | None = None


class AvailabilityView(Reply, frozen=True):
    """How attempts to get a slice type went in one place, as this server has seen it: recent ones count more."""

    provider: str
    type: str
    place: str
    spot: bool
    good: float
    bad: float
    at: float


class AvailabilityReply(Reply, frozen=True):
    """By place."""

    places: list[AvailabilityView]


class RehearsalsReply(Reply, frozen=True):
    """The latest first."""

    rehearsals: list[RehearsalView]


class RunView(Reply, frozen=True):
    """A job that trains."""

    cluster: str
    job: int
    name: str
    user: str
    state: str
    model: str
    resources: str
    submitted: float
    started: float | None
    ended: float | None


class RunsReply(Reply, frozen=True):
    """The latest first."""

    runs: list[RunView]


class CostView(Reply, frozen=True):
    """What one cluster cost since it was created, and what of it idled: up with no job running."""

    id: str
    name: str
    user: str
    project: str
    model: str
    resources: str
    state: str
    created: float
    ended: float | None
    hourly_cost: float | None
    up_s: float
    idle_s: float
    cost: float
    idle_cost: float


class DayCost(Reply, frozen=True):
    """Of one day (UTC): a cluster's cost is spread evenly over its life."""

    day: str
    cost: float
    idle_cost: float


class CostsReply(Reply, frozen=True):
    """Of the clusters the caller may see."""

    clusters: list[CostView]
    days: list[DayCost]


class CloudView(Reply, frozen=True):
    """A provider: whether its package is here, whether it is set up, and what went wrong when it was last asked."""

    name: str
    simulated: bool
    installed: bool
    configured: bool
    used: bool
    note: str


class CloudsReply(Reply, frozen=True):
    """All that this server knows."""

    clouds: list[CloudView]


class LatencyView(Reply, frozen=True):
    """Seconds: the median, and the slow ends of the slowest gateway."""

    p50: float
    p90: float
    p99: float


class LoadPoint(Reply, frozen=True):
    """What gateways saw of a service up to a moment: per second, on average, and waiting at the end."""

    at: float
    rps: float
    failed: float
    in_flight: float
    waiting: int
    ttft: LatencyView | None
    tpot: LatencyView | None
    queue: LatencyView | None


class ServiceLoadReply(Reply, frozen=True):
    """Oldest first; moments without a report are left out."""

    points: list[LoadPoint]
