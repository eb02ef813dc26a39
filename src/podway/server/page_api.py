"""The records of the routes that the web page has beside those of the command line."""

from typing import Annotated

import msgspec

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


class PlanBody(Body, frozen=True):
    """A training run to plan: a model by name, and slices by name, generation or list."""

    model: str
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
    mesh: str
    axes: dict[str, int]
    batch: int
    remat: str
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
