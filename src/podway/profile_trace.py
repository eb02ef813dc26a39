"""A profile of training steps, summed by kind of work: products, attention, collectives, everything else.

`classes_of(folder)` reads the trace that JAX's profiler writes for Perfetto (`profile/**/*.trace.json.gz`) on any machine; no jax is
needed. Only the trace of a TPU has the operations of a device.
"""

import gzip
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

from podway.errors import UserError

CLASSES = ("products", "attention", "collectives", "other")
_CLASS_OF = (
    (re.compile(r"splash|flash|attention"), "attention"),
    (re.compile(r"all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|send|recv"), "collectives"),
    (re.compile(r"convolution|dot|ragged"), "products"),
)


def classes_of(folder: Path) -> dict[str, float] | None:
    """Seconds of a step by class on the first device of a profile; None where there is none of a TPU."""
    traces = sorted((folder / "profile").rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not traces:
        return None
    try:
        document = json.loads(gzip.decompress(traces[-1].read_bytes()))
        events = document["traceEvents"]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError):
        raise UserError(
            f"{traces[-1]} cannot be read as a trace", "profile the run again, or remove the file"
        ) from None
    lines = {
        (e["pid"], e.get("tid")): e["args"]["name"]
        for e in events
        if e.get("ph") == "M" and e.get("name") == "thread_name"
    }
    ops = sorted(key for key, name in lines.items() if name == "XLA Ops")
    steps = sorted(key for key, name in lines.items() if name == "Steps")
    if not ops:
        return None
    counted = sum(1 for e in events if e.get("ph") == "X" and steps and (e["pid"], e["tid"]) == steps[0]) or 1
    found = dict.fromkeys(CLASSES, 0.0)
    for event in events:
        if event.get("ph") == "X" and (event["pid"], event.get("tid")) == ops[0]:
            found[_class_of(event)] += float(event.get("dur", 0.0)) * 1e-6
    return {name: seconds / counted for name, seconds in found.items()}


def _class_of(event: Mapping[str, object]) -> str:
    """By the operation's own name and category: a fusion of a product is a product."""
    details = event.get("args")
    category = details.get("hlo_category", "") if isinstance(details, Mapping) else ""
    text = f"{event.get('name', '')} {category}".lower()
    return next((name for pattern, name in _CLASS_OF if pattern.search(text)), "other")
