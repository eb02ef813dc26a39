"""What a gateway tells the server: what it saw of each service since its last report, and what people used.

The autoscaler reads the loads; usage is added up by person, service, model and day.
"""

from typing import Annotated

import msgspec

# What comes from gateways is bounded: it is added up and kept.
Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Label = Annotated[str, msgspec.Meta(max_length=200, pattern=r"^[^\x00-\x1f]*$")]
Day = Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d{2}-\d{2}$")]


class LatencySummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Some durations, in seconds."""

    count: Count = 0
    mean: Seconds = 0.0
    p50: Seconds = 0.0
    p90: Seconds = 0.0
    p99: Seconds = 0.0


class ServiceLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one gateway saw of one service over the last `window_s` seconds."""

    service: Label
    window_s: Seconds
    arrived: Count = 0  # requests that came
    completed: Count = 0
    failed: Count = 0  # answered with an error of a replica's or the gateway's making
    in_flight: Amount = 0.0  # with a replica, on average
    waiting: Count = 0  # held for a replica, now
    ttft: LatencySummary = LatencySummary()
    tpot: LatencySummary = LatencySummary()  # of streams: time between two tokens, a mean for each answer
    queue: LatencySummary = LatencySummary()  # time before a replica had the request
    failures: dict[Label, Count] = {}  # replica id -> requests it failed
    open_requests: dict[Label, Count] = {}  # replica id -> requests it has now; also of one that takes no new ones


class ModelUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one person used of one model on one day (UTC, `2026-11-16`): to be added to what is known."""

    day: Day
    user: Label
    service: Label
    model: Label = ""
    requests: Count = 0
    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one gateway saw since its last report. One with a `sequence` that is not above the last counts for nothing."""

    gateway: Label
    sequence: Count
    url: Label = ""  # where clients reach this gateway
    services: tuple[ServiceLoad, ...] = ()
    usage: tuple[ModelUsage, ...] = ()
