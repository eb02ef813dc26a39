"""Files that use nearly every key of their dialect, and what each is read as (`files/*.json`).

`python -m tests.task.golden` writes the recorded tasks anew; the difference is then for a person to judge.
"""

from pathlib import Path

import msgspec

from podway.task.environment import Overrides
from podway.task.read import read_task_text
from podway.task.task import Task

FILES = Path(__file__).parent / "files"
NAMES = ("full.sky.yaml", "full-task.dstack.yml", "full-service.dstack.yml", "full-dev.dstack.yml")


def overrides(name: str) -> Overrides:
    """The flags each file needs."""
    return Overrides(
        env=("TOKEN=t", 'HF_TOKEN=h"\\'),
        secrets=("WANDB_API_KEY=w", "KEY=k", "REGISTRY_TOKEN=r"),
        run_args=("--lr", "1 2") if name == "full-task.dstack.yml" else (),
        local_env={"HOME": "/home/me"},
        cwd=str(FILES),
    )


def read(name: str) -> Task:
    return read_task_text((FILES / name).read_bytes(), name=name, base=FILES, overrides=overrides(name))


def recorded(task: Task) -> str:
    return msgspec.json.format(msgspec.json.encode(task), indent=2).decode() + "\n"


if __name__ == "__main__":
    for file in NAMES:
        (FILES / file).with_suffix(".json").write_text(recorded(read(file)))
