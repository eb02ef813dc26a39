"""docs/images/terminal.svg: a real session in a terminal of 100 columns, on a simulated slice. `make screenshots` makes it.

The commands are typed into tmux; what stands on its screen, with its colours, becomes text of the picture.
"""

import html
import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tools.docs.terminal import Terminal  # noqa: E402

OUT = ROOT / "docs" / "images" / "terminal.svg"
COMMANDS = (
    "podway launch -y -c demo examples/hello.yaml",
    "podway exec demo 'echo rank $PODWAY_RANK of $PODWAY_NUM_HOSTS'",
    "podway down -y demo",
)
LEAVE_OUT = ("For `ssh demo`", "Useful commands", "Cluster name:", "├── To ", "└── To ")
COLUMNS, LINE, CHARACTER = 112, 19, 7.8
COLOURS = {
    "31": "#ff7b72",
    "32": "#7ee787",
    "33": "#e3b341",
    "34": "#79c0ff",
    "35": "#d2a8ff",
    "36": "#56d4dd",
    "90": "#8b949e",
}
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SGR = re.compile(r"\x1b\[([\d;]*)m")


def record(place: Path) -> list[str]:
    """The lines of the whole session, with the codes of their colours."""
    env = {
        **{name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ},
        "HOME": str(place),
        "PODWAY_HOME": str(place / ".podway"),
        "PODWAY_SSH_CONFIG": str(place / "ssh-config"),
        "LANG": "C.UTF-8",
    }
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    terminal, lines = Terminal(place, ROOT, env, COLUMNS), []
    try:
        for command in COMMANDS:
            assert terminal.type(command, 300) == 0, terminal.screen()
            shown = terminal.screen(joined=True, colours=True).splitlines()
            lines += [line for line in shown if not SGR.sub("", line).strip().startswith(LEAVE_OUT)]
            while lines and not SGR.sub("", lines[-1]).strip():
                lines.pop()
            lines.append("")
        terminal.type("podway server stop", 120)
    finally:
        terminal.close()
    return [line for number, line in enumerate(lines) if line or (number and lines[number - 1])]


def spans(line: str) -> str:
    """A line as SVG text, each stretch in its colour."""
    parts, style, at = [], "", 0
    for match in [*SGR.finditer(line), None]:
        text = line[at : match.start() if match else len(line)]
        if text:
            parts.append(f"<tspan{style}>{html.escape(text)}</tspan>" if style else html.escape(text))
        if match:
            codes = match[1].split(";")
            colour = next((COLOURS[code] for code in codes if code in COLOURS), "")
            bold = ' font-weight="700"' if "1" in codes else ""
            style, at = (f' fill="{colour}"' if colour else "") + bold, match.end()
    return "".join(parts)


def row(number: int, line: str) -> str:
    """A line of the screen, at its place; what was typed in bold."""
    typed = f'<tspan fill="#7ee787">$</tspan><tspan font-weight="700">{html.escape(SGR.sub("", line)[1:])}</tspan>'
    text = typed if line.startswith("$ ") else spans(line)
    return f'<text x="16" y="{52 + LINE * number}" xml:space="preserve">{text}</text>'


def picture(lines: list[str]) -> str:
    """The window."""
    width, height = round(COLUMNS * CHARACTER) + 32, LINE * len(lines) + 56
    lights = enumerate(("#ff5f57", "#febc2e", "#28c840"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
            "<title>A launch on a simulated TPU pod, in a terminal</title>",
            f"<style>text {{ font: 13px {FONTS}; fill: #e6edf3; white-space: pre }}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117" stroke="#30363d"/>',
            *(f'<circle cx="{20 + 18 * number}" cy="18" r="5.5" fill="{colour}"/>' for number, colour in lights),
            *(row(number, line) for number, line in enumerate(lines)),
            "</svg>\n",
        ]
    )


def main() -> None:
    """Record and draw."""
    with tempfile.TemporaryDirectory(prefix="podway-terminal-", ignore_cleanup_errors=True) as place:
        OUT.write_text(picture(record(Path(place))))


if __name__ == "__main__":
    main()
