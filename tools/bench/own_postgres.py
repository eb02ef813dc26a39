"""A PostgreSQL of our own, on a socket in a temporary directory: for tests and benchmarks."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path


def binaries() -> Path | None:
    """Where PostgreSQL's programs are; None where it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
    if found:
        return found[-1].parent
    here = shutil.which("pg_ctl")
    return Path(here).parent if here else None


@contextlib.contextmanager
def own_postgres(programs: Path) -> Iterator[str]:
    """Its URL, for as long as the block lasts."""
    place = Path("/tmp") / f"podway-pg-{time.time_ns()}"  # a socket's path must be short
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    as_user = ["runuser", "-u", "postgres", "--"] if Path("/proc/self").stat().st_uid == 0 else []
    data = place / "data"

    def run(*command: str) -> None:
        subprocess.run([*as_user, *command], check=True, capture_output=True, cwd="/")

    try:
        run(str(programs / "initdb"), "-D", str(data), "-A", "trust", "-U", "postgres")
        run(str(programs / "pg_ctl"), "-D", str(data), "-w", "-l", str(place / "log"), "-o",
            f"-c listen_addresses='' -k {place} -c fsync=off", "start")  # fmt: skip
        yield f"postgresql://postgres@/postgres?host={place}"
    finally:
        subprocess.run(
            [*as_user, str(programs / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop"],
            capture_output=True,
            cwd="/",
        )
        shutil.rmtree(place, ignore_errors=True)
