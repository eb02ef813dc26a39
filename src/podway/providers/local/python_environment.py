"""The Python environment of a simulated host: `pip install` lands in the host's home and goes with it.

It is a venv in all that matters to Python and pip, made by writing seven files: no ensurepip, no download, under a millisecond.

1. `make_venv` puts it into the host's home. Its own packages come first on the path; after them come those of the interpreter that
   runs Podway, so that jax need not be installed again. pip sees those as outside the environment and never touches them: an
   upgrade or a downgrade is installed beside, in front.
   A plugin of JAX in it shows every chip of the slice (`podway.simulated_devices`).
2. `make_tools` makes, once for a cluster, a folder with the commands of Podway's environment (`podway`, and whatever its packages
   brought), each to be run by the Python that comes first on the PATH: the host's.
"""

import os
import re
import shlex
import shutil
import site
import sys
import sysconfig
from pathlib import Path

VENV = ".podway/venv"
_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
# What a venv or conda has for itself: a copy would lead back to Podway's own environment.
_OWN_COMMANDS = re.compile(r"(python|pip|activate|conda|deactivate|Activate)[\w.-]*")
_SHEBANG = re.compile(rb"#!\s*[^\n]*python[\d.]*[^\n]*\n")
_LONG_SHEBANG = re.compile(
    rb"#!/bin/sh\n'''exec' [^\n]*\n' '''\n"
)  # how pip writes one that is longer than the kernel takes
_PODWAY = b"import sys\n\nfrom podway.cli.main import main\n\nsys.exit(main())\n"
_JAX_PLUGIN = "from podway.simulated_devices import initialize\n"
_ANY_PYTHON = b"#!/usr/bin/env python3\n"


def make_venv(home: Path) -> Path:
    """Give a host its own Python environment, unless it has it; the environment's folder."""
    venv = home / VENV
    base = Path(getattr(sys, "_base_executable", sys.executable))
    config = f"home = {base.parent}\ninclude-system-site-packages = false\nversion = {sys.version.split()[0]}\n"
    if (venv / "pyvenv.cfg").is_file() and (venv / "pyvenv.cfg").read_text() == config:
        return venv
    packages = venv / "lib" / _VERSION / "site-packages"
    packages.mkdir(parents=True, exist_ok=True)
    (venv / "bin").mkdir(exist_ok=True)
    _link(venv / "lib64", Path("lib"))
    _link(venv / "bin" / "python", base)
    for name in ("python3", _VERSION):
        _link(venv / "bin" / name, Path("python"))
    for name in ("pip", "pip3", _VERSION.replace("python", "pip")):
        _write_command(
            venv / "bin" / name, f'#!/bin/sh\nexec {shlex.quote(f"{venv}/bin/python")} -m pip "$@"\n'.encode()
        )
    (packages / "_interpreter.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in _packages())
    )
    (packages / "jax_plugins").mkdir(exist_ok=True)
    (packages / "jax_plugins" / "podway_simulated.py").write_text(_JAX_PLUGIN)
    (venv / "pyvenv.cfg").write_text(config)  # last: with it the rest is there
    return venv


def make_tools(folder: Path) -> Path:
    """The commands of Podway's environment, for the hosts of a cluster; made whole or not at all."""
    if folder.is_dir():
        return folder
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.{os.urandom(4).hex()}")
    draft.mkdir()
    draft.chmod(0o755)  # the hosts may be another user's
    for source in sorted(_own_bin().iterdir()) if has_own_environment() else ():
        if not _OWN_COMMANDS.fullmatch(source.name) and os.access(source, os.X_OK) and source.is_file():
            _copy_command(source, draft / source.name)
    _write_command(draft / "podway", _ANY_PYTHON + _PODWAY)
    try:
        draft.rename(folder)
    except OSError:  # another server was first
        shutil.rmtree(draft)
    return folder


def search_path(venv: Path, tools: Path) -> str:
    """The PATH of a host: its own Python, the tools, then the server's PATH without the environment that Podway runs from."""
    hidden = {os.path.realpath(_own_bin())} if has_own_environment() else set()
    if os.environ.get("VIRTUAL_ENV"):
        hidden.add(os.path.realpath(f"{os.environ['VIRTUAL_ENV']}/bin"))
    found = os.environ.get("PATH", os.defpath).split(os.pathsep)
    kept = [path for path in found if path.startswith("/") and os.path.realpath(path) not in hidden]
    return os.pathsep.join([f"{venv}/bin", str(tools), *kept])


def has_own_environment() -> bool:
    """Whether Podway runs from a venv or a conda environment, and not from the system's Python."""
    return sys.prefix != sys.base_prefix or Path(sys.prefix, "conda-meta").is_dir()


def _own_bin() -> Path:
    return Path(sysconfig.get_path("scripts"))


def _packages() -> list[str]:
    """Where the interpreter that runs Podway has its packages; PYTHONPATH is not among them."""
    found = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [path for path in found if Path(path).is_dir()]


def _copy_command(source: Path, target: Path) -> None:
    """A Python program for whatever Python comes first on the PATH; anything else as a link."""
    with source.open("rb") as file:
        head = file.read(4096)
    shebang = _LONG_SHEBANG.match(head) or _SHEBANG.match(head)
    if shebang is None:
        target.symlink_to(source)
    else:
        _write_command(target, _ANY_PYTHON + source.read_bytes()[shebang.end() :])


def _write_command(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    path.chmod(0o755)


def _link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)
