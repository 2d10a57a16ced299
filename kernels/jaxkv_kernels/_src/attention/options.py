"""What every attention backend is told besides its arrays."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention.decode_plan import DecodePlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallOptions:
  """CallOptions of one attention call, checked, with defaults filled in.

  A logit goes through scale, soft cap and ALiBi in this order; then what the
  query does not see is left out.

  Attributes:
    page_offset: added to every page id. int32[]
    scale: factor of every logit, before the soft cap. float or float32[]
    soft_cap: c of c * tanh(logit / c), or None for no cap.
    window: keys a query sees, itself included; None for all. int or int32[]
    sinks: a logit per head with no value, or None. float32[H]
    alibi_slopes: a query at position p adds slope * (j - p) to its logit with
      the key at position j; or None. float32[H]
    k_scale: what the numbers of the K pool are to be multiplied by, a factor a
      head or a token and head (indexed like the pool, `page_offset` included);
      or None. float32[K] or float32[P, K, S]
    v_scale: the same of the V pool; None where `k_scale` is None.
    tree_mask: for multi-query calls: of the N keys at positions
      `tree_starts[b] + j` query t of row b sees only those with
      `tree_mask[b, t, j]`, later ones than itself never; keys before and after
      these N as usual. Or None. bool[B, T, N]
    tree_starts: see `tree_mask`; None where that is None. int32[B]
    plan: decode only: equal pieces of work, see `DecodePlan`; or None. A
      backend without use for it ignores it.
    value_dim: of latent attention: Dv, the first elements of a key, which are
      its value; `v_pages` is `k_pages` then. None for any other.
    interpret: what a Pallas backend hands to `pallas_call(interpret=...)`.
  """

  page_offset: jax.Array
  scale: jax.Array | float
  soft_cap: float | None = None
  window: jax.Array | int | None = None
  sinks: jax.Array | None = None
  alibi_slopes: jax.Array | None = None
  k_scale: jax.Array | None = None
  v_scale: jax.Array | None = None
  tree_mask: jax.Array | None = None
  tree_starts: jax.Array | None = None
  plan: DecodePlan | None = None
  value_dim: int | None = None
  interpret: Any = False


def checked(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  *,
  page_offset: jax.Array | int = 0,
  scale: jax.Array | float | None = None,
  sinks: jax.Array | None = None,
  alibi_slopes: jax.Array | None = None,
  **others: Any,
) -> CallOptions:
  """CallOptions from keyword arguments of a public function.

  Args:
    q: [..., H, D], already checked.
    k_pages: [P, K, S, D], likewise.
    v_pages: [P, K, S, Dv], likewise.
    page_offset: an integer scalar.
    scale: a float scalar; None for 1 / sqrt(D).
    sinks: float[H] or None.
    alibi_slopes: float[H] or None.
    **others: the other fields of `CallOptions`; masks are already checked.

  Returns:
    The options, arrays in the dtypes that `CallOptions` names.

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.
  """
  heads, dim = q.shape[-2:]
  check.scalar("page_offset", page_offset, np.integer)
  if scale is not None:
    check.scalar("scale", scale, np.floating)
  check.soft_cap(others.get("soft_cap"))
  check.window(others.get("window"))
  check.per_head("sinks", sinks, heads)
  check.per_head("alibi_slopes", alibi_slopes, heads)
  check.scales("k_scale", others.get("k_scale"), k_pages)
  check.scales("v_scale", others.get("v_scale"), v_pages)
  _check_plan(others.get("plan"), q)
  check.beside(
    "q",
    q,
    page_offset=page_offset,
    scale=scale,
    sinks=sinks,
    alibi_slopes=alibi_slopes,
    **others,
  )
  if (others.get("k_scale") is None) != (others.get("v_scale") is None):
    raise ValueError("k_scale and v_scale: give both or neither")
  for name in ("k_scale", "v_scale"):
    others[name] = _float32(others.get(name))
  return CallOptions(
    page_offset=jnp.asarray(page_offset, jnp.int32),
    scale=dim**-0.5 if scale is None else scale,
    sinks=_float32(sinks),
    alibi_slopes=_float32(alibi_slopes),
    **others,
  )


def _check_plan(plan: DecodePlan | None, q: jax.Array) -> None:
  """A plan for as many rows as q has, or None."""
  if plan is None:
    return
  if not isinstance(plan, DecodePlan):
    raise ValueError(
      f"plan is {type(plan).__name__}; it must be what plan_decode gives, or"
      " None"
    )
  items = plan.row.size
  for name in ("row", "first", "end"):
    check.vector(f"plan.{name}", getattr(plan, name), items)
  check.integers("plan.begins", plan.begins)
  if plan.begins.shape != (q.shape[0] + 1,):
    raise ValueError(
      f"plan is for {plan.begins.size - 1} rows but q has {q.shape[0]}; make it"
      " for these"
    )


def _float32(values: jax.Array | None) -> jax.Array | None:
  return None if values is None else jnp.asarray(values, jnp.float32)
