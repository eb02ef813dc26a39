"""A mixture of experts that drops no token.

Letters: B batch, S length, N tokens on this chip (B * S), J experts per token, M = N * J assignments, D d_model,
F d_ff of an expert, E experts.

1. `route` asks the router which J experts each token goes to, and with which weights.
2. `_experts_here` sorts the assignments by expert, so that the tokens of an expert lie together, multiplies each run by
   its expert's matrices (`grouped.py`), puts the rows back and sums the J weighted answers of each token.
3. Under a mesh this happens on each chip with its own tokens and its own experts. Where chips hold different experts and different
   tokens, rows are exchanged or all tokens gathered (`expert_dispatch.py`); where they have the same tokens, every chip answers for
   the experts it holds, and the answers are summed. Weights that are split over fsdp are gathered by hand, so that their gradients
   are reduce-scattered.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from podway.model.expert_dispatch import DROPLESS, Dispatch
from podway.model.expert_exchange import Exchange, exchanged
from podway.model.grouped import Adapted, ExpertMlp, Matrices, Matrix, mlp_of_groups, picked, stack_of
from podway.model.layout import Rules
from podway.model.mesh import context_mesh, context_spec, mesh_axes, per_chip, spec, split_axes, summed
from podway.model.shape import Experts


class Routing(NamedTuple):
    """Where each token goes, and how much each expert is used."""

    chosen_BSJ: jax.Array
    weights_BSJ: jax.Array
    usage_2E: jax.Array  # of each expert, summed over tokens: how often it was chosen, and its probability


def route(logits_BSE: jax.Array, experts: Experts, counted_BS: jax.Array | None = None) -> Routing:
    """Softmax over all experts, then the best J of them. `counted_BS` is 0 where a token is padding."""
    chances = jax.nn.softmax(logits_BSE.astype(jnp.float32), axis=-1)
    weights, chosen = lax.top_k(chances, experts.per_token)
    if experts.normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    chosen_BSE = jax.nn.one_hot(chosen, experts.count, dtype=jnp.float32).sum(axis=2)
    usage_2BSE = jnp.stack([lax.stop_gradient(chosen_BSE), chances])
    if counted_BS is not None:
        usage_2BSE = usage_2BSE * counted_BS.astype(jnp.float32)[:, :, None]
    return Routing(chosen, weights, usage_2BSE.sum(axis=(1, 2)))


def balance_loss(usage_2E: jax.Array, tokens: jax.Array | int, experts: Experts) -> jax.Array:
    """E times the sum over experts of the share of tokens that chose it times its mean probability.

    Smallest (J) when experts are used alike. As in transformers, both factors are means over all tokens of all layers:
    `usage_2E` is summed over them, and `tokens` counts each token once for every layer.
    """
    chosen_E, chance_E = usage_2E / tokens
    return experts.count * jnp.sum(chosen_E * chance_E)


def apply_experts(
    x_BSD: jax.Array,
    routing: Routing,
    matrices: Matrices,
    experts: Experts,
    mlp: ExpertMlp,
    rules: Rules,
    dispatch: Dispatch = DROPLESS,
) -> jax.Array:
    """The weighted answers of each token's experts. `matrices` are (gate, up, down) or (up, down), stacked over E."""
    mesh = context_mesh()
    if mesh.chips == 1:
        return _experts_here(x_BSD, routing.chosen_BSJ, routing.weights_BSJ, matrices, None, mlp)
    x_spec = context_spec(("batch", "length", None), x_BSD.shape, rules)
    inward = context_spec(("experts", "embed", "mlp"), stack_of(matrices[0]).shape, rules)
    outward = context_spec(("experts", "mlp", "embed"), stack_of(matrices[-1]).shape, rules)
    run = per_chip(
        partial(
            _on_chip,
            x_spec=x_spec,
            inward=inward,
            outward=outward,
            experts=experts,
            mlp=mlp,
            dispatch=dispatch,
        ),
        in_specs=(x_spec, spec(*x_spec[:2]), spec(*x_spec[:2]), _specs(matrices, inward, outward)),
        out_specs=x_spec,
    )
    out: jax.Array = run(x_BSD, routing.chosen_BSJ, routing.weights_BSJ, matrices)
    return out


def _on_chip(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    matrices: Matrices,
    *,
    x_spec: P,
    inward: P,
    outward: P,
    experts: Experts,
    mlp: ExpertMlp,
    dispatch: Dispatch,
) -> jax.Array:
    specs = [inward] * (len(matrices) - 1) + [outward]
    whole = tuple(_gathered(matrix, spec, "fsdp") for matrix, spec in zip(matrices, specs, strict=True))
    here = stack_of(whole[0]).shape[0]
    split = here < experts.count  # this chip holds some of the experts
    chips = experts.count // here
    if split and "expert" in mesh_axes(x_spec[0]):  # and its neighbours in the group have other tokens
        if dispatch.choose(chips=chips, per_token=experts.per_token) == "gather":
            x, chosen, weights = (lax.all_gather(a, "expert", axis=0, tiled=True) for a in (x, chosen, weights))
            mine = _experts_here(x, chosen, weights, whole, lax.axis_index("expert") * here, mlp)
            out = summed(mine, "expert", scatter=0)
        else:
            how = Exchange("expert", chips, experts.count, dispatch.capacity, dispatch.drop, mlp, split_axes())
            out = exchanged(how, x, chosen, weights, whole)
    else:
        over = mesh_axes(
            inward[0]
        )  # where a chip would have few columns of each expert, `tensor` splits the experts too
        first = lax.axis_index(over) * here if split else None
        out = _experts_here(x, chosen, weights, whole, first, mlp)
        out = summed(out, over) if split else out
    # Each chip of a tensor group summed over its own columns of the MLP.
    return summed(out, "tensor") if "tensor" in mesh_axes(outward[1]) else out


def _specs(matrices: Matrices, inward: P, outward: P) -> tuple[P | Adapted, ...]:
    """Where matrices lie; adapters as the experts and columns that they stand beside, and whole where fsdp splits those."""

    def one(matrix: Matrix, where: P) -> P | Adapted:
        if not isinstance(matrix, Adapted):
            return where
        inputs, outputs = (tuple(axis for axis in mesh_axes(part) if axis != "fsdp") or None for part in where[1:])
        return Adapted(where, spec(where[0], inputs, None), spec(where[0], None, outputs))  # type: ignore[arg-type]

    return (*(one(matrix, inward) for matrix in matrices[:-1]), one(matrices[-1], outward))


def _gathered(matrix: Matrix, spec: P, axis: str) -> Matrix:
    stack = stack_of(matrix)
    for dim, part in enumerate(spec):
        if axis in mesh_axes(part):
            stack = lax.all_gather(stack, axis, axis=dim, tiled=True)
    return matrix._replace(w_EKN=stack) if isinstance(matrix, Adapted) else stack


def _experts_here(
    x_BSD: jax.Array,
    chosen_BSJ: jax.Array,
    weights_BSJ: jax.Array,
    matrices: Matrices,
    first: jax.Array | None,
    mlp: ExpertMlp,
) -> jax.Array:
    """What the experts first, first + 1, ... answer, zero for tokens that go elsewhere; `first` is none where all are here."""
    here, J = stack_of(matrices[0]).shape[0], chosen_BSJ.shape[-1]
    x_ND = x_BSD.reshape(-1, x_BSD.shape[-1])
    expert_M, weight_M, is_here_M = chosen_BSJ.reshape(-1), weights_BSJ.reshape(-1), None
    if first is not None:
        is_here_M = (expert_M >= first) & (expert_M < first + here)
        expert_M = jnp.where(is_here_M, expert_M - first, here)  # all others last
        weight_M = jnp.where(is_here_M, weight_M, 0.0)
    order_M = jnp.argsort(expert_M, stable=True)
    back_M = jnp.argsort(order_M)
    sizes = jnp.bincount(expert_M, length=here + 1)[:here].astype(jnp.int32)
    is_here_NJ = None if is_here_M is None else is_here_M.reshape(-1, J)
    rows_MD = picked(x_ND, order_M // J, back_M.reshape(-1, J), is_here_NJ)
    sorted_M = picked(weight_M, order_M, back_M[:, None])
    answers_MD = picked(mlp_of_groups(rows_MD, sorted_M, sizes, matrices, mlp), back_M, order_M[:, None])
    if is_here_M is not None:  # what a kernel leaves in rows past the last group is not defined
        answers_MD = jnp.where(is_here_M[:, None], answers_MD, 0)
    return answers_MD.reshape(-1, J, x_ND.shape[-1]).sum(axis=1).reshape(x_BSD.shape)
