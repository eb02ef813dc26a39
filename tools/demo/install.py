"""Put Podway and what the demo needs into .venv, with a line that says how far it is (standard library only)."""

import re
import subprocess
import sys
import venv
from pathlib import Path

from screen import Screen

EXTRAS = "train,serve,rehearse"
_SIZE = re.compile(r"Downloading .*?([\w.-]+)-[\d.]+\S* \(([\d.]+) ([kMG]?B)\)")
_MEGABYTES = {"B": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}


def install(root: Path, screen: Screen) -> None:
    """Nothing where a .venv already has the modules."""
    python = root / ".venv" / "bin" / "python"
    probe = "import podway, jax, optax, orbax.checkpoint, tokenizers, llguidance, libtpu"
    if python.exists() and subprocess.run([python, "-c", probe], stderr=subprocess.DEVNULL).returncode == 0:
        return
    screen.act("Install", f"Podway with the extras {EXTRAS.replace(',', ', ')} into .venv")
    if not python.exists():
        screen.progress("creating .venv")
        venv.create(root / ".venv", with_pip=True)
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off",
               "-c", "constraints.txt", "-e", f".[{EXTRAS}]"]  # fmt: skip
    process = subprocess.Popen(command, cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    packages, megabytes, shown = set(), 0.0, []
    for line in process.stdout:
        shown.append(line)
        if line.startswith("Collecting "):
            packages.add(re.split(r"[<>=!~\[ (;]", line.split()[1])[0])
        found = _SIZE.search(line)
        if found:
            megabytes += float(found[2]) * _MEGABYTES[found[3]]
            screen.progress(f"{len(packages)} packages, {megabytes:.0f} MB: {found[1]} ({found[2]} {found[3]})")
        elif line.startswith("Installing collected packages"):
            screen.progress(f"{len(packages)} packages, {megabytes:.0f} MB downloaded: unpacking them")
    if process.wait():
        screen.error("pip could not install Podway:\n" + "".join(shown[-20:]))
        sys.exit(1)
    screen.line(f"{len(packages)} packages, {megabytes:.0f} MB")
