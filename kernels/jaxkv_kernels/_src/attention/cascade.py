"""Decoding rows that begin with the same pages; those pages are read once.

Samples of one prompt share its pages. Attention over shared pages is computed
for all rows of a cluster at once: their queries are treated as heads of one
sequence, so each key and value is read once for a cluster. Attention over the
remaining pages is computed for each row. The two are merged by their
log-sum-exps (cascade inference; Ye et al. 2024, and Juravsky et al. 2024,
section 3). `shared_prefix` finds the clusters.
"""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention import calls
from jaxkv_kernels._src.attention import choose
from jaxkv_kernels._src.attention.merge import merge_states
from jaxkv_kernels._src.attention.options import AttentionCall
from jaxkv_kernels._src.attention.options import AttentionOptions
from jaxkv_kernels._src.attention.options import check_options
from jaxkv_kernels._src.attention.options import given
from jaxkv_kernels._src.attention.shared_prefix import SharedPrefix


def cascade_decode(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  shared: SharedPrefix,
  *,
  options: AttentionOptions | None = None,
  page_offset: jax.Array | int = 0,
  backend: str = "auto",
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """`paged_decode`, except that pages shared by rows are read once.

  The result differs from that of `paged_decode` in rounding only. A window is
  not supported: rows of different lengths would see different parts of a
  prefix. If the backend does not serve the query heads of a whole cluster at
  once, the cluster is halved until it does, and a prefix is read once for each
  part.

  Args:
    q: [B, H, D], float32, bfloat16 or float16.
    k_pages: [N, K, S, D], as for `paged_decode`.
    v_pages: [N, K, S, Dv], same dtype.
    shared: from `plan_shared_prefix`, for the tables and lengths that the B
      rows have in this call; if they may have changed, first call
      `SharedPrefix.refreshed`.
    options: all but `window` and `tree_mask`.
    page_offset: as for `paged_decode`.
    backend: "auto", or one of `BACKENDS`.
    interpret: as for `paged_decode`.

  Returns:
    [B, H, Dv] in q's dtype, and float32[B, H], their log-sum-exps.

  Raises:
    TypeError: an argument has a type or dtype that is not supported.
    ValueError: an argument has a shape or value that is not supported.
    NotImplementedError: the backend does not exist, or does not serve the call.
  """
  check.queries("q", q, "BHD")
  check.pools(q, k_pages, v_pages)
  _check_shared(q, shared)
  given(options).refuse("use paged_decode instead", "window", "tree_mask")
  checked = check_options(
    options, q, k_pages, v_pages, page_offset=page_offset, interpret=interpret
  )
  call = calls.decode_call(
    q, (k_pages, v_pages), shared.own_table, shared.own_tokens, checked
  )
  chosen = choose.choose_backend("paged_decode", backend, call)
  own = calls.decode_with(chosen, call)

  def with_prefix(own):
    here = choose.target(backend, q, k_pages)
    parts = _parts(shared, call, chosen, here)
    prefix = _prefix_states(parts, call, chosen)
    pairs = zip(own, prefix, strict=True)
    return merge_states(*(jnp.stack(pair) for pair in pairs))

  if choose.platform(q, k_pages) == "cpu":
    # On other platforms a branch costs more than an empty pass and a merge.
    out, lse = lax.cond(
      jnp.any(shared.tokens > 0), with_prefix, lambda own: own, own
    )
  else:
    out, lse = with_prefix(own)
  return out.astype(q.dtype), lse


def _check_shared(q: jax.Array, shared: SharedPrefix) -> None:
  """A SharedPrefix for the rows of q."""
  if not isinstance(shared, SharedPrefix):
    raise TypeError(
      f"`shared` must be a SharedPrefix, got {type(shared).__name__}; if"
      " plan_shared_prefix returns None, use paged_decode."
    )
  check.table(shared.own_table, q.shape[0], name="shared.own_table")
  check.vector("shared.own_tokens", shared.own_tokens, q.shape[0])
  fields = shared._asdict().items()
  check.beside("q", q, **{f"shared.{name}": value for name, value in fields})


def _parts(
  shared: SharedPrefix, call: AttentionCall, chosen: choose.Backend, here: str
) -> SharedPrefix:
  """Clusters cut into equal parts that the backend serves, by halving.

  The backend serves a part of one row, which has as many query heads as q.
  """
  clusters, size = shared.members.shape
  batch, heads, dim = call.q.shape

  def served(rows):
    side_by_side = (-(-size // rows) * clusters, rows * heads, dim)
    queries: Any = jax.ShapeDtypeStruct(side_by_side, call.q.dtype)
    whole = dataclasses.replace(call, q=queries)
    return chosen.unsupported(here, whole) is None

  rows = size
  while rows > 1 and not served(rows):
    rows = -(-rows // 2)
  parts = -(-size // rows)
  if parts == 1:
    return shared
  spare = ((0, 0), (0, parts * rows - size))
  members = jnp.pad(shared.members, spare, constant_values=batch)
  members = members.reshape(clusters * parts, rows)
  some = jnp.any(members < batch, axis=1)
  return shared._replace(
    members=members,
    tokens=jnp.where(some, jnp.repeat(shared.tokens, parts), 0),
    prefix_table=jnp.repeat(shared.prefix_table, parts, axis=0),
  )


def _prefix_states(
  shared: SharedPrefix, call: AttentionCall, chosen: choose.Backend
) -> tuple[jax.Array, jax.Array]:
  """Attention over shared pages: float32[B, H, Dv], float32[B, H].

  The heads of a cluster's call are ordered K/V head first, then row, then query
  head of the K/V head, so that the backend's own rule (query head h reads K/V
  head h // (H // K)) holds for them.
  """
  batch, heads, dim = call.q.shape
  kv_heads = call.k_pages.shape[1]
  clusters, size = shared.members.shape

  def side_by_side(rows):
    """[clusters, size, H, ...] as [clusters, size * H, ...]."""
    rest = rows.shape[3:]
    rows = rows.reshape(clusters, size, kv_heads, -1, *rest).swapaxes(1, 2)
    return rows.reshape(clusters, size * heads, *rest)

  def to_rows(states, empty):
    """[clusters, size * H, ...] as [B, H, ...], `empty` outside clusters."""
    chex.assert_equal_shape_prefix([states, queries], 2)
    rest = states.shape[2:]
    states = states.reshape(clusters, kv_heads, size, -1, *rest).swapaxes(1, 2)
    states = states.reshape(clusters, size, heads, *rest)
    rows = jnp.full((batch, heads, *rest), empty, jnp.float32)
    return rows.at[shared.members].set(states, mode="drop")

  slopes = own_slopes = call.options.alibi_slopes
  if slopes is not None:
    slopes = jnp.tile(slopes.reshape(kv_heads, 1, -1), (1, size, 1)).ravel()
  options = dataclasses.replace(call.options, sinks=None, alibi_slopes=slopes)
  queries = side_by_side(
    call.q.at[shared.members].get(mode="fill", fill_value=0)
  )
  chex.assert_shape(queries, (clusters, size * heads, dim))
  pools = (call.k_pages, call.v_pages)
  prefixes = calls.decode_call(
    queries, pools, shared.prefix_table, shared.tokens, options
  )
  out, lse = calls.decode_with(chosen, prefixes)
  out, lse = to_rows(out, 0), to_rows(lse, -jnp.inf)
  if own_slopes is not None:
    # ALiBi was computed as if the queries were at the end of the prefix.
    away = shared.own_tokens.astype(jnp.float32)[:, None]
    lse = lse - own_slopes[None] * away
  return out, lse
