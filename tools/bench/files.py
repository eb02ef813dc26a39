"""`make bench-files FOLDERS="DIR…"`: how many task files of other tools Podway accepts, and why it refuses the rest.

Given folders (a checkout or an unpacked sdist of SkyPilot or dstack), it takes every YAML file in them, and every YAML block of their
Markdown and reStructuredText pages, and reads each as `podway check --tpus v6e-8` does. An item is accepted when it can be read
and at least one provider would launch it; of a pool or a fleet, its workers. What the person would give on the command line or have
next to the file (variables without a value, local paths, key and certificate) is assumed to be there. Refusals are grouped by their
sentence, without what is particular to the file.
"""

import argparse
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import msgspec

from podway.certificates import CertificateFacts
from podway.control.capability_check import no_image_for, places_of, remarks
from podway.errors import UserError
from podway.task import skypilot_service
from podway.task.environment import Overrides
from podway.task.paths import LocalMachine
from podway.task.read import read_group_text, read_pool, read_tasks_text
from podway.task.ssh_fleets import SshFleet
from podway.task.task import Task
from podway.task.volumes import read_volume_text
from podway.task.yamlfile import Mapping, Scalar, parse

RUNNING_KEYS = {"run", "setup", "service", "pool"}
OTHER_TOOLS = {"apiVersion", "kind", "jobs", "on", "services", "linters", "$schema"}
RUNS = {"task", "service", "dev-environment"}
FENCED = re.compile(r"^([ \t]*)```[ \t]*ya?ml\b[^\n]*\n(.*?)^[ \t]*```", re.M | re.S)
CODE_BLOCK = re.compile(r"^([ \t]*)\.\. code-block:: yaml\n(?:\1[ \t]+:[^\n]*\n)*\n((?:\1[ \t]+[^\n]*\n|\s*\n)+)", re.M)
UNSET = re.compile(r"the (secret|variable) ([A-Za-z_]\w*) has no value|--(env|secret) ([A-Za-z_]\w*)")
PARTICULAR = re.compile(r"`[^`]*`|'[^']*'|\b\d[\w.]*|\S*/\S*|\S+:\d+:\d+:")


class Item(msgspec.Struct, frozen=True):
    """One file or block, and which kind of run it is; `other` is no run."""

    name: str
    text: str
    kind: str


def items(folder: Path) -> Iterator[Item]:
    """What the folder holds, each text once."""
    seen: set[str] = set()
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (".yaml", ".yml", ".md", ".rst") or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        texts = [text]
        if path.suffix in (".md", ".rst"):
            found = (FENCED if path.suffix == ".md" else CODE_BLOCK).findall(text)
            texts = [textwrap.dedent(block) for _, block in found]
        for number, one in enumerate(texts, start=1):
            if one.strip() and one not in seen:
                seen.add(one)
                yield Item(
                    f"{path}" + (f"#{number}" if len(texts) > 1 else ""), one, kind_of(one, path.suffix != ".md")
                )


def kind_of(text: str, whole: bool) -> str:
    """By the keys of its first document that says something. A block of a page (not `whole`) may show a section alone."""
    try:
        documents = [one for one in parse(text, "-") if isinstance(one, Mapping)]
    except UserError:
        return "other"
    for document in documents:
        keys = set(document.entries)
        if keys & OTHER_TOOLS:
            return "other"
        written = document.entries.get("type")
        if written is not None:
            name = written.value.text if isinstance(written.value, Scalar) else ""
            return f"dstack {name}" if name in RUNS or name in ("fleet", "gateway", "volume") else "other"
        if keys & RUNNING_KEYS or (whole and "resources" in keys):
            return f"skypilot {next((word for word in ('service', 'pool') if word in keys), 'task')}"
    return "other"


def refusal(item: Item, tpus: str) -> str | None:
    """Why the item is refused, in the words a person would read; None where it is accepted."""
    if item.kind == "dstack volume":
        try:
            read_volume_text(item.text, name="file")
        except UserError as error:
            return f"{error.what}; {error.hint}"
        return None
    given: dict[str, list[str]] = {"env": [], "secret": []}
    for _ in range(40):
        overrides = Overrides(tpus=tpus, env=tuple(given["env"]), secrets=tuple(given["secret"]))
        try:
            tasks = tasks_of(item, overrides)
        except UserError as error:
            asked = [found for one in (error, *error.others) for found in UNSET.findall(f"{one.what} {one.hint}")]
            fresh = {(kind or flag, name or of_flag) for kind, name, flag, of_flag in asked}
            fresh = {("secret" if kind == "secret" else "env", f"{name}=x") for kind, name in fresh}
            fresh = {(kind, value) for kind, value in fresh if value not in given[kind]}
            if not fresh:
                return f"{error.what}; {error.hint}"
            for kind, value in fresh:
                given[kind].append(value)
            continue
        return next(filter(None, map(refused_everywhere, tasks)), None)
    return "asks for more variables than were tried"


def tasks_of(item: Item, overrides: Overrides) -> tuple[Task, ...]:
    """What the item would run, as `podway apply` and `podway launch` read it: of a pool, its workers."""
    pool = read_pool("file", item.text.encode(), overrides)
    if isinstance(pool, SshFleet):
        return ()  # a list of machines, which run nothing by themselves
    if pool is not None:
        return (pool.task,)
    group = read_group_text(item.text, name="file", overrides=overrides)
    if group is not None:
        return tuple(one.task for one in group.tasks)
    return read_tasks_text(item.text, name="file", overrides=overrides)


def refused_everywhere(task: Task) -> str | None:
    """What the last provider says of it, if all refuse it."""
    why = None
    for row in places_of(task):
        found = remarks(task, row.capabilities, simulated=row.simulated, no_image=no_image_for(task, row))
        if found.refusal is None and row.opens:
            return None
        why = f"{found.refusal.what}; {found.refusal.hint}" if found.refusal else f"no provider {row.name}"
    return f"at launch: {why}"


def main() -> int:
    """Print the counts of each kind of run, then the refusals by reason; the exit code."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("folders", nargs="+", type=Path)
    arguments.add_argument("--tpus", default="v6e-8")
    arguments.add_argument("--list", action="store_true", help="Name each refused file.")
    options = arguments.parse_args()
    total: dict[str, int] = defaultdict(int)
    refused: dict[str, list[tuple[str, str]]] = defaultdict(list)
    refused_of: dict[str, int] = defaultdict(int)
    seen: set[str] = set()
    exists = mock.patch.object(LocalMachine, "existing", lambda self, field, text, directory=False: f"/there/{text}")
    certified = mock.patch.object(skypilot_service, "read_tls", lambda field, local, secrets: CertificateFacts())
    with exists, certified:
        for item in (item for folder in options.folders for item in items(folder)):
            if item.kind == "other" or item.text in seen:
                continue
            seen.add(item.text)
            total[item.kind] += 1
            why = refusal(item, options.tpus)
            if why is not None:
                refused_of[item.kind] += 1
                refused[PARTICULAR.sub("…", why)].append((item.name, why))
    for kind, count in sorted(total.items()):
        print(f"{kind:<24} {count - refused_of[kind]:>4} of {count:<4} accepted")
    runs = [kind for kind in total if kind.split()[-1] in RUNS]
    count, bad = sum(total[kind] for kind in runs), sum(refused_of[kind] for kind in runs)
    if count:
        print(f"{'task, service and dev':<24} {count - bad:>4} of {count:<4} accepted: {(count - bad) / count:.1%}")
    for where in sorted(refused.values(), key=len, reverse=True):
        print(f"\n{len(where):>4} x {where[0][1]}")
        for name, _ in where if options.list else ():
            print(f"       {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
