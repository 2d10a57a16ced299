"""Paged attention as plain XLA: a scan over blocks of tokens.

All sequences advance in lockstep over blocks of a fixed number of tokens, with
the online softmax of FlashAttention (Dao et al. 2022, algorithm 1) in float32.
On a CPU, a block small enough for a core's cache beats both a gather of the
whole table and a dense cache. The scan runs on any device that XLA supports.

Unused memory may hold NaN (see `api`). To keep it out, logits are masked after
the product of queries and keys, and values that no query of the sequence sees
are replaced before the product with weights.

The columns are computed at once, or, for numbers that do not depend on how many
there are, a tile of some at a time. All tiles read a block before the next is
gathered; a leading axis is then that of the tiles.
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
from jaxkv_kernels._src.attention.options import AttentionCall
from jaxkv_kernels._src.attention.options import CallOptions
from jaxkv_kernels._src.formats import load

# Tokens per block. Fixed, so that results do not depend on the page size as
# long as it divides this; 64 is within 5 % of the best on every shape timed.
BLOCK_TOKENS = 64

TAKES_QUERY_TILES = True

_LOWEST = float(jnp.finfo(jnp.float32).min)


class _Carry(NamedTuple):
  """Online softmax of the Y query rows of each K/V head.

  Attributes:
    top: largest logit so far.
    total: sum of exp(logit - top).
    weighted: sum of exp(logit - top) * value.
  """

  top: jax.Array  # float32[B, K, Y]
  total: jax.Array  # float32[B, K, Y]
  weighted: jax.Array  # float32[B, K, Y, Dv]


class _Block(NamedTuple):
  """A tokens of every sequence.

  Attributes:
    positions: of the tokens, the same in all sequences.
    keys: without their scales.
    values: without their scales; zeros where no query sees the token.
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
    scaled: the Y = T * H / K rows of each K/V head, times the scale.
    positions: of the queries.
    seen: which tokens of a block each query sees.
  """

  scaled: jax.Array  # float32[B, K, Y, D]
  positions: jax.Array  # int32[B, T]
  seen: jax.Array  # bool[B, T, A]


class _Attended(NamedTuple):
  """What queries read, and their log-sum-exps."""

  out: jax.Array  # float32[B, T, H, Dv]
  lse: jax.Array  # float32[B, T, H]


def attend(call: AttentionCall) -> tuple[jax.Array, jax.Array]:
  """Attention of a rectangle of queries; see `api.paged_attention_padded`.

  Args:
    call: if it has a `query_tile`, T is a multiple of it, at least twice as
      many.

  Returns:
    (float32[B, T, H, Dv], float32[B, T, H]).
  """
  options, page_table = call.options, call.page_table
  batch, columns, heads, dim = call.q.shape
  total_pages, kv_heads, page_size = call.k_pages.shape[:3]
  pages_per_block = max(1, BLOCK_TOKENS // page_size)
  block = pages_per_block * page_size
  reach = query_tiles.reach(call)
  first_block, end_block = _blocks(reach, block)
  spare = -page_table.shape[1] % pages_per_block
  table = jnp.pad(page_table, ((0, 0), (0, spare)))
  each, split, join = _at_once, _itself, _itself
  if call.query_tile is not None:
    tiles = (jnp.max(call.counts) + call.query_tile - 1) // call.query_tile
    each = functools.partial(_in_turn, tiles)
    split = functools.partial(_split, call.query_tile)
    join = _join
  # float32[B, K, Y, D]: the query rows that share a K/V head.
  scaled = call.q.astype(jnp.float32) * jnp.asarray(options.scale, jnp.float32)
  scaled = scaled.reshape(batch, columns, kv_heads, heads // kv_heads, dim)
  scaled = split(scaled).swapaxes(-4, -3)
  scaled = scaled.reshape(*scaled.shape[:-3], -1, dim)
  chex.assert_shape(scaled, (..., batch, kv_heads, None, dim))
  positions = split(reach.position)

  def step(index: jax.Array, carry: _Carry) -> _Carry:
    ids = lax.dynamic_slice_in_dim(
      table, index * pages_per_block, pages_per_block, axis=1
    )
    ids = jnp.clip(ids + options.page_offset, 0, total_pages - 1)
    keys_at = index * block + jnp.arange(block, dtype=jnp.int32)
    seen = _seen(keys_at, reach, options)  # bool[B, T, A]
    tokens = _gather(call, ids, keys_at, jnp.any(seen, axis=1))
    absorb = functools.partial(_absorb, tokens, options)
    return each(absorb, _Columns(scaled, positions, split(seen)), carry)

  pools, value_dim = (call.k_pages, call.v_pages), call.value_dim
  involved = (scaled, pools, page_table, reach, _arrays(options))
  carry = _start(scaled.shape[:-1], value_dim, involved)
  carry = lax.fori_loop(first_block, end_block, step, carry)
  real = split(call.real)
  empty = _Attended(
    out=jnp.zeros_like(carry.total, shape=(*real.shape, heads, value_dim)),
    lse=jnp.zeros_like(carry.total, shape=(*real.shape, heads)) - jnp.inf,
  )
  finish = functools.partial(_finish, options.sinks)
  out, lse = each(finish, (carry, real), empty)
  return join(out), join(lse)


def unsupported(platform: str, call: AttentionCall) -> str | None:
  """None: this backend serves every checked call on every platform."""
  del platform, call
  return None


def _itself(x: jax.Array) -> jax.Array:
  return x


def _split(tile: int, x: jax.Array) -> jax.Array:
  """[B, J * tile, ...] to [J, B, tile, ...]."""
  return x.reshape(x.shape[0], -1, tile, *x.shape[2:]).swapaxes(0, 1)


def _join(x: jax.Array) -> jax.Array:
  """[J, B, tile, ...] to [B, J * tile, ...]."""
  x = x.swapaxes(0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])


def _at_once(function: Callable[..., Any], rows: Any, out: Any) -> Any:
  """`function(rows, out)` of all columns."""
  return function(rows, out)


def _in_turn(
  end: jax.Array, function: Callable[..., Any], rows: Any, out: Any
) -> Any:
  """`function(rows, out)` of the first tiles, one at a time.

  XLA compiles it once, for one tile, whatever their number. There must be more
  than one: else it would move parts of it out of the loop.

  Args:
    end: int32[], how many tiles; not a constant.
    function: takes the rows and the output of a tile; returns its new output.
    rows: leaves [J, ...].
    out: leaves [J, ...].

  Returns:
    Like `out`.
  """

  def one(number: jax.Array, out: Any) -> Any:
    own = jax.tree.map(
      lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), (rows, out)
    )
    return jax.tree.map(
      lambda x, new: lax.dynamic_update_index_in_dim(x, new, number, 0),
      out,
      function(*own),
    )

  return lax.fori_loop(jnp.zeros_like(end), end, one, out)


def _arrays(options: CallOptions) -> tuple[jax.Array | None, ...]:
  """The arrays among the options that the scan reads."""
  return (
    options.page_offset,
    options.alibi_slopes,
    options.k_scale,
    options.v_scale,
    options.tree_mask,
    options.tree_starts,
  )


def _start(shape: tuple[int, ...], value_dim: int, involved) -> _Carry:
  """The carry before the first block, for rows of shape [..., B, K, Y].

  Under `shard_map` a loop's carry must vary from the start over all mesh axes
  that it varies over later. A zero computed from everything involved does.
  """
  zero = sum(
    jnp.zeros_like(array, jnp.float32, shape=())
    for array in jax.tree.leaves(involved)
  )
  return _Carry(
    top=jnp.full(shape, _LOWEST, jnp.float32) + zero,
    total=jnp.zeros(shape, jnp.float32) + zero,
    weighted=jnp.zeros((*shape, value_dim), jnp.float32) + zero,
  )


def _blocks(
  reach: query_tiles.Reach, block: int
) -> tuple[jax.Array, jax.Array]:
  """First block that some query sees, and one past the last."""
  end = jnp.max(reach.end)
  first = jnp.min(jnp.where(reach.end > 0, reach.first, end))
  return first // block, (end + block - 1) // block


def _gather(
  call: AttentionCall, ids: jax.Array, positions: jax.Array, used: jax.Array
) -> _Block:
  """The tokens of pages `ids` int32[B, X], in range; `used` is bool[B, A]."""
  options, page_size = call.options, call.k_pages.shape[2]
  keys = _read(call.k_pages, ids)
  if options.value_dim is not None:
    values = keys[..., : options.value_dim]
  else:
    values = _read(call.v_pages, ids)
  used = used[:, None, :]
  v_scale = _read_scale(options.v_scale, ids, page_size)
  if v_scale is not None:
    v_scale = jnp.where(used, v_scale, jnp.float32(0))
  return _Block(
    positions=positions,
    keys=keys,
    # 0 * NaN is NaN: a weight of zero does not keep a value out.
    values=jnp.where(used[..., None], values, jnp.float32(0)),
    k_scale=_read_scale(options.k_scale, ids, page_size),
    v_scale=v_scale,
  )


def _read(pages: jax.Array, ids: jax.Array) -> jax.Array:
  """Pages `ids` int32[B, X], in range, as float32[B, K, X * S, D]."""
  # [B, K, X, S, D]: the gather itself puts heads before pages.
  tiles = lax.gather(
    pages,
    ids[..., None],
    lax.GatherDimensionNumbers(
      offset_dims=(1, 3, 4), collapsed_slice_dims=(0,), start_index_map=(0,)
    ),
    slice_sizes=(1, *pages.shape[1:]),
    mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )
  batch, kv_heads, num, size, dim = tiles.shape
  tiles = tiles.reshape(batch, kv_heads, num * size, dim)
  return load(tiles).astype(jnp.float32)


def _read_scale(
  scale: jax.Array | None, ids: jax.Array, page_size: int
) -> jax.Array | None:
  """Scales of the tokens of pages `ids` int32[B, X]: float32[B, K, X * S]."""
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
  """The online softmax of one more block of tokens."""
  scaled, positions, seen = queries
  batch, kv_heads, rows, _ = scaled.shape
  columns = seen.shape[1]
  chex.assert_shape([scaled, block.keys], (batch, kv_heads, None, None))
  logits = jnp.einsum(
    "bkrd,bktd->bkrt", scaled, block.keys, precision=lax.Precision.HIGHEST
  )
  if block.k_scale is not None:
    logits = logits * block.k_scale[:, :, None]
  if options.soft_cap is not None:
    logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
  logits = logits.reshape(batch, kv_heads, columns, rows // columns, -1)
  if options.alibi_slopes is not None:
    slopes = options.alibi_slopes.reshape(1, kv_heads, 1, -1, 1)
    away = block.positions[None, None] - positions[:, :, None]
    logits = logits + slopes * away.astype(jnp.float32)[:, None, :, None]
  logits = jnp.where(seen[:, None, :, None], logits, -jnp.inf)
  logits = logits.reshape(batch, kv_heads, rows, -1)
  # `top` starts finite: a block in which a row sees nothing changes no bit
  # of that row, so a row's result does not depend on its neighbours' lengths.
  top = jnp.maximum(carry.top, jnp.max(logits, axis=-1))
  shrink = jnp.exp(carry.top - top)
  weights = jnp.exp(logits - top[..., None])
  total = carry.total * shrink + jnp.sum(weights, axis=-1)
  if block.v_scale is not None:
    weights = weights * block.v_scale[:, :, None]
  update = jnp.einsum(
    "bkrt,bktd->bkrd", weights, block.values, precision=lax.Precision.HIGHEST
  )
  weighted = carry.weighted * shrink[..., None] + update
  return _Carry(top=top, total=total, weighted=weighted)


def _seen(
  positions: jax.Array, reach: query_tiles.Reach, options: CallOptions
) -> jax.Array:
  """Which tokens at positions int32[A] each query sees: bool[B, T, A]."""
  position = positions[None, None]
  seen = position >= reach.first[:, :, None]
  seen &= position < reach.end[:, :, None]
  if options.tree_mask is None or options.tree_starts is None:
    return seen
  nodes = options.tree_mask.shape[-1]
  node = positions[None] - options.tree_starts[:, None]  # [B, A]
  inside = (node >= 0) & (node < nodes)
  node = jnp.where(inside, node, 0)[:, None]
  shape = (*seen.shape[:2], node.shape[-1])
  allowed = jnp.take_along_axis(
    options.tree_mask, jnp.broadcast_to(node, shape), axis=-1
  )
  return seen & (allowed | ~inside[:, None])


def _finish(
  sinks: jax.Array | None, sums: tuple[_Carry, jax.Array], out: _Attended
) -> _Attended:
  """Normalises sums; `bool[B, T]` says which queries are real."""
  carry, real = sums
  columns = real.shape[1]
  batch, kv_heads, rows, value_dim = carry.weighted.shape
  shape = (batch, kv_heads, columns, rows // columns)
  top = carry.top.reshape(shape)
  total = carry.total.reshape(shape)
  weighted = carry.weighted.reshape(*shape, value_dim)
  if sinks is not None:
    sink = sinks.astype(jnp.float32).reshape(1, kv_heads, 1, -1)
    highest = jnp.maximum(top, sink)
    shrink = jnp.exp(top - highest)
    total = total * shrink + jnp.exp(sink - highest)
    weighted = weighted * shrink[..., None]
    top = highest
  empty = total == 0
  safe = jnp.where(empty, jnp.float32(1), total)
  attended = weighted / safe[..., None]
  lse = jnp.where(empty, -jnp.inf, top + jnp.log(safe))
  lse = jnp.where(real[:, None, :, None], lse, -jnp.inf)
  attended = attended.swapaxes(1, 2).reshape(batch, columns, -1, value_dim)
  return _Attended(attended, lse.swapaxes(1, 2).reshape(batch, columns, -1))
