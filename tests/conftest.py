"""Shared by all tests: a compiler that hurries, a Podway home of its own for each test that wants one, no silent skips in CI."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings
from tools.bench.free_ports import free_port as free_port
from tools.bench.own_postgres import binaries, own_postgres

SKIPPED: list[str] = []
# A shell starts what it puts into the background with Ctrl-C ignored, and so would be every command that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
SLOWEST = (
    4  # how many times slower than a developer's machine the suite must still pass: limits are for hangs, not clocks
)
# Small programs are compiled by the hundred and run a few times each. Said before jax starts; processes that tests start inherit it.
HURRY = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
    " --xla_cpu_parallel_codegen_split_count=1"
)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {HURRY}".strip()
# What the machine's own user has set up of a cloud is not ours to use; tests name what they need.
for _name in [*os.environ]:
    if _name.startswith(("PODWAY_GCP_", "GOOGLE_", "CLOUDSDK_")):
        del os.environ[_name]
os.environ["PODWAY_SSH_CONFIG"] = f"{tempfile.gettempdir()}/podway-ssh-config-{os.getpid()}"  # the same for their ssh
os.environ["CLOUDSDK_CONFIG"] = f"{tempfile.gettempdir()}/podway-gcloud-{os.getpid()}"  # nothing is there
# How long an example takes says how busy the machine is. CI tries the same examples each time, others new ones.
settings.register_profile(
    "here",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("PODWAY_REQUIRE_E2E")),
)
settings.load_profile("here")
NOT_HERE = "the kernel has no"  # what no installation can mend is skipped in CI as well


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Called where the results come together, also when several workers run the tests."""
    if report.skipped and "e2e" in report.keywords and not hasattr(report, "wasxfail"):
        why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if NOT_HERE not in why:
            SKIPPED.append(f"{report.nodeid}: {why}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if SKIPPED and os.environ.get("PODWAY_REQUIRE_E2E"):
        print("\nend-to-end tests were skipped where they must run:", *SKIPPED, sep="\n  ")
        session.exitstatus = 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`long`, `soak` and `kubernetes` run only when they are asked for."""
    unasked = [name for name in ("long", "soak", "kubernetes") if name not in (config.option.markexpr or "")]
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in unasked)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A PostgreSQL of our own, on a socket in a temporary directory."""
    programs = binaries()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (tools/system-packages installs it for root)")
    with own_postgres(programs) as url:
        yield url


@pytest.fixture
def podway_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of its own; whatever was started under it is dead afterwards, and a test that left something fails."""
    home = tmp_path / "podway"
    monkeypatch.setenv("PODWAY_HOME", str(home))
    yield home
    left = processes_of(home)
    for process in left:
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs(left, timeout=10)


def processes_of(home: Path) -> list[psutil.Process]:
    """Every process that was started for this home: by its environment or its arguments."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("PODWAY_HOME") == str(home) or str(home) in " ".join(process.cmdline())
            if mine and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_until(condition, seconds: float = 20.0, what: str = "the condition"):  # type: ignore[no-untyped-def]
    """Poll with a deadline; the value of the condition when it is true. `seconds` are those of an idle developer's machine."""
    deadline = time.monotonic() + SLOWEST * seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} did not come within {SLOWEST * seconds} s")
