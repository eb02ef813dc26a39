"""How the pool of pages lies on the device: its arrays, their shapes and dtypes, and how a mesh splits them.

  reference  k and v (L * pages, G, page, K)
  nvidia     the same; int8 has scales (L * pages, G, page) beside each
  tpu        one array (L * pages, page, 2 G, K), keys and values in turn, K padded to the lanes of the chip

Letters as in `cache.py`, which writes and reads it.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from podway.errors import UserError
from podway.model.mesh import abstract_array

_LANES = 128  # of a TPU's vector unit: the last dimension of what its kernel reads

Backend = Literal["reference", "nvidia", "tpu"]
KvDtype = Literal["auto", "int8", "fp8"]


class Cache(NamedTuple):
    """The pool. For TPUs `k` has both and `v` is empty; scales exist for int8 only."""

    k: jax.Array
    v: jax.Array | None
    k_scale: jax.Array | None
    v_scale: jax.Array | None


class Plan(NamedTuple):
    """How a cache is laid out: fixed when programs are compiled."""

    backend: Backend
    layers: int
    pages: int  # of one layer
    page: int
    heads: int  # key/value heads
    d_head: int
    dtype: DTypeLike  # of the stored numbers
    interpret: bool = False


def default_backend() -> Backend:
    """The kernel of this machine."""
    backends: dict[str, Backend] = {"tpu": "tpu", "gpu": "nvidia"}
    return backends.get(jax.default_backend(), "reference")


def stored_dtype(kv: KvDtype, compute: DTypeLike, backend: Backend) -> DTypeLike:
    """What keys and values are stored as."""
    if kv == "int8" and backend == "tpu":
        raise UserError("the TPU kernel cannot read int8 keys and values", "use --kv fp8 or --kv auto")
    dtypes: dict[KvDtype, DTypeLike] = {"auto": compute, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
    return dtypes[kv]


def abstract(plan: Plan) -> Cache:
    """Shapes and dtypes of the pool."""
    total = plan.layers * plan.pages
    if plan.backend == "tpu":
        dims = (total, plan.page, 2 * plan.heads, lanes(plan.d_head))
        return Cache(abstract_array(dims, plan.dtype), None, None, None)
    dims = (total, plan.heads, plan.page, plan.d_head)
    scale = abstract_array(dims[:3], jnp.float32) if plan.dtype == jnp.int8 else None
    return Cache(abstract_array(dims, plan.dtype), abstract_array(dims, plan.dtype), scale, scale)


def by_head(plan: Plan, cache: Cache, place: Callable[[tuple[str | None, ...], jax.Array], Any]) -> Cache:
    """`place(logical axes, array)` of each array of the pool, in the form of the pool."""
    if plan.backend == "tpu":
        return Cache(place((None, None, "kv_heads", None), cache.k), None, None, None)
    four = (None, "kv_heads", None, None)
    others = (None if leaf is None else place(four[: leaf.ndim], leaf) for leaf in cache[1:])
    return Cache(place(four, cache.k), *others)


def token_bytes(plan: Plan) -> int:
    """Bytes that one token takes in all layers."""
    leaves = jax.tree.leaves(abstract(plan))
    return int(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)) // (plan.pages * plan.page)


def lanes(d_head: int) -> int:
    """d_head as the TPU kernel stores it."""
    return -(-d_head // _LANES) * _LANES
