"""Decodes rows that begin with the same pages, and reads those pages once.

Samples of one prompt share its pages. A cluster is a set of rows that begin
with the same pages; `shared_prefix` finds the clusters. One pass computes
attention over the shared pages for all rows of a cluster. This pass treats the
rows' queries as heads of one sequence, and reads each key and value once.
Another pass computes attention over the remaining pages of each row. The two
results are merged, weighted by their log-sum-exps (cascade inference; Ye et al.
2024, and Juravsky et al. 2024, section 3). The docstring of the package
`attention` defines the letters.
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
from jaxkv_kernels._src.attention.options import as_options
from jaxkv_kernels._src.attention.options import check_options
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
  """Computes the same as `paged_decode`, but reads each shared page only once.

  Results differ from those of `paged_decode` in rounding only. A cluster can
  have more query heads than the backend supports in one sequence. Then all
  clusters are halved until the heads fit, and each part reads the prefix once.

  Args:
    q: [B, H, D], float32, bfloat16 or float16.
    k_pages: [N, K, S, D], as for `paged_decode`.
    v_pages: [N, K, S, Dv], same dtype.
    shared: from `plan_shared_prefix`, for the current page table and lengths of
      the B rows. After a change of either, first call `SharedPrefix.refreshed`.
    options: `tree_mask` and `window` must be None. With a window, rows of
      different lengths would see different parts of a prefix.
    page_offset: as for `paged_decode`.
    backend: one of `BACKENDS`.
    interpret: as for `paged_decode`.

  Returns:
    [B, H, Dv] in q's dtype, and float32[B, H], log-sum-exps.
  """
  check.queries("q", q, "BHD")
  check.pools(q, k_pages, v_pages)
  _check_shared(q, shared)
  as_options(options).refuse("use paged_decode instead", "window", "tree_mask")
  call_options = check_options(
    options, q, k_pages, v_pages, page_offset=page_offset, interpret=interpret
  )
  call = calls.decode_call(
    q, (k_pages, v_pages), shared.own_table, shared.own_tokens, call_options
  )
  module = choose.choose_backend("paged_decode", backend, call)
  suffix = calls.decode_with(module, call)

  def merge_prefix(suffix):
    parts = _parts(shared, call, module, choose.target(backend, q, k_pages))
    pairs = zip(suffix, _prefix_states(parts, call, module), strict=True)
    return merge_states(*(jnp.stack(pair) for pair in pairs))

  # On a CPU, a branch costs less than an empty pass and a merge. On other
  # platforms it costs more.
  if choose.platform(q, k_pages) == "cpu":
    out, lse = lax.cond(
      jnp.any(shared.tokens > 0), merge_prefix, lambda suffix: suffix, suffix
    )
  else:
    out, lse = merge_prefix(suffix)
  return out.astype(q.dtype), lse


def _check_shared(q: jax.Array, shared: SharedPrefix) -> None:
  """Raises unless `shared` is a SharedPrefix for the rows of q."""
  if not isinstance(shared, SharedPrefix):
    raise TypeError(
      f"`shared` must be a SharedPrefix, got {type(shared).__name__}; if"
      " plan_shared_prefix returns None, use paged_decode."
    )
  check.table(shared.own_table, q.shape[0], name="shared.own_table")
  check.vector("shared.own_tokens", shared.own_tokens, q.shape[0])
  fields = shared._asdict().items()
  check.same_devices(
    "q", q, **{f"shared.{name}": value for name, value in fields}
  )


def _parts(
  shared: SharedPrefix,
  call: AttentionCall,
  module: choose.Backend,
  platform: str,
) -> SharedPrefix:
  """Halves all clusters until the backend supports their query heads."""
  clusters, cluster_size = shared.members.shape
  batch, heads, dim = call.q.shape

  def is_served(rows):
    shape = (-(-cluster_size // rows) * clusters, rows * heads, dim)
    queries: Any = jax.ShapeDtypeStruct(shape, call.q.dtype)
    prefix_call = dataclasses.replace(call, q=queries)
    return module.unsupported(platform, prefix_call) is None

  rows = cluster_size
  # One row needs no test, because `choose_backend` accepted the H heads of q.
  while rows > 1 and not is_served(rows):
    rows = -(-rows // 2)
  parts = -(-cluster_size // rows)
  if parts == 1:
    return shared
  padding = ((0, 0), (0, parts * rows - cluster_size))
  members = jnp.pad(shared.members, padding, constant_values=batch)
  members = members.reshape(clusters * parts, rows)
  # A part without rows gets 0 tokens, so that it does not read the prefix.
  has_rows = jnp.any(members < batch, axis=1)
  return shared._replace(
    members=members,
    tokens=jnp.where(has_rows, jnp.repeat(shared.tokens, parts), 0),
    prefix_table=jnp.repeat(shared.prefix_table, parts, axis=0),
  )


def _prefix_states(
  shared: SharedPrefix, call: AttentionCall, module: choose.Backend
) -> tuple[jax.Array, jax.Array]:
  """Computes attention over shared pages: float32[B, H, Dv], float32[B, H]."""
  batch, heads, dim = call.q.shape
  kv_heads = call.k_pages.shape[1]
  clusters, cluster_size = shared.members.shape

  def to_heads(rows):
    """Returns [clusters, size, H, ...] as [clusters, size * H, ...]."""
    # The merged axis is ordered by K/V head, then by row, because a backend
    # maps index h of this axis to K/V head h // (size * H // K).
    shape = rows.shape[3:]
    rows = rows.reshape(clusters, cluster_size, kv_heads, -1, *shape).swapaxes(
      1, 2
    )
    return rows.reshape(clusters, cluster_size * heads, *shape)

  def to_rows(states, fill_value):
    """Returns [clusters, size * H, ...] as [B, H, ...]."""
    chex.assert_equal_shape_prefix([states, queries], 2)
    shape = states.shape[2:]
    states = states.reshape(
      clusters, kv_heads, cluster_size, -1, *shape
    ).swapaxes(1, 2)
    states = states.reshape(clusters, cluster_size, heads, *shape)
    rows = jnp.full((batch, heads, *shape), fill_value, jnp.float32)
    return rows.at[shared.members].set(states, mode="drop")

  slopes = row_slopes = call.options.alibi_slopes
  if slopes is not None:
    slopes = jnp.tile(
      slopes.reshape(kv_heads, 1, -1), (1, cluster_size, 1)
    ).ravel()
  # Sinks must count once. The pass over each row's remaining pages adds them.
  options = dataclasses.replace(call.options, sinks=None, alibi_slopes=slopes)
  rows = jnp.take(call.q, shared.members, axis=0, mode="fill", fill_value=0)
  queries = to_heads(rows)
  chex.assert_shape(queries, (clusters, cluster_size * heads, dim))
  pools = (call.k_pages, call.v_pages)
  prefixes = calls.decode_call(
    queries, pools, shared.prefix_table, shared.tokens, options
  )
  out, lse = calls.decode_with(module, prefixes)
  out = to_rows(out, 0)
  lse = to_rows(lse, -jnp.inf)
  if row_slopes is not None:
    # The pass computed ALiBi as if all queries were at the end of the prefix.
    # The real position of a query is `own_tokens` later, which changes all its
    # logits over the prefix by the same number. So only `lse` changes.
    distance = shared.own_tokens.astype(jnp.float32)[:, None]
    lse = lse - row_slopes[None] * distance
  return out, lse
