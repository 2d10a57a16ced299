"""Decoding many sequences that begin with the same pages: the decode.

Samples of one prompt share its pages. Attention over those is computed for all
samples of a group at once, their queries side by side as if they were heads of
one sequence, so that each key and value is read once a group. Attention over
the rest is each row's own, and the two are merged by their log-sum-exps
(cascade inference; Ye et al. 2024, and Juravsky et al. 2024, section 3).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention import choose
from jaxkv_kernels._src.attention.merge import merge_states
from jaxkv_kernels._src.attention.options import CallOptions
from jaxkv_kernels._src.attention.options import checked
from jaxkv_kernels._src.attention.shared_prefix import SharedPrefix


def cascade_decode(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  shared: SharedPrefix,
  *,
  page_offset: jax.Array | int = 0,
  scale: jax.Array | float | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
  alibi_slopes: jax.Array | None = None,
  k_scale: jax.Array | None = None,
  v_scale: jax.Array | None = None,
  return_lse: bool = False,
  backend: str = "auto",
  interpret: Any = False,
) -> Any:
  """What `paged_decode` gives, with prefixes that rows share read once.

  There is no window: behind one, rows of different length see different parts
  of a prefix. The result differs from `paged_decode`'s in rounding. Where a
  backend does not serve the query heads of a whole group at once, a prefix is
  read once for each of as few equal parts of the group as it does serve.

  Args:
    q: [B, H, D], float32, bfloat16 or float16.
    k_pages: [P, K, S, D], as for `paged_decode`.
    v_pages: [P, K, S, Dv], same dtype.
    shared: of `plan_shared_prefix`, from the tables and lengths that the B
      rows have in this call; for others first see `SharedPrefix.fitted`.
    page_offset: as for `paged_decode`, like all that follow.
    scale: factor of the logits; 1 / sqrt(D) if None.
    soft_cap: c > 0 turns a logit x into c * tanh(x / c).
    sinks: float[H], one logit per head without a value.
    alibi_slopes: float[H].
    k_scale: float32[K] or float32[P, K, S].
    v_scale: float32[K] or float32[P, K, S].
    return_lse: also return the log-sum-exp (natural log, sink included).
    backend: "auto", or the name of one.
    interpret: as for `paged_decode`.

  Returns:
    [B, H, Dv] in q's dtype, and float32[B, H] with `return_lse`.

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.
    NotImplementedError: there is no such backend, or it does not serve.
  """
  check.queries("q", q, "BHD")
  check.pools(q, k_pages, v_pages)
  _check_shared(q, shared)
  options = checked(
    q,
    k_pages,
    v_pages,
    page_offset=page_offset,
    scale=scale,
    soft_cap=soft_cap,
    sinks=sinks,
    alibi_slopes=alibi_slopes,
    k_scale=k_scale,
    v_scale=v_scale,
    interpret=interpret,
  )
  pools = (k_pages, v_pages)
  chosen = choose.choose_backend("paged_decode", backend, q, *pools, options)
  own = choose.decode(
    chosen, q, *pools, shared.own_table, shared.own_tokens, options
  )

  def with_prefix(own):
    here = choose.target(backend, q, k_pages)
    parts = _parts(q, *pools, shared, options, chosen, here)
    prefix = _prefix_states(q, *pools, parts, options, chosen)
    parts = zip(own, prefix, strict=True)
    return merge_states(*(jnp.stack(part) for part in parts))

  if choose.platform(q, k_pages) == "cpu":
    # Elsewhere a branch costs more than a pass over no tokens and a merge.
    out, lse = lax.cond(
      jnp.any(shared.tokens > 0), with_prefix, lambda own: own, own
    )
  else:
    out, lse = with_prefix(own)
  out = out.astype(q.dtype)
  return (out, lse) if return_lse else out


def _check_shared(q: jax.Array, shared: SharedPrefix | None) -> None:
  """A plan for as many rows as q has."""
  if not isinstance(shared, SharedPrefix):
    raise ValueError(
      f"shared is {type(shared).__name__}; it must be a SharedPrefix; where"
      " plan_shared_prefix gives None, use paged_decode"
    )
  check.table(shared.own_table, q.shape[0], name="shared.own_table")
  check.vector("shared.own_tokens", shared.own_tokens, q.shape[0])
  fields = shared._asdict().items()
  check.beside("q", q, **{f"shared.{name}": value for name, value in fields})


def _parts(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  shared: SharedPrefix,
  options: CallOptions,
  chosen: choose.Backend,
  here: str,
) -> SharedPrefix:
  """Groups no larger than the backend serves: at least one row, as q has."""
  groups, size = shared.members.shape
  batch, heads, dim = q.shape

  def served(rows):
    side_by_side = (-(-size // rows) * groups, rows * heads, dim)
    queries: Any = jax.ShapeDtypeStruct(side_by_side, q.dtype)
    reason = chosen.unsupported(here, queries, k_pages, v_pages, options)
    return reason is None

  rows = size
  while rows > 1 and not served(rows):
    rows = -(-rows // 2)
  parts = -(-size // rows)
  if parts == 1:
    return shared
  spare = ((0, 0), (0, parts * rows - size))
  members = jnp.pad(shared.members, spare, constant_values=batch)
  members = members.reshape(groups * parts, rows)
  some = jnp.any(members < batch, axis=1)
  return shared._replace(
    members=members,
    tokens=jnp.where(some, jnp.repeat(shared.tokens, parts), 0),
    prefix_table=jnp.repeat(shared.prefix_table, parts, axis=0),
  )


def _prefix_states(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  shared: SharedPrefix,
  options: CallOptions,
  chosen: choose.Backend,
) -> tuple[jax.Array, jax.Array]:
  """Attention over what rows share: float32[B, H, Dv], float32[B, H]."""
  batch, heads, dim = q.shape
  kv_heads = k_pages.shape[1]
  groups, size = shared.members.shape
  apart = (groups, size, kv_heads, heads // kv_heads)
  together = (groups, size * heads)

  def side_by_side(rows):
    """[G, N, K, H / K, ...] as [G, K * N * H / K, ...]."""
    return rows.swapaxes(1, 2).reshape(*together, *rows.shape[4:])

  def to_rows(states, empty):
    """[G, K * N * H / K, ...] as [B, H, ...], `empty` for rows in no group."""
    rest = states.shape[2:]
    states = states.reshape(groups, kv_heads, size, -1, *rest).swapaxes(1, 2)
    rows = jnp.full((batch, heads, *rest), empty, jnp.float32)
    states = states.reshape(groups, size, heads, *rest)
    return rows.at[shared.members].set(states, mode="drop")

  slopes = own_slopes = options.alibi_slopes
  if slopes is not None:
    slopes = jnp.tile(slopes.reshape(kv_heads, 1, -1), (1, size, 1)).ravel()
  options = dataclasses.replace(options, sinks=None, alibi_slopes=slopes)
  members = q.at[shared.members].get(mode="fill", fill_value=0)
  queries = side_by_side(members.reshape(*apart, dim))
  out, lse = choose.decode(
    chosen,
    queries,
    k_pages,
    v_pages,
    shared.prefix_table,
    shared.tokens,
    options,
  )
  out, lse = to_rows(out, 0), to_rows(lse, -jnp.inf)
  if own_slopes is not None:
    # Computed as if the queries stood at the prefix's end.
    away = shared.own_tokens.astype(jnp.float32)[:, None]
    lse = lse - own_slopes[None] * away
  return out, lse
