"""Decoding many sequences that begin with the same pages.

Samples of one prompt share its pages. Attention over those is computed for all
samples of a group at once, their queries side by side as if they were heads of
one sequence, so that each key and value is read once a group. Attention over
the rest is each row's own, and the two are merged by their log-sum-exps
(cascade inference; Ye et al. 2024, and Juravsky et al. 2024, section 3).
"""

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels import check
from jaxkv_kernels.attention import backends
from jaxkv_kernels.attention.merge import merge_states
from jaxkv_kernels.attention.options import checked

# What sharing must save, in bytes read of K and V in one layer's call, to make
# up for the second pass and the merge: on a CPU measured with
# benchmarks/attention_cpu.py, elsewhere 10 us of a copy at 4 TB/s.
_LEAST_SAVING = {"cpu": 2**20, "other": 40 * 2**20}


class SharedPrefix(NamedTuple):
  """Which rows begin with the same pages; made by `plan_shared_prefix`.

  Attributes:
    members: rows of each group; B where there is none. int32[G, N]
    tokens: how many tokens the group shares, in whole pages; 0 where sharing
      does not pay. int32[G]
    prefix_table: the pages of the group's first row. int32[G, M]
    own_tokens: tokens of each row behind what it shares. int32[B]
    own_table: their pages. int32[B, M]
  """

  members: jax.Array
  tokens: jax.Array
  prefix_table: jax.Array
  own_tokens: jax.Array
  own_table: jax.Array


def plan_shared_prefix(
  page_table: jax.Array,
  lengths: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  *,
  num_groups: int,
  group_size: int,
  groups: jax.Array | None = None,
  backend: str = "auto",
) -> SharedPrefix | None:
  """Finds what rows share, and where it pays to read that once.

  Call it once a step and hand the result to `shared_prefix_decode` in every
  layer. A group shares the pages with which the tables of all its rows begin,
  as far as they are full without the row's last token. Rows of length 0 are in
  no group. Rows in no group, and those past `group_size` in one, are decoded
  alone: that costs time, never a wrong result. If fewer bytes would be saved
  than sharing costs, no group shares anything; and if tables of this size could
  never save enough, there is no plan: use `paged_decode`.

  Args:
    page_table: int32[B, M], page ids in sequence order.
    lengths: int32[B], tokens of each sequence, the query's own included.
    k_pages: [P, K, S, D]; looked at for its shape alone.
    v_pages: [P, K, S, Dv]; likewise.
    num_groups: G, the most groups. The work over prefixes is that of G * N
      rows, so keep G * N near B.
    group_size: N, the most rows of a group.
    groups: int32[B], a number 0..G-1 for each row, out of range for none.
      None: rows that begin with the same page are a group; those of one row
      do not count.
    backend: as the decode will be told.

  Returns:
    The plan, or None.

  Raises:
    ValueError: an argument has a shape, dtype or value that is not supported.
    NotImplementedError: there is no such backend.

  Examples:
    >>> import jax.numpy as jnp
    >>> pool = jnp.zeros((64, 8, 256, 64))
    >>> table = jnp.asarray([[3, 4, 5], [6, 9, 0], [3, 4, 7]], jnp.int32)
    >>> shared = plan_shared_prefix(
    ...   table,
    ...   jnp.asarray([700, 300, 600], jnp.int32),
    ...   pool,
    ...   pool,
    ...   num_groups=1,
    ...   group_size=2,
    ... )
    >>> shared.members.tolist(), shared.tokens.tolist()
    ([[0, 2]], [512])
    >>> shared.own_tokens.tolist()
    [188, 300, 88]
  """
  check.pool("k_pages", k_pages)
  check.pool("v_pages", v_pages)
  check.table(page_table, page_table.shape[0])
  check.vector("lengths", lengths, page_table.shape[0])
  if groups is not None:
    check.vector("groups", groups, page_table.shape[0])
  check.count("num_groups", num_groups)
  check.count("group_size", group_size)
  if backend not in backends.BACKENDS:
    raise NotImplementedError(
      f"backend={backend!r} does not exist; there are"
      f" {', '.join(backends.BACKENDS)}"
    )
  batch, columns = page_table.shape
  page_size, itemsize = k_pages.shape[2], k_pages.dtype.itemsize
  here = "cpu" if backends.platform() == "cpu" else "other"
  lockstep = backend == "xla" or here == "cpu"
  token = k_pages.shape[1] * (k_pages.shape[3] + v_pages.shape[3]) * itemsize
  least = -(-_LEAST_SAVING[here] // token)
  if lockstep:
    rows = batch - num_groups
  else:
    rows = min(batch, num_groups * group_size) - 1
  if rows * columns * page_size < least:
    return None
  return _plan(
    page_table,
    lengths,
    groups,
    num_groups=num_groups,
    group_size=group_size,
    page_size=page_size,
    least=least,
    lockstep=lockstep,
  )


@functools.partial(
  jax.jit,
  static_argnames=(
    "num_groups",
    "group_size",
    "page_size",
    "least",
    "lockstep",
  ),
  inline=True,
)
def _plan(
  page_table: jax.Array,
  lengths: jax.Array,
  groups: jax.Array | None,
  *,
  num_groups: int,
  group_size: int,
  page_size: int,
  least: int,
  lockstep: bool,
) -> SharedPrefix:
  batch, columns = page_table.shape
  if groups is None:
    groups = _by_first_page(page_table[:, 0], lengths)
  members = _members(groups, lengths, num_groups, group_size)
  tables = page_table.at[members].get(mode="fill", fill_value=0)
  present = members < batch
  prefix_table = tables[:, 0]
  same = (tables == prefix_table[:, None]) | ~present[:, :, None]
  common = jnp.cumprod(jnp.all(same, axis=1).astype(jnp.int32), axis=1)
  full = lengths.at[members].get(mode="fill", fill_value=0) - 1
  full = jnp.where(present, full // page_size, columns)
  pages = jnp.minimum(
    jnp.sum(common, axis=1, dtype=jnp.int32), jnp.min(full, axis=1)
  )
  several = jnp.sum(present, axis=1, dtype=jnp.int32) > 1
  tokens = jnp.where(several, pages * page_size, 0)
  shared = _of_rows(members, tokens, batch)
  pays = _saved(lengths, tokens, shared, lockstep) >= float(least)
  tokens = jnp.where(pays, tokens, 0)
  shared = jnp.where(pays, shared, 0)
  own = jnp.arange(columns, dtype=jnp.int32)[None]
  own = own + (shared // page_size)[:, None]
  return SharedPrefix(
    members=members,
    tokens=tokens,
    prefix_table=prefix_table,
    own_tokens=lengths - shared,
    own_table=jnp.take_along_axis(page_table, own, axis=1, mode="clip"),
  )


def _by_first_page(first: jax.Array, lengths: jax.Array) -> jax.Array:
  """Numbers for the rows int32[B] of which another has the same first page."""
  batch = first.shape[0]
  alive = lengths > 0
  order = jnp.lexsort((first, ~alive)).astype(jnp.int32)
  page = first[order]
  begins = jnp.concatenate([jnp.ones((1,), bool), page[1:] != page[:-1]])
  begins = begins & alive[order]
  run = jnp.cumsum(begins.astype(jnp.int32)) - 1
  run = jnp.where(alive[order], run, batch)
  size = jnp.zeros((batch,), jnp.int32).at[run].add(1, mode="drop")
  number = jnp.cumsum((size > 1).astype(jnp.int32)) - 1
  number = jnp.where(size > 1, number, batch)
  number = number.at[run].get(mode="fill", fill_value=batch)
  return jnp.zeros((batch,), jnp.int32).at[order].set(number)


def _members(
  groups: jax.Array, lengths: jax.Array, num_groups: int, group_size: int
) -> jax.Array:
  """Rows of each group, ascending, B for none: int32[G, N]."""
  batch = groups.shape[0]
  fits = (groups >= 0) & (groups < num_groups) & (lengths > 0)
  group = jnp.where(fits, groups, num_groups)
  order = jnp.argsort(group, stable=True).astype(jnp.int32)
  group = group[order]
  begin = jnp.searchsorted(group, group, side="left").astype(jnp.int32)
  place = jnp.arange(batch, dtype=jnp.int32) - begin
  members = jnp.full((num_groups, group_size), batch, jnp.int32)
  return members.at[group, place].set(order, mode="drop")


def _of_rows(members: jax.Array, values: jax.Array, batch: int) -> jax.Array:
  """Each row's group's value, 0 for rows in none: int32[B]."""
  spread = jnp.broadcast_to(values[:, None], members.shape)
  rows = jnp.zeros((batch,), jnp.int32)
  return rows.at[members].set(spread, mode="drop")


def _saved(
  lengths: jax.Array, tokens: jax.Array, shared: jax.Array, lockstep: bool
) -> jax.Array:
  """Tokens of K and V that need not be read, float32[], as it may be many.

  In lockstep all rows read as many blocks as the longest needs.
  """
  lengths, tokens, shared = (
    x.astype(jnp.float32) for x in (lengths, tokens, shared)
  )
  if not lockstep:
    return jnp.sum(shared) - jnp.sum(tokens)
  alone = lengths.shape[0] * (jnp.max(lengths) - jnp.max(lengths - shared))
  return alone - tokens.shape[0] * jnp.max(tokens)


def shared_prefix_decode(
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
  of a prefix. The result differs from `paged_decode`'s in rounding.

  Args:
    q: [B, H, D], float32, bfloat16 or float16.
    k_pages: [P, K, S, D], as for `paged_decode`.
    v_pages: [P, K, S, Dv], same dtype.
    shared: of `plan_shared_prefix`, from tables and lengths of the B rows.
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
  check.table(shared.own_table, q.shape[0])
  check.vector("shared.own_tokens", shared.own_tokens, q.shape[0])
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
  chosen = backends.choose("paged_decode", backend, q, *pools, options)
  own = backends.decode(
    chosen, q, *pools, shared.own_table, shared.own_tokens, options
  )

  def with_prefix(own):
    prefix = _prefix_states(q, *pools, shared, options, backend)
    parts = zip(own, prefix, strict=True)
    return merge_states(*(jnp.stack(part) for part in parts))

  if backends.platform() == "cpu":
    # Elsewhere a branch costs more than a pass over no tokens and a merge.
    out, lse = lax.cond(
      jnp.any(shared.tokens > 0), with_prefix, lambda own: own, own
    )
  else:
    out, lse = with_prefix(own)
  out = out.astype(q.dtype)
  return (out, lse) if return_lse else out


def _prefix_states(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  shared: SharedPrefix,
  options: Any,
  backend: str,
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
  chosen = backends.choose(
    "paged_decode", backend, queries, k_pages, v_pages, options
  )
  out, lse = backends.decode(
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
