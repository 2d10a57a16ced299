"""Paged attention as plain XLA: a loop over blocks of tokens.

All sequences advance in lockstep over blocks of a fixed number of tokens, with
the online softmax of FlashAttention (Dao et al. 2022, algorithm 1) in float32.
The backend runs on any device that XLA supports.

Unused memory may contain NaN (see `api`). The logits of unused keys are masked
after the product with queries. Values that no query of the sequence sees become
zeros before the product with weights.

By default all T columns are computed together. With `query_tile`, fixed-size
tiles make results independent of T. Arrays then have a leading axis of tiles,
and all tiles share each block that the loop gathers. The docstring of the
package `attention` defines the letters.
"""

import functools
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels._src.attention import query_tiles
from jaxkv_kernels._src.attention.online_softmax import LOWEST
from jaxkv_kernels._src.attention.options import AttentionCall
from jaxkv_kernels._src.attention.options import CallOptions
from jaxkv_kernels._src.quantization import load

# Tokens per block, if the page size divides this number. All such page sizes
# give the same results. In benchmarks, 64 was within 5 % of the best number for
# every shape, because a block of keys stays in a core's cache.
BLOCK_TOKENS = 64

TAKES_QUERY_TILES = True


class _Carry(NamedTuple):
  """Online softmax of the Y query rows of each K/V head.

  Attributes:
    m: the largest logit of each row so far.
    l: sum of exp(logit - m).
    weighted: sum of exp(logit - m) * value.
  """

  m: jax.Array  # float32[B, K, Y]
  l: jax.Array  # float32[B, K, Y]
  weighted: jax.Array  # float32[B, K, Y, Dv]


class _Block(NamedTuple):
  """One block of A tokens of every sequence.

  Attributes:
    positions: positions of the tokens, which are the same in all sequences.
    keys: keys, not yet multiplied by `k_scale`.
    values: values, not yet multiplied by `v_scale`; zeros for tokens that no
      query sees.
    k_scale: factors of the keys, or None.
    v_scale: factors of the values, or None.
  """

  positions: jax.Array  # int32[A]
  keys: jax.Array  # float32[B, K, A, D]
  values: jax.Array  # float32[B, K, A, Dv]
  k_scale: jax.Array | None  # float32[B, K, A]
  v_scale: jax.Array | None  # float32[B, K, A]


class _Columns(NamedTuple):
  """T queries of each sequence.

  Attributes:
    scaled: queries times the scale; Y is T * H / K.
    positions: positions of the queries.
    mask: True for the tokens of the current block that a query sees.
  """

  scaled: jax.Array  # float32[B, K, Y, D]
  positions: jax.Array  # int32[B, T]
  mask: jax.Array  # bool[B, T, A]


class _Attended(NamedTuple):
  """The outputs of queries, and their log-sum-exps."""

  out: jax.Array  # float32[B, T, H, Dv]
  lse: jax.Array  # float32[B, T, H]


def attend(call: AttentionCall) -> tuple[jax.Array, jax.Array]:
  """Computes attention of a rectangle; see `choose.Backend`.

  With a `query_tile`, T must be a multiple of it, and at least twice as large.
  """
  options = call.options
  page_table = call.page_table
  batch, columns, heads, dim = call.q.shape
  total_pages, kv_heads, page_size = call.k_pages.shape[:3]
  pages_per_block = max(1, BLOCK_TOKENS // page_size)
  block = pages_per_block * page_size
  reach = query_tiles.reach(call)
  first_block, end_block = _blocks(reach, block)
  padding = -page_table.shape[1] % pages_per_block
  table = jnp.pad(page_table, ((0, 0), (0, padding)))
  apply = _apply_once
  split = _identity
  join = _identity
  if call.query_tile is not None:
    tiles = (jnp.max(call.counts) + call.query_tile - 1) // call.query_tile
    apply = functools.partial(_apply_by_tile, tiles)
    split = functools.partial(_split, call.query_tile)
    join = _join
  # float32[B, K, Y, D]: the query rows that share a K/V head.
  queries = call.q.astype(jnp.float32) * jnp.asarray(options.scale, jnp.float32)
  queries = queries.reshape(batch, columns, kv_heads, heads // kv_heads, dim)
  queries = split(queries).swapaxes(-4, -3)
  queries = queries.reshape(*queries.shape[:-3], -1, dim)
  chex.assert_shape(queries, (..., batch, kv_heads, None, dim))
  positions = split(reach.position)

  def step(index: jax.Array, carry: _Carry) -> _Carry:
    ids = lax.dynamic_slice_in_dim(
      table, index * pages_per_block, pages_per_block, axis=1
    )
    # The gather must get ids in range, but unused entries may be any number.
    ids = jnp.clip(ids + options.page_offset, 0, total_pages - 1)
    key_positions = index * block + jnp.arange(block, dtype=jnp.int32)
    mask = _mask(key_positions, reach, options)  # bool[B, T, A]
    tokens = _gather(call, ids, key_positions, jnp.any(mask, axis=1))
    absorb = functools.partial(_absorb, tokens, options)
    return apply(absorb, _Columns(queries, positions, split(mask)), carry)

  inputs = (
    queries,
    (call.k_pages, call.v_pages),
    page_table,
    reach,
    _arrays(options),
  )
  carry = _init_carry(queries.shape[:-1], call.value_dim, inputs)
  carry = lax.fori_loop(first_block, end_block, step, carry)
  is_query = split(call.is_query)
  # Tiles without queries are not computed, and keep these values.
  init = _Attended(
    out=jnp.zeros_like(carry.l, shape=(*is_query.shape, heads, call.value_dim)),
    lse=jnp.zeros_like(carry.l, shape=(*is_query.shape, heads)) - jnp.inf,
  )
  finish = functools.partial(_finish, options.sinks)
  out, lse = apply(finish, (carry, is_query), init)
  return join(out), join(lse)


def unsupported(platform: str, call: AttentionCall) -> str | None:
  """Returns None: this backend supports every call on every platform."""
  del platform, call
  return None


def _identity(x: jax.Array) -> jax.Array:
  return x


def _split(tile: int, x: jax.Array) -> jax.Array:
  """Returns [B, X * tile, ...] as [X, B, tile, ...]."""
  return x.reshape(x.shape[0], -1, tile, *x.shape[2:]).swapaxes(0, 1)


def _join(x: jax.Array) -> jax.Array:
  """Returns [X, B, tile, ...] as [B, X * tile, ...]."""
  x = x.swapaxes(0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])


def _apply_once(function: Callable[..., Any], rows: Any, out: Any) -> Any:
  """Applies `function(rows, out)` to all columns."""
  return function(rows, out)


def _apply_by_tile(
  num_tiles: jax.Array, function: Callable[..., Any], rows: Any, out: Any
) -> Any:
  """Applies `function(rows, out)` to the first tiles, one at a time.

  Args:
    num_tiles: int32[], the number of tiles to compute. It must not be a
      constant, or XLA might unroll the loop.
    function: takes the rows and the output of a tile; returns its new output.
    rows: a tree with leaves [X, ...] for X tiles. X is at least 2, because for
      one tile XLA would hoist parts of the loop's body.
    out: a tree with leaves [X, ...].
  """

  def body(index: jax.Array, out: Any) -> Any:
    tile = jax.tree.map(
      lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), (rows, out)
    )
    return jax.tree.map(
      lambda x, new: lax.dynamic_update_index_in_dim(x, new, index, 0),
      out,
      function(*tile),
    )

  # One compiled body serves any number of tiles, so results do not depend on
  # that number.
  return lax.fori_loop(jnp.zeros_like(num_tiles), num_tiles, body, out)


def _arrays(options: CallOptions) -> tuple[jax.Array | None, ...]:
  """Returns the option arrays that the loop reads."""
  return (
    options.page_offset,
    options.alibi_slopes,
    options.k_scale,
    options.v_scale,
    options.tree_mask,
    options.tree_starts,
  )


def _init_carry(shape: tuple[int, ...], value_dim: int, inputs) -> _Carry:
  """Returns the carry before the first block, for rows [..., B, K, Y]."""
  # The initial carry of a loop must vary over the same mesh axes as later ones.
  zero = query_tiles.zero(inputs)
  return _Carry(
    m=jnp.full(shape, LOWEST, jnp.float32) + zero,
    l=jnp.zeros(shape, jnp.float32) + zero,
    weighted=jnp.zeros((*shape, value_dim), jnp.float32) + zero,
  )


def _blocks(
  reach: query_tiles.Reach, block: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the first block that any query sees, and one past the last."""
  end_key = jnp.max(reach.end)
  first_key = jnp.min(jnp.where(reach.end > 0, reach.first, end_key))
  return first_key // block, (end_key + block - 1) // block


def _gather(
  call: AttentionCall, ids: jax.Array, positions: jax.Array, is_used: jax.Array
) -> _Block:
  """Gathers pages `ids` int32[B, X], in range; `is_used` is bool[B, A]."""
  options = call.options
  keys = _read(call.k_pages, ids)
  # The values are a slice of the gathered latents, because a second gather
  # would read the latents again.
  if options.value_dim is not None:
    values = keys[..., : options.value_dim]
  else:
    values = _read(call.v_pages, ids)
  is_used = is_used[:, None, :]
  v_scale = _read_scale(options.v_scale, ids, call.k_pages.shape[2])
  if v_scale is not None:
    v_scale = jnp.where(is_used, v_scale, jnp.float32(0))
  return _Block(
    positions=positions,
    keys=keys,
    # 0 * NaN is NaN, so a weight of zero would not exclude a NaN.
    values=jnp.where(is_used[..., None], values, jnp.float32(0)),
    k_scale=_read_scale(options.k_scale, ids, call.k_pages.shape[2]),
    v_scale=v_scale,
  )


def _read(pages: jax.Array, ids: jax.Array) -> jax.Array:
  """Gathers pages `ids` int32[B, X], in range: float32[B, K, X * S, D]."""
  # The gather itself puts heads before pages, [B, K, X, S, D], without a copy.
  tiles = lax.gather(
    pages,
    ids[..., None],
    lax.GatherDimensionNumbers(
      offset_dims=(1, 3, 4), collapsed_slice_dims=(0,), start_index_map=(0,)
    ),
    slice_sizes=(1, *pages.shape[1:]),
    mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )
  batch, kv_heads, num, page_size, dim = tiles.shape
  # Before the gather, XLA for a CPU would convert the whole pool.
  tiles = tiles.reshape(batch, kv_heads, num * page_size, dim)
  return load(tiles).astype(jnp.float32)


def _read_scale(
  scale: jax.Array | None, ids: jax.Array, page_size: int
) -> jax.Array | None:
  """Gathers scales of pages `ids` int32[B, X]: float32[B, K, X * S]."""
  if scale is None:
    return None
  batch, num = ids.shape
  if scale.ndim == 1:
    shape = (batch, scale.shape[0], num * page_size)
    return jnp.broadcast_to(scale[None, :, None], shape)
  tiles = scale.at[ids].get(mode="promise_in_bounds")  # [B, X, K, S]
  return tiles.swapaxes(1, 2).reshape(batch, scale.shape[1], -1)


def _absorb(
  block: _Block, options: CallOptions, queries: _Columns, carry: _Carry
) -> _Carry:
  """Adds a block of tokens to the online softmax."""
  q, positions, mask = queries
  batch, kv_heads, rows, _ = q.shape
  columns = mask.shape[1]
  chex.assert_shape([q, block.keys], (batch, kv_heads, None, None))
  logits = jnp.einsum(
    "bkrd,bktd->bkrt", q, block.keys, precision=lax.Precision.HIGHEST
  )
  if block.k_scale is not None:
    logits = logits * block.k_scale[:, :, None]
  if options.soft_cap is not None:
    logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
  logits = logits.reshape(batch, kv_heads, columns, rows // columns, -1)
  if options.alibi_slopes is not None:
    slopes = options.alibi_slopes.reshape(1, kv_heads, 1, -1, 1)
    distance = block.positions[None, None] - positions[:, :, None]
    logits = logits + slopes * distance.astype(jnp.float32)[:, None, :, None]
  logits = jnp.where(mask[:, None, :, None], logits, -jnp.inf)
  logits = logits.reshape(batch, kv_heads, rows, -1)
  # `m` is finite, so a block changes no bit of a row that sees none of its
  # keys. A row's result therefore does not depend on the lengths of other rows.
  m = jnp.maximum(carry.m, jnp.max(logits, axis=-1))
  alpha = jnp.exp(carry.m - m)
  weights = jnp.exp(logits - m[..., None])
  l = carry.l * alpha + jnp.sum(weights, axis=-1)
  if block.v_scale is not None:
    weights = weights * block.v_scale[:, :, None]
  update = jnp.einsum(
    "bkrt,bktd->bkrd", weights, block.values, precision=lax.Precision.HIGHEST
  )
  weighted = carry.weighted * alpha[..., None] + update
  return _Carry(m=m, l=l, weighted=weighted)


def _mask(
  positions: jax.Array, reach: query_tiles.Reach, options: CallOptions
) -> jax.Array:
  """Returns bool[B, T, A]: the tokens at `positions` that each query sees."""
  position = positions[None, None]
  mask = position >= reach.first[:, :, None]
  mask &= position < reach.end[:, :, None]
  if options.tree_mask is None or options.tree_starts is None:
    return mask
  nodes = options.tree_mask.shape[-1]
  node = positions[None] - options.tree_starts[:, None]  # [B, A]
  is_node = (node >= 0) & (node < nodes)
  node = jnp.where(is_node, node, 0)[:, None]
  shape = (*mask.shape[:2], node.shape[-1])
  in_tree = jnp.take_along_axis(
    options.tree_mask, jnp.broadcast_to(node, shape), axis=-1
  )
  return mask & (in_tree | ~is_node[:, None])


def _finish(
  sinks: jax.Array | None, sums: tuple[_Carry, jax.Array], out: _Attended
) -> _Attended:
  """Adds sinks, and divides the sums of values by the sums of weights."""
  carry, is_query = sums
  columns = is_query.shape[1]
  batch, kv_heads, rows, value_dim = carry.weighted.shape
  shape = (batch, kv_heads, columns, rows // columns)
  m = carry.m.reshape(shape)
  l = carry.l.reshape(shape)
  weighted = carry.weighted.reshape(*shape, value_dim)
  # A sink adds to the denominator only, and may be the largest logit.
  if sinks is not None:
    sink = sinks.astype(jnp.float32).reshape(1, kv_heads, 1, -1)
    highest = jnp.maximum(m, sink)
    alpha = jnp.exp(m - highest)
    l = l * alpha + jnp.exp(sink - highest)
    weighted = weighted * alpha[..., None]
    m = highest
  has_no_key = l == 0
  divisor = jnp.where(has_no_key, jnp.float32(1), l)
  result = weighted / divisor[..., None]
  lse = jnp.where(has_no_key, -jnp.inf, m + jnp.log(divisor))
  lse = jnp.where(is_query[:, None, :, None], lse, -jnp.inf)
  result = result.swapaxes(1, 2).reshape(batch, columns, -1, value_dim)
  return _Attended(result, lse.swapaxes(1, 2).reshape(batch, columns, -1))
