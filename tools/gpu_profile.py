"""Where the time of a step goes on a GPU: the kernels of a jax profile, added up by what they do.

    python tools/gpu_profile.py FOLDER STEPS

`jax.profiler.trace(FOLDER)` around some steps writes an `.xplane.pb`; each kernel in it carries the name of the HLO
instruction it was made for. Kernels are put into groups by name, and shown in milliseconds a step, largest first.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

# First match wins. cuBLAS and cuDNN name their kernels after what they do, Triton's carry the name of the fusion.
GROUPS = (
    ("attention", r"sdpa|fmha|flash|cudnn.*(attn|attention)|cudnn_generated"),
    ("product", r"gemm|cublas|nvjet|cutlass|sm90_xmma|triton_.*dot|splitK"),
    ("copy", r"memcpy|MemcpyD2D|copy|transpose|concatenate|memset"),
    ("scatter, gather", r"scatter|gather|sort"),
    ("reduction", r"reduce"),
)


def read(folder: Path, steps: int) -> dict[str, Any]:
    """{"groups": ms a step, "kernels": the 40 largest [ms a step, times a step, name]}."""
    from jax.profiler import ProfileData  # where the profile was taken, jax is

    found = sorted(folder.rglob("*.xplane.pb"))
    groups, spent, times = Counter[str](), Counter[str](), Counter[str]()
    for plane in ProfileData.from_file(str(found[-1])).planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if "Stream" not in line.name:
                continue
            for event in line.events:
                made_for = next((str(value) for key, value in event.stats if key == "hlo_op"), "")
                name = re.sub(r"\d+", "#", f"{made_for or '-'} | {event.name}")
                ms = event.duration_ns / 1e6 / steps
                spent[name] += ms
                times[name] += 1
                groups[_group(f"{event.name} {made_for}")] += ms
    return {
        "groups": {name: round(ms, 2) for name, ms in groups.most_common()},
        "kernels": [[round(ms, 3), round(times[name] / steps, 1), name[:160]] for name, ms in spent.most_common(40)],
    }


def _group(name: str) -> str:
    return next((group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), "other")


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[1]), int(sys.argv[2])), indent=1))
