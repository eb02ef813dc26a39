"""The embedding lookup on a mesh, written out so that neither the table nor its gradient is ever whole on a chip.

Letters: B batch, S length, D d_model, V vocab.

A chip holds the columns of some channels (fsdp splits D) and the rows of some tokens (tensor splits V), and has its own
sequences. It looks its columns up for the tokens of all its fsdp neighbours, an all-to-all turns (all sequences, some
channels) into (own sequences, all channels), and a sum over tensor adds the one chip that had the row. Backward, each
chip adds into its own piece of the table: the bytes moved are those of activations, not those of the table.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from podway.model.layout import Rules
from podway.model.mesh import context_mesh, context_spec, mesh_axes, per_chip, summed


def look_up(table_VD: jax.Array, tokens_BS: jax.Array, rules: Rules) -> jax.Array:
    """Row `token` of the table for each token: (B, S, D)."""
    if context_mesh().chips == 1:
        return table_VD[tokens_BS]
    table = context_spec(("vocab", "embed"), table_VD.shape, rules)
    tokens = context_spec(("batch", "length"), tokens_BS.shape, rules)
    out = context_spec(("batch", "length", "act_embed"), (*tokens_BS.shape, table_VD.shape[1]), rules)
    run = per_chip(partial(_on_chip, table=table, out=out), in_specs=(table, tokens), out_specs=out)
    found: jax.Array = run(table_VD, tokens_BS)
    return found


def _on_chip(rows: jax.Array, tokens: jax.Array, *, table: PartitionSpec, out: PartitionSpec) -> jax.Array:
    by_vocab, by_channel = mesh_axes(table[0]), mesh_axes(table[1])
    shared = tuple(axis for axis in by_channel if axis in mesh_axes(out[0]))  # neighbours with other sequences
    for axis in reversed(shared):
        tokens = lax.all_gather(tokens, axis, axis=0, tiled=True)
    if by_vocab:
        local = tokens - lax.axis_index(by_vocab) * rows.shape[0]
        mine = (local >= 0) & (local < rows.shape[0])
        x = jnp.where(mine[..., None], rows[jnp.where(mine, local, 0)], 0)
    else:
        x = rows[tokens]
    for axis in by_channel:
        if axis in shared:
            x = lax.all_to_all(x, axis, split_axis=0, concat_axis=2, tiled=True)  # type: ignore[no-untyped-call]
        else:
            x = lax.all_gather(x, axis, axis=2, tiled=True)
    return _leave(x, by_vocab, mesh_axes(out[2]))


def _leave(x: jax.Array, by_vocab: tuple[str, ...], by_channel: tuple[str, ...]) -> jax.Array:
    """Add up what the owners of the rows found, and keep the channels that this chip has in the residual stream."""
    for axis in by_vocab:
        x = summed(x, axis, scatter=2) if axis in by_channel else summed(x, axis)
    for axis in by_channel:
        if axis not in by_vocab:
            width = x.shape[2] // lax.axis_size(axis)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * width, width, axis=2)
    return x
