"""Faults on command: rules that pick requests and say what happens to them. Pure: the wire carries it out.

A rule picks by patterns on service, method, zone and name, and of those it picks it takes the n-th, or the first few, or
each with a probability (from a seed, so that a run can be repeated).
"""

import fnmatch
import itertools
import random
from typing import Literal

import msgspec

from podway.sandbox.jsons import JsonObject
from podway.sandbox.status import STATUSES, ApiError, invalid, not_found


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request as rules see it."""

    service: str  # tpu, compute, container, storage, cloudresourcemanager, serviceusage
    method: str  # as the RPC is called: CreateNode, objects.insert
    zone: str = ""
    name: str = ""  # what it is about, the last part of the name


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault and when it strikes.

    kinds: `error` (refused with `status`), `delay` (waits `seconds`, then as usual), `slow` (done at once, answered after
    `seconds`), `drop` (connection closed, nothing done), `lost` (done, and the connection closed instead of an answer), `lro`
    (accepted; the operation ends with `status`).
    """

    kind: Literal["error", "delay", "slow", "drop", "lost", "lro"]
    service: str = "*"
    method: str = "*"
    zone: str = "*"
    name: str = "*"
    status: str = "UNAVAILABLE"
    message: str = "The sandbox was told to fail here."
    seconds: float = 1.0
    nth: int | None = None  # only this one of those it picks, counted from 1
    times: int | None = None  # at most so often
    probability: float = 1.0
    seed: int = 0

    def error(self) -> ApiError:
        """What `error` and `lro` end with."""
        return ApiError(self.status, self.message)

    def picks(self, call: Call) -> bool:
        """Whether the patterns fit."""
        fields = ("service", "method", "zone", "name")
        return all(fnmatch.fnmatchcase(getattr(call, field), getattr(self, field)) for field in fields)


class _Armed:
    """A rule and how often it has seen and struck."""

    def __init__(self, rule: Rule) -> None:
        self.rule, self.seen, self.struck = rule, 0, 0
        self.dice = random.Random(rule.seed)

    def strikes(self, call: Call) -> bool:
        rule = self.rule
        if not rule.picks(call) or (rule.times is not None and self.struck >= rule.times):
            return False
        self.seen += 1
        if rule.nth is not None and self.seen != rule.nth:
            return False
        if self.dice.random() >= rule.probability:
            return False
        self.struck += 1
        return True


class Faults:
    """The rules in force, oldest first."""

    def __init__(self) -> None:
        self._armed: dict[str, _Armed] = {}
        self._ids = itertools.count(1)

    def add(self, rule: Rule) -> str:
        """Put a rule in force; its id."""
        if rule.status not in STATUSES:
            raise invalid(f"There is no status {rule.status}; they are {', '.join(STATUSES)}.")
        if not 0 <= rule.probability <= 1:
            raise invalid("A probability lies between 0 and 1.")
        id = f"fault-{next(self._ids)}"
        self._armed[id] = _Armed(rule)
        return id

    def remove(self, id: str | None) -> None:
        """Lift one, or all."""
        if id is None:
            self._armed.clear()
        elif self._armed.pop(id, None) is None:
            raise not_found(id)

    def pick(self, call: Call) -> Rule | None:
        """The fault of a request: the first rule that strikes."""
        return next((armed.rule for armed in self._armed.values() if armed.strikes(call)), None)

    def view(self) -> list[JsonObject]:
        """The rules and their counts."""
        return [
            {"id": id, **msgspec.to_builtins(armed.rule), "seen": armed.seen, "struck": armed.struck}
            for id, armed in self._armed.items()
        ]
