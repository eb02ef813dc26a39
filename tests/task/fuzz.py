"""Random task files: noise, damaged copies of real files, and files grown from the tables of keys.

`fuzz(count, seed)` reads that many and answers how they ended. Whatever the file, a task or a `UserError` must come out: a
task goes through JSON and back unchanged and can be explained; an error is one line that says where, and a hint.
"""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from podway.errors import UserError
from podway.task import dstack_keys, skypilot_keys
from podway.task.environment import Overrides
from podway.task.explain import explain
from podway.task.read import read_task_text
from podway.task.shapes import Anything, Either, Flag, ListOf, MapOf, Number, Shape, Table, Text, Whole
from podway.task.task import Task

from . import golden, seeds

OVERRIDES = Overrides(
    env=("HF_TOKEN=t", "TOKEN=t"),
    secrets=("WANDB_API_KEY=w", "KEY=k", "REGISTRY_TOKEN=r"),
    local_env={"HOME": "/nonexistent"},
    cwd=str(Path(__file__).parent),
)

_WORDS = (
    "tpu-v6e-8 v5litepod-8 v4-4x4x8 tpu A100:8 v6e-8:2 16GB.. google:16GB..64GB 1..4 0..2 .. 5m off on yes ~ 1Ti 8+ gcp/us-east5 "
    "aws local k8s/x gs://some-bucket/a s3://b https://x/y git@host:a/b.git /a /a/b ~/x ../.. . a:/b b=c A A=1 $A ${A} ${HF_TOKEN} "
    "${{env.A}} ${{secrets.KEY}} ${{run.args}} ${{ $${{x}} 8080 80:8080 *:80 80-90 0 -1 1.5 .nan 1e400 99999999999999999999 3.1 3.11 "
    "rps http header x-y /health { [ & * ! | > % @ ` \" ' # 2024-01-01 0x1F 0o17 1_000 1:30 true null"
)
WORDS = _WORDS.split()
ODD = ["", " ", "\n", "a\nb", "\u2028", "\x85", "é", "🙂", "x" * 300, "\0", "a b", "--flag", "<<", "\\", "\t"]


def fuzz(count: int, seed: int) -> Counter[str]:
    """Read `count` random files; how many became tasks, and how many were refused."""
    rng = random.Random(seed)
    corpus = _corpus()
    makers: list[Callable[[], bytes]] = [
        lambda: rng.randbytes(rng.randrange(300)),
        lambda: _damaged(rng, rng.choice(corpus)),
        lambda: _damaged(rng, rng.choice(corpus)),
        lambda: _grown(rng),
        lambda: _grown(rng),
    ]
    return Counter(outcome(rng.choice(makers)()) for _ in range(count))


def outcome(data: bytes) -> str:
    """How one file ends; anything but a task or a clean error is an AssertionError or whatever was raised."""
    try:
        task = read_task_text(data, name="fuzz.yaml", overrides=OVERRIDES)
    except UserError as error:
        assert error.hint, data
        assert "\n" not in error.what, (error.what, data)
        assert error.what.startswith("fuzz.yaml"), (error.what, data)
        return "refused"
    assert msgspec.json.decode(msgspec.json.encode(task), type=Task) == task
    assert explain(task)
    return "task"


def _corpus() -> list[bytes]:
    files = [*seeds.EXAMPLES.parent.rglob("*.y*ml"), *(golden.FILES / name for name in golden.NAMES)]
    return [path.read_bytes() for path in sorted(files)]


def _damaged(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(lines))
        line = lines[at]
        match rng.randrange(8):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, rng.choice(lines) if lines else b"")
            case 2:
                lines[at] = b" " * rng.randrange(8) + line.strip()
            case 3:
                spot = rng.randrange(len(line) + 1)
                lines[at] = line[:spot] + rng.randbytes(1) + line[spot:]
            case 4:
                key, colon, _ = line.partition(b":")
                lines[at] = key + colon + b" " + _word(rng).encode()
            case 5:
                lines[at] = line[: rng.randrange(len(line) + 1)]
            case 6:
                other = rng.randrange(len(lines))
                lines[at], lines[other] = lines[other], lines[at]
            case 7:
                lines[at] = line.replace(
                    b":", rng.choice([b": &a", b": *a", b": !!x", b":", b": |", b": [", b": {"]), 1
                )
        lines = lines or [b""]
    return b"\n".join(lines)


def _word(rng: random.Random) -> str:
    return rng.choice(ODD) if rng.random() < 0.1 else rng.choice(WORDS)


def _grown(rng: random.Random) -> bytes:
    name, table = rng.choice([("", skypilot_keys.TASK), *dstack_keys.TABLES.items()])
    tree = _grow(rng, table, 0)
    if name and isinstance(tree, dict):
        tree["type"] = name
    return yaml.safe_dump(tree, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")


def _grow(rng: random.Random, shape: Shape, depth: int) -> Any:
    if rng.random() < 0.04:
        return rng.choice([None, True, -1, 0, 2**70, 1.5, "", "x", [], ["x"], {}, {"x": None}, [[[]]], float("inf")])
    match shape:
        case Table(keys=keys, required=required):
            wanted = {*required, *rng.sample(list(keys), min(len(keys), rng.randrange(1, 5)))}
            grown = {
                key: _grow(rng, keys[key].shape, depth + 1) for key in keys if key in wanted and not keys[key].refuse
            }
            return {**grown, "unknown_key": 1} if rng.random() < 0.01 else grown
        case MapOf(value=value):
            return {_word(rng): _grow(rng, value, depth + 1) for _ in range(rng.randrange(3))}
        case ListOf(item=item):
            return [_grow(rng, item, depth + 1) for _ in range(rng.randrange(3))]
        case Either(options=options):
            return _grow(rng, rng.choice(options), depth)
        case Flag():
            return rng.random() < 0.5
        case Whole() | Number():
            return rng.choice([0, 1, 2, 80, 8000, -5, 10**6])
        case Text(choices=choices) if choices:
            return rng.choice(choices)
        case Anything() | Text():
            return _word(rng)
        case _:
            raise AssertionError(shape)
