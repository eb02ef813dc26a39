"""Where a run starts: weights (random, or from safetensors), adapters, the optimizer's state, each on its devices.

1. `abstract_state` says what every array of the state is and where it lies, without making any: it is what a checkpoint
   is restored onto, and what the step is compiled for ahead of time.
2. `start_state` makes it: random weights are drawn on the devices that keep them; weights from files are read by each
   host for its own devices.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from podway.model import decoder, weights
from podway.model.decoder import Tree
from podway.model.download import fetch
from podway.model.mesh import spec
from podway.train import lora, sharding
from podway.train.step import Program, State


def abstract_state(program: Program) -> State:
    """Shapes, dtypes and shardings of the state."""
    made = jax.eval_shape(partial(_random_state, program))
    shardings = _shardings(program, made)
    wanted: State = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),  # type: ignore[no-untyped-call]
        made,
        shardings,
    )
    return wanted


def start_state(program: Program) -> State:
    """The state before step 0."""
    config = program.config
    shardings = _shardings(program, jax.eval_shape(partial(_random_state, program)))
    if config.model.weights is None:
        made: State = jax.jit(partial(_random_state, program), out_shardings=shardings)()
        return _with_adapter(program, made)
    kind = config.lora.base if config.lora.rank else config.precision.weights
    loaded = weights.load_weights(
        fetch(config.model.weights),
        program.shape,
        mesh=program.mesh,
        rules=program.rules,
        dtype=jnp.dtype("bfloat16" if kind == "int8" else kind),
    )
    full: State = jax.jit(partial(_state_of, program), out_shardings=shardings, donate_argnums=0)(loaded)
    return _with_adapter(program, full)


def _with_adapter(program: Program, state: State) -> State:
    """The adapters of `lora.adapter` in place of fresh ones."""
    if not program.config.lora.rank or program.config.lora.adapter is None:
        return state
    from podway.train.adapter import load_adapter  # only here is safetensors needed

    def place(array: NDArray[np.float32], like: jax.Array) -> jax.Array:
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: array[index])

    loaded = load_adapter(program.config, program.shape)
    return state._replace(trained={"layers": {n: place(loaded[n], old) for n, old in state.trained["layers"].items()}})


def start_frozen(program: Program) -> Tree:
    """The part of the state that no checkpoint holds: the base of LoRA, as the run began with it."""
    return start_state(program).frozen if program.config.lora.rank else {}


def _random_state(program: Program) -> State:
    config = program.config
    kind = jnp.float32 if config.lora.rank else jnp.dtype(config.precision.weights)
    return _state_of(program, decoder.init(program.shape, jax.random.key(config.model.seed), kind))


def _state_of(program: Program, tree: Tree) -> State:
    config = program.config
    trained, frozen = tree, {}
    if config.lora.rank:
        key = jax.random.fold_in(jax.random.key(config.model.seed), 1)
        trained, frozen = lora.init(config.lora, program.shape, key), lora.freeze(tree, config.lora, program.shape)
    return State(jnp.zeros((), jnp.int32), trained, program.optimizer.init(trained), frozen)


def _shardings(program: Program, state: State) -> State:
    """A sharding in the place of each array of the state."""
    trained = sharding.laid_out(state.trained, program.shape, program.mesh, program.kept)
    by_name = sharding.flat(trained)
    dims = {name: tuple(leaf.shape) for name, leaf in sharding.flat(state.trained).items()}
    return State(
        step=jax.sharding.NamedSharding(program.mesh, spec()),  # type: ignore[arg-type]
        trained=trained,
        moments=sharding.state_shardings(state.moments, by_name, dims),
        frozen=sharding.laid_out(state.frozen, program.shape, program.mesh, program.rules),
    )
