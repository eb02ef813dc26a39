"""Checkpoints: what a run continues from after it was stopped, killed or moved to another slice.

    <folder>/<step>/state/    every array, in pieces that the hosts wrote side by side
                    extra/    a small JSON object
                    commit_success.txt

Orbax writes a step under a temporary name while training goes on, and gives it its own name when it is whole: a step
that has its name can be restored. Who is killed in the middle loses what came after the step before, and the remains
are cleared away when the folder is opened again. A step is restored onto any mesh and any number of hosts: the abstract
state says where each array is to lie, and every host reads what its own devices hold.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import jax
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from etils import epath  # type: ignore[import-untyped]
from orbax.checkpoint import checkpoint_managers as policies

from podway.errors import UserError
from podway.train.optional import require_module

State = TypeVar("State")
_MARKER = "commit_success.txt"  # written last by Orbax, on disks and in buckets alike
_SHOWN = 3  # differences named in an error


class Checkpointer:
    """The steps kept in one folder, local or `gs://`. Every host makes one and calls the same methods.

    `every`: the steps (multiples of it) at which `save` saves; none: only when forced. `keep`: how many of the last ones
    stay; `keep_every`: multiples of this stay as well.
    """

    def __init__(
        self, folder: str | Path, *, keep: int = 2, every: int | None = None, keep_every: int | None = None
    ) -> None:
        self.folder = epath.Path(folder if "://" in str(folder) else Path(folder).expanduser().absolute())
        self._every = every
        kept: list[policies.PreservationPolicy] = [policies.LatestN(keep)]
        if keep_every:
            kept.append(policies.EveryNSteps(keep_every))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(kept),
            save_decision_policy=policies.FixedIntervalPolicy(1),  # `save` below decides
            enable_async_checkpointing=True,
            cleanup_tmp_directories=True,
        )
        if str(folder).startswith("gs://"):
            require_module("gcsfs", "gcsfs", f"a checkpoint folder in a bucket ({folder})")
        with self._user_errors("open"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._set_aside()
            handlers = {"state": ocp.StandardCheckpointHandler(), "extra": ocp.JsonCheckpointHandler()}
            self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def due(self, step: int) -> bool:
        """Whether `save` would save this step without being forced."""
        return bool(self._every) and step % (self._every or 1) == 0

    def save(self, step: int, state: object, *, extra: dict[str, object] | None = None, force: bool = False) -> bool:
        """Begin to save, if this step is due or it is forced; whether it did.

        Returns once the arrays are copied off the devices, so that their memory may be given to the next step; the rest
        happens behind. What went wrong there is raised by the next `save`, `wait` or `close`.
        """
        if not (force or self.due(step)) or step in self._manager.all_steps():
            return False
        with self._user_errors("save"):
            arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra or {}))
            return bool(self._manager.save(step, args=arguments, force=True))

    def steps(self) -> list[int]:
        """All steps that are whole, rising."""
        found = sorted(self._manager.all_steps())
        return [step for step in found if (self.folder / str(step) / _MARKER).exists()]

    def latest(self) -> int | None:
        """The last step that is whole."""
        return max(self.steps(), default=None)

    def restore(self, step: int, abstract_state: State) -> tuple[State, dict[str, object]]:
        """The state and the extra of a step.

        `abstract_state` is a tree of jax.ShapeDtypeStruct with shardings; the arrays come back in its types, on its
        devices.
        """
        with self._user_errors(f"read step {step} of"):
            self._check(step, abstract_state)
            found = self._manager.restore(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state), extra=ocp.args.JsonRestore()),
            )
        return found.state, found.extra

    def wait(self) -> None:
        """Until everything begun is on disk."""
        with self._user_errors("save"):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def close(self) -> None:
        """Wait, and let go of the folder."""
        with self._user_errors("save"):
            self._manager.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set_aside(self) -> None:
        """Rename steps that are not whole (half a copy of one, say), so that they are in nobody's way.

        Orbax itself leaves none under a step's name, and clears its temporary ones away.
        """
        if jax.process_index() == 0 and self.folder.exists():  # in a bucket, a folder exists once it holds something
            for place in self.folder.iterdir():
                if place.name.isdigit() and not (place / _MARKER).exists():
                    place.rename(place.with_name(f"{place.name}.incomplete-{time.time_ns()}"))
        ocp.multihost.sync_global_processes("podway:checkpoints:set_aside")

    def _check(self, step: int, abstract_state: object) -> None:
        """Names and shapes of the arrays must be those that were saved."""
        if step not in self.steps():
            known = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"there is no checkpoint of step {step} in {self.folder}", f"steps that are there: {known}")
        saved = _shapes(self._manager.item_metadata(step).state.tree)
        wanted = _shapes(abstract_state)
        wrong = [
            f"{name} was {_shape_text(saved.get(name))} and is now {_shape_text(wanted.get(name))}"
            for name in sorted(saved.keys() | wanted.keys())
            if saved.get(name) != wanted.get(name)
        ]
        if wrong:
            more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise UserError(
                f"step {step} in {self.folder} is of another model or optimizer: {'; '.join(wrong[:_SHOWN])}{more}",
                "train into another folder, or use the settings that this one was begun with",
            )

    @contextmanager
    def _user_errors(self, action: str) -> Iterator[None]:
        """What disks and damaged files say, in words; tensorstore tells errors apart only in its text."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            message = str(error)
            if "No space left" in message or "ENOSPC" in message or "Disk quota" in message:
                raise UserError(
                    f"no space is left for checkpoints in {self.folder}",
                    "free some, keep fewer of them (checkpoint.keep), or train into a folder on a larger disk",
                ) from None
            if isinstance(error, OSError) and (action == "open" or not isinstance(error, FileNotFoundError)):
                raise UserError(
                    f"cannot {action} {self.folder}: {error.strerror or error}",
                    "give a folder that you may read and write",
                ) from None
            if action.startswith("read"):
                others = [kept for kept in self.steps() if f"step {kept} " not in action]
                hint = (
                    f"remove that step's folder to continue from step {max(others)}"
                    if others
                    else "start again in another output folder"
                )
                raise UserError(f"cannot {action} {self.folder}: {message.splitlines()[0][:300]}", hint) from error
            raise


def _shapes(tree: object) -> dict[str, tuple[int, ...]]:
    """Shapes by name; names are the same for tuples, dictionaries and classes of the same fields."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(_key(part) for part in path): tuple(leaf.shape) for path, leaf in leaves}


def _key(part: object) -> str:
    return str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part))))


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"{list(shape)}"
