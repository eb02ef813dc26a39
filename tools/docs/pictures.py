"""Drawings of the manual as SVG: how a launch flows, a mesh on a torus, the planner's frontier. `make screenshots` writes docs/images.

Each has a card of its own behind it and follows the reader's light or dark choice, so it is legible wherever it is shown. The frontier
is what the planner says when the command is run.
"""

import math
from itertools import pairwise
from pathlib import Path

from podway import Client

OUT = Path(__file__).parents[2] / "docs" / "images"
STYLE = """
  .card { fill: #ffffff; stroke: #d0d7de } .box { fill: #f0f3f9; stroke: #5b6ee1; stroke-width: 1.5 }
  text { font: 13px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 11px; fill: #57606a } .head { font-weight: 600 }
  .arrow { stroke: #5b6ee1; stroke-width: 1.6; fill: none; marker-end: url(#tip) } .tip { fill: #5b6ee1 }
  .wire { stroke: #a5adba; stroke-width: 1.4; fill: none } .axis { stroke: #8c959f } .grid { stroke: #e3e7ec }
  .line { stroke: #5b6ee1; stroke-width: 2; fill: none } .dot { fill: #5b6ee1 } .off { fill: #a5adba }
  .g0 { fill: #5b6ee1 } .g1 { fill: #2da06b } .g2 { fill: #c77d12 } .g3 { fill: #c2477f } .chip { fill: #ffffff; font-size: 11px }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b22; stroke: #30363d } .box { fill: #1f2637; stroke: #8b9bf4 } text { fill: #e6edf3 } .small { fill: #9ea7b3 }
    .arrow { stroke: #8b9bf4 } .tip { fill: #8b9bf4 } .wire { stroke: #57606a } .grid { stroke: #2a313a } .line { stroke: #8b9bf4 }
    .dot { fill: #8b9bf4 } .off { fill: #57606a } .chip { fill: #ffffff }
  }"""
TIP = '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">' + (
    '<path class="tip" d="M0,0 L8,4 L0,8 z"/></marker></defs>'
)


def drawing(width: int, height: int, title: str, parts: list[str]) -> str:
    """A whole SVG file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">\n'
        f"<title>{title}</title>\n<style>{STYLE}\n</style>\n{TIP}\n"
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Some words."""
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def box(x: int, y: int, width: int, head: str, *lines: str) -> str:
    """A step of the flow, with what it is."""
    parts = [
        f'<rect class="box" x="{x}" y="{y}" width="{width}" height="64" rx="6"/>',
        text(x + 10, y + 22, head, "head"),
    ]
    parts += [text(x + 10, y + 39 + 15 * number, line, "small") for number, line in enumerate(lines)]
    return "\n".join(parts)


def launch_flow() -> str:
    """From the file to the output, and back."""
    steps = (
        ("task.yaml", "SkyPilot's form", "or dstack's"),
        ("offers", "slice, zone, price;", "you agree to one"),
        ("written down", "before anything", "is created"),
        ("provider", "gcp, gke, ssh,", "or simulated here"),
        ("hosts", "one agent each;", "files passed on"),
    )
    parts = []
    for number, (head, *lines) in enumerate(steps):
        parts.append(box(20 + 172 * number, 50, 140, head, *lines))
        if number:
            parts.append(f'<path class="arrow" d="M{20 + 172 * number - 30},82 H{20 + 172 * number - 4}"/>')
    parts += [
        text(20, 30, "podway launch task.yaml", "head"),
        '<path class="arrow" d="M778,114 V164"/>',
        box(708, 168, 140, "setup, then run", "on every host at once;", "one failure ends all"),
        box(
            364,
            168,
            296,
            "one stream of output",
            "lines alike once: (all 64 hosts) …",
            "kept on the hosts, read by offset: none lost",
        ),
        box(
            20,
            168,
            296,
            "your terminal, or the page",
            "Ctrl-C stops watching, never the job;",
            "a killed server is resumed by the next",
        ),
        '<path class="arrow" d="M708,200 H664"/>',
        '<path class="arrow" d="M364,200 H320"/>',
    ]
    return drawing(868, 252, "How a launch flows", parts)


def torus_mesh() -> str:
    """A 4x4 torus, its chips coloured by the tensor group they are in: fsdp=4, tensor=4, tile 2x2."""
    parts = [text(24, 30, "A 4x4 torus of 16 chips, as fsdp=4, tensor=4 with tiles of 2x2", "head")]
    at = [[(70 + 74 * column, 84 + 62 * row) for column in range(4)] for row in range(4)]
    for line in range(4):
        y, x = at[line][0][1], at[0][line][0]
        parts.append(f'<path class="wire" d="M{at[0][0][0]},{y} H{at[0][3][0]}"/>')
        parts.append(f'<path class="wire" d="M{x},{at[0][0][1]} V{at[3][0][1]}"/>')
        parts.append(
            f'<path class="wire" d="M{at[0][0][0]},{y} C{at[0][0][0] - 60},{y - 40} {at[0][3][0] + 60},{y - 40} {at[0][3][0]},{y}"/>'
        )
        parts.append(
            f'<path class="wire" d="M{x},{at[0][0][1]} C{x - 46},{at[0][0][1] - 40} {x - 46},{at[3][0][1] + 40} {x},{at[3][0][1]}"/>'
        )
    for row in range(4):
        for column in range(4):
            x, y = at[row][column]
            group, inside = 2 * (row // 2) + column // 2, 2 * (row % 2) + column % 2
            parts.append(f'<circle class="g{group}" cx="{x}" cy="{y}" r="17"/>')
            parts.append(text(x, y + 4, f"{group}·{inside}", "chip", "middle"))
    notes = (
        *("Each colour is a tensor group: its four chips hold", "one copy of a layer's matrices, a quarter each, and"),
        *("exchange activations several times a layer. They are", "neighbours, so that is one hop.", ""),
        *("fsdp runs between the colours: chip 0·1 gathers its", "quarter from 1·1, 2·1 and 3·1, layer by layer.", ""),
        *("The wires that close a row or a column to a ring", "double what that axis can carry. A slice smaller than"),
        "a pod lacks some of them: podway tpus shows which.",
    )  # fmt: skip
    parts += [text(372, 84 + 18 * number, words, "small") for number, words in enumerate(notes)]
    return drawing(700, 330, "A mesh on a torus", parts)


def frontier() -> str:
    """Cost against days of every plan for Llama 3.1 8B on 1T tokens; the best of them joined."""
    tokens = 1e12
    plans = Client().plan("llama3.1-8b", seq=8192, tpu="any")
    points = sorted(
        (
            tokens / plan.tokens_per_second / 86400,
            plan.dollars_per_million_tokens * tokens / 1e6,
            plan.slice.accelerator_type,
        )
        for plan in plans
        if plan.dollars_per_million_tokens
    )
    days = [point[0] for point in points]
    dollars = [point[1] for point in points]
    left, right = math.log10(min(days) * 0.8), math.log10(max(days) * 1.25)
    low, high = math.log10(min(dollars) * 0.7), math.log10(max(dollars) * 1.2)

    def x(value: float) -> float:
        return 80 + 600 * (math.log10(value) - left) / (right - left)

    def y(value: float) -> float:
        return 330 - 270 * (math.log10(value) - low) / (high - low)

    parts = [
        text(24, 30, "Llama 3.1 8B, a trillion tokens: what each slice type takes and costs (podway plan)", "head")
    ]
    for day in (1, 3, 10, 30, 100, 300):
        if left <= math.log10(day) <= right:
            parts.append(f'<path class="grid" d="M{x(day):.1f},60 V330"/>')
            parts.append(text(x(day), 348, f"{day} days" if day > 1 else "1 day", "small", "middle"))
    for value in (20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_000):
        if low <= math.log10(value) <= high:
            parts.append(f'<path class="grid" d="M80,{y(value):.1f} H680"/>')
            price = f"${value // 1000}k" if value < 1_000_000 else f"${value // 1_000_000}M"
            parts.append(text(74, y(value) + 4, price, "small", "end"))
    best: list[tuple[float, float, str]] = []
    for point in points:
        if not best or point[1] < best[-1][1]:
            best.append(point)
    for point in points:
        parts.append(
            f'<circle class="{"dot" if point in best else "off"}" cx="{x(point[0]):.1f}" cy="{y(point[1]):.1f}" r="4"/>'
        )
    parts.append('<path class="line" d="M' + " L".join(f"{x(a):.1f},{y(b):.1f}" for a, b, _ in best) + '"/>')
    curve = [(x(a), y(b)) for a, b, _ in best]
    steps = [
        (a + (c - a) * part / 20, b + (d - b) * part / 20) for (a, b), (c, d) in pairwise(curve) for part in range(20)
    ]
    dots = [(x(a), y(b)) for a, b, _ in points]
    parts += labels([(x(a), y(b), name) for a, b, name in best], dots + steps)
    parts.append(
        text(
            80,
            378,
            "Joined: nothing is both faster and cheaper. Other dots: a faster or cheaper slice exists.",
            "small",
        )
    )
    return drawing(720, 394, "The planner's frontier", parts)


# Where a label may stand beside its dot: right and left edge go by the anchor.
PLACES = tuple((dx, dy, anchor) for dy in (18, -10) for dx, anchor in ((0, "middle"), (-4, "end"), (4, "start")))


def labels(named: list[tuple[float, float, str]], marks: list[tuple[float, float]]) -> list[str]:
    """The names of dots, each where it covers no dot, line or other name; both ends first, and one without room is left out."""
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in marks]
    found = []
    for x, y, name in sorted(named, key=lambda dot: dot not in (named[0], named[-1])):
        for dx, dy, anchor in PLACES:
            width = 6.6 * len(name)
            left = x + dx - {"start": 0, "middle": width / 2, "end": width}[anchor]
            area = (left, y + dy - 11, left + width, y + dy + 3)
            if left > 84 and not any(_overlap(area, other) for other in taken):
                taken.append(area)
                found.append(text(x + dx, y + dy, name, "small", anchor))
                break
    return found


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def main() -> None:
    """Write all three."""
    for name, made in (("launch-flow", launch_flow), ("torus-mesh", torus_mesh), ("frontier", frontier)):
        (OUT / f"{name}.svg").write_text(made())


if __name__ == "__main__":
    main()
