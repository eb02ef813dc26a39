"""A simulated host has a Python environment of its own: what a task installs there never reaches Podway's."""

import base64
import hashlib
import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

from podway.task.task import Task
from tests.e2e.harness import Podway, task


def make_wheel(folder: Path, version: str) -> Path:
    """A package of one module that knows its version, and a command that prints it."""
    info = f"podway_probe-{version}.dist-info"
    files = {
        "podway_probe.py": f"VERSION = '{version}'\ndef main():\n    print('command', VERSION)\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: podway-probe\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\npodway-probe = podway_probe:main\n",
    }
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        for name, text in files.items()
    }
    record = "".join(f"{name},sha256={digests[name].decode()},{len(text)}\n" for name, text in files.items())
    wheel = folder / f"podway_probe-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(name, text)
    return wheel


def contents(folder: Path) -> dict[str, str]:
    """Every path below a folder with what it holds."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[str(path)] = str(path.readlink())
        elif path.is_file():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def test_what_a_task_installs_stays_on_its_host(pod: Podway, tmp_path: Path) -> None:
    """Podway runs from a venv, activated, with a package that the task downgrades; afterwards that venv is as it was."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    packages = next(venv.glob("lib/python*/site-packages"))
    # What this test runs from is there too, behind: Podway itself, and pip.
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    lines += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    (packages / "behind.pth").write_text("\n".join(lines) + "\n")
    pip = [venv / "bin/python", "-m", "pip", "install", "-q", "--no-index", "--no-warn-script-location"]
    subprocess.run([*pip, make_wheel(tmp_path, "2.0")], check=True)
    (venv / "bin/podway").write_text(f"#!{venv}/bin/python\nraise SystemExit('this is Podway’s own command')\n")
    (venv / "bin/podway").chmod(0o755)
    before = contents(venv)
    older = make_wheel(tmp_path, "1.0")
    pod.python = f"{venv}/bin/python"
    pod.start(
        PATH=f"{venv}/bin{os.pathsep}{os.environ['PATH']}",
        VIRTUAL_ENV=str(venv),
        PYTHONPATH=os.environ.get("PYTHONPATH", ""),
        PIP_TARGET=str(tmp_path / "target"),
        CONDA_PREFIX=str(tmp_path / "conda"),
    )
    version = "python -c 'import podway_probe as p; print(p.VERSION, p.__file__.startswith(\"'$HOME'\"))'"
    setup = f"{version}; podway-probe; pip install -q --no-index {older}"
    run = f"""
        {version}; podway-probe; which python pip; echo "venv $VIRTUAL_ENV"
        env | grep -E '^(CONDA|PIP|PYTHONPATH)' | sed 's/^/leaked /'
        podway train --help >/dev/null && python -m podway.server.main --help >/dev/null && echo train runs
        podway --version | sed 's/^/version: /'
    """
    pod.client.launch(task(run, setup=setup), cluster="c")
    assert pod.finished("c", 1, 120) == "SUCCEEDED"
    log = pod.log_text("c", 1)
    home = pod.home / "local/c/host-0"
    assert "2.0 False" in log and "command 2.0" in log  # what Podway's environment has is there without an installation
    assert "1.0 True" in log and "command 1.0" in log
    assert f"{home}/.podway/venv/bin/python\n" in log and f"{home}/.podway/venv/bin/pip\n" in log
    assert f"venv {home}/.podway/venv" in log and "leaked" not in log
    assert "train runs" in log and "version: podway " in log
    assert contents(venv) == before
    assert not (tmp_path / "target").exists()
    # The next job, and a shell, see the same.
    second = pod.client.exec("c", Task(run=version))
    assert pod.finished("c", second.job or 0) == "SUCCEEDED"
    assert "1.0 True" in pod.log_text("c", second.job or 0)
    how = pod.client.shell("c", 0, f"{version}; env")
    shell = subprocess.run(
        how.argv,
        env={**os.environ, **how.env, "PYTHONPATH": "/leak", "CONDA_PREFIX": "/leak", "TERM": "xterm"},
        cwd=how.cwd,
        capture_output=True,
        text=True,
    )
    assert "1.0 True" in shell.stdout and "/leak" not in shell.stdout and "TERM=xterm" in shell.stdout, shell.stderr
    pod.down("c")
    assert contents(venv) == before
