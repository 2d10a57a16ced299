"""The kernel of the backend `triton`.

Pallas-Triton requires sizes that are powers of two. So reads are padded, and
masks exclude the padding. Pallas's interpreter runs the kernel unchanged. The
docstring of the package `attention` defines the letters.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxkv_kernels._src.attention import online_softmax
from jaxkv_kernels._src.attention import query_tiles
from jaxkv_kernels._src.attention.online_softmax import LOWEST
from jaxkv_kernels._src.quantization import load


@dataclasses.dataclass(frozen=True, kw_only=True)
class TritonStatic:
  """Static sizes of a call.

  Attributes:
    batch: B.
    columns: T, queries of a row.
    heads: H.
    kv_heads: K.
    key_parts: (begin, size) of each part of a query or key. Latents with Dv < D
      have two parts, the value and the rest; otherwise there is one.
    value_dim: Dv.
    pages: N.
    page_size: S.
    capacity: M * S, tokens of a row of the page table.
    rows: Y, query rows of a program, a power of two.
    tiles: the number of programs that share the T * H / K query rows of a K/V
      head.
    block: A, tokens of a step, a power of two.
    splits: the number of programs that share the keys of a query row.
    min_blocks: the minimum number of blocks of a program, unless fewer remain.
    dtype: the format that the tensor cores multiply.
  """

  batch: int
  columns: int
  heads: int
  kv_heads: int
  key_parts: tuple[tuple[int, int], ...]
  value_dim: int
  pages: int
  page_size: int
  capacity: int
  rows: int
  tiles: int
  block: int
  splits: int
  min_blocks: int
  dtype: np.dtype

  @property
  def per_kv_head(self) -> int:
    """H / K, the query heads of a K/V head."""
    return self.heads // self.kv_heads


def power_of_two(count: int) -> int:
  """Returns `count`, rounded up to a power of two."""
  return 1 << (count - 1).bit_length()


def _width(dim: int) -> int:
  """Returns `dim`, rounded up to a size that tensor cores can multiply."""
  return max(power_of_two(dim), 16)


def attention_kernel(
  refs, out_ref, totals_ref, *, static: TritonStatic, soft_cap: float | None
):
  """Computes one tile of query rows over one part of its keys.

  Args:
    refs: whole arrays, None for an absent option:
      q [B, T, H, D], k [N, K, S, D], v [N, K, S, Dv] or None if the value is
      the first part of k, table int32[B, M], starts int32[B], counts int32[B],
      page_offset int32[1], scale float32[1], window int32[1], slopes
      float32[H], k_scale and v_scale float32[K] or float32[N, K, S], tree
      int8[B, T, X], tree_starts int32[B].
    out_ref: float32[splits, B, T, H, Dv].
    totals_ref: float32[2, splits, B, T, H], m and l of `online_softmax`.
    static: sizes of the call.
    soft_cap: as in `CallOptions`.
  """
  rows = _rows(refs, static)
  first_block, end_block = _blocks(rows, static)
  q = [
    _read(refs["q"], rows.index, rows.exists, *part).astype(static.dtype)
    for part in static.key_parts
  ]

  def step(index, carry):
    return _step(refs, rows, q, index, carry, static, soft_cap)

  value_dim = _width(static.value_dim)
  m, l, weighted = lax.fori_loop(
    first_block,
    end_block,
    step,
    (
      jnp.full((static.rows,), LOWEST, jnp.float32),
      jnp.zeros((static.rows,), jnp.float32),
      jnp.zeros((static.rows, value_dim), jnp.float32),
    ),
  )
  # A program without keys writes l = 0, so that the merge ignores its part.
  target = (pl.program_id(1), *rows.index)
  for index, sums in enumerate((m, l)):
    plt.store(totals_ref.at[(index, *target)], sums, mask=rows.exists)
  out = online_softmax.normalise(l, weighted)
  target, exists = _with_columns(target, rows.exists, 0, static.value_dim)
  plt.store(out_ref.at[target], out, mask=exists)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rows:
  """The Y query rows of a program. Each is one query head of one query.

  Attributes:
    batch: the sequence of all rows.
    kv_head: the K/V head of all rows.
    column: the column of each row's query.
    head: the query head of each row.
    exists: False past the T * H / K rows of the K/V head.
    position: the position of each row's query in the sequence.
    first: the first key that each row sees.
    end: one past the last key that each row sees, 0 for padding.
    reach: the first key that any row sees, and one past the last such key.
  """

  batch: jax.Array  # int32[]
  kv_head: jax.Array  # int32[]
  column: jax.Array  # int32[Y]
  head: jax.Array  # int32[Y]
  exists: jax.Array  # bool[Y]
  position: jax.Array  # int32[Y]
  first: jax.Array  # int32[Y]
  end: jax.Array  # int32[Y]
  reach: tuple[jax.Array, jax.Array]  # int32[], int32[]

  @property
  def index(self):
    """The index of the rows in an array [B, T, H, ...]."""
    return self.batch, self.column, self.head


def _rows(refs, static: TritonStatic) -> _Rows:
  """Returns the rows of this program."""
  # The tile varies fastest over programs, so that the tiles of a K/V head read
  # their keys, which they share, from the L2 cache.
  program = pl.program_id(0)
  head_index = _divide(program, static.tiles)
  tile = program - head_index * static.tiles
  batch = _divide(head_index, static.kv_heads)
  kv_head = head_index - batch * static.kv_heads
  row = tile * static.rows + jnp.arange(static.rows, dtype=jnp.int32)
  column = _divide(row, static.per_kv_head)
  head = kv_head * static.per_kv_head + row - column * static.per_kv_head
  start = refs["starts"][batch]
  count = jnp.minimum(refs["counts"][batch], static.columns)

  window = None if refs["window"] is None else refs["window"][0]

  def span(column):
    return query_tiles.span(start + column, static.capacity, window)

  # Queries of a tile ascend, so its first and last query bound all its keys.
  lowest = _divide(tile * static.rows, static.per_kv_head)
  highest = _divide((tile + 1) * static.rows - 1, static.per_kv_head)
  highest = jnp.minimum(highest, count - 1)
  first_key, end_key = span(column)
  return _Rows(
    batch=batch,
    kv_head=kv_head,
    column=column,
    head=head,
    exists=row < static.columns * static.per_kv_head,
    position=start + column,
    first=first_key,
    end=jnp.where(column < count, end_key, 0),
    reach=(span(lowest)[0], jnp.where(highest >= lowest, span(highest)[1], 0)),
  )


def _blocks(rows: _Rows, static: TritonStatic):
  """Returns the first block of keys of this program, and one past the last."""
  first_block = _divide(rows.reach[0], static.block)
  end_block = _divide(rows.reach[1] + static.block - 1, static.block)
  share = _divide(end_block - first_block + static.splits - 1, static.splits)
  share = jnp.maximum(share, static.min_blocks)
  first_block += pl.program_id(1) * share
  return first_block, jnp.minimum(first_block + share, end_block)


def _step(refs, rows: _Rows, q, index, carry, static: TritonStatic, soft_cap):
  """Adds a block of keys to the online softmax, in base 2."""
  m, l, weighted = carry
  position = index * static.block + jnp.arange(static.block, dtype=jnp.int32)
  is_read = (position >= rows.reach[0]) & (position < rows.reach[1])
  address = _locate(refs, rows, position, is_read, static)
  keys = [
    load(_read(refs["k"], address, is_read, *part)) for part in static.key_parts
  ]
  logits = sum(map(functools.partial(_logits, static), q, keys))
  if refs["k_scale"] is not None:
    logits *= _scale(refs["k_scale"], address, is_read)[None]
  logits = _adjust(refs, rows, logits * refs["scale"][0], position, soft_cap)
  mask = (position[None] >= rows.first[:, None]) & (
    position[None] < rows.end[:, None]
  )
  if refs["tree"] is not None:
    mask &= _allowed(refs, rows, position)
    # The value of a node that no row sees may be NaN, so it is not read.
    is_read &= jnp.max(mask.astype(jnp.int32), axis=0) > 0
  m, l, alpha, weights = online_softmax.absorb(logits, mask, m, l)
  # Unread values are zeros, because 0 * NaN is NaN.
  values = keys[0]
  if refs["v"] is not None:
    values = load(_read(refs["v"], address, is_read, 0, static.value_dim))
  elif refs["tree"] is not None:
    # Latents were read before the tree mask, so they may contain NaN.
    values = jnp.where(is_read[:, None], values, 0)
  if refs["v_scale"] is not None:
    weights *= _scale(refs["v_scale"], address, is_read)[None]
  update = _weighted(weights, values, static, refs["v_scale"] is not None)
  return m, l, weighted * alpha[:, None] + update


def _logits(static: TritonStatic, q, keys):
  """Multiplies a part of the queries with the same part of a block's keys."""
  return jnp.dot(
    q,
    keys.astype(static.dtype).T,
    precision=_precision(static.dtype),
    preferred_element_type=jnp.float32,
  )


def _weighted(weights, values, static: TritonStatic, has_scales: bool):
  """Returns the weighted sums of a block's values: float32[Y, Dv]."""
  # A weight times a scale can be outside the range of float16. So each row of
  # weights is divided by its largest magnitude, which then multiplies the sums.
  largest = None
  if has_scales and static.dtype == np.dtype(np.float16):
    largest = jnp.max(jnp.abs(weights), axis=1)
    largest = jnp.where(largest == 0, 1.0, largest)
    weights /= largest[:, None]
  sums = jnp.dot(
    weights.astype(static.dtype),
    values.astype(static.dtype),
    precision=_precision(static.dtype),
    preferred_element_type=jnp.float32,
  )
  return sums if largest is None else sums * largest[:, None]


def _locate(refs, rows: _Rows, position, is_read, static: TritonStatic):
  """Returns page, head and offset of each token of a block."""
  column = _divide(position, static.page_size)
  page = plt.load(refs["table"].at[rows.batch, column], mask=is_read, other=0)
  # Even if a used entry is out of range, the read must stay inside the pool.
  page = jnp.clip(page + refs["page_offset"][0], 0, static.pages - 1)
  return page, rows.kv_head, position - column * static.page_size


def _read(ref, index, mask, first_element: int, dim: int):
  """Reads vectors, with zeros for padding and where `mask` is False."""
  index, mask = _with_columns(index, mask, first_element, dim)
  return plt.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def _with_columns(index, mask, first_element: int, dim: int):
  """Adds an axis for the elements of vectors to an index and its mask."""
  width = _width(dim)
  column = jnp.arange(width, dtype=jnp.int32)[None]
  index = tuple(x[:, None] if x.ndim else x for x in index)
  mask = jnp.broadcast_to(mask[:, None], (mask.size, width))
  return (*index, first_element + column), mask & (column < dim)


def _scale(ref, index, mask):
  """Returns the scale of each token of a block, 0 where `mask` is False."""
  if ref.ndim == 1:
    return jnp.where(mask, ref[index[1]], 0.0)
  return plt.load(ref.at[index], mask=mask, other=0.0)


def _adjust(refs, rows: _Rows, logits, position, soft_cap: float | None):
  """Applies the soft cap and ALiBi; returns logits in base 2."""
  if soft_cap is not None:
    logits = soft_cap * jnp.tanh(logits / soft_cap)
  if refs["slopes"] is not None:
    slopes = plt.load(refs["slopes"].at[rows.head], mask=rows.exists, other=0.0)
    distance = position[None] - rows.position[:, None]
    logits += slopes[:, None] * distance.astype(jnp.float32)
  return logits * online_softmax.LOG2_E


def _allowed(refs, rows: _Rows, position):
  """Returns bool[Y, A], True for keys that the tree mask lets a row see."""
  nodes = refs["tree"].shape[2]
  node = position[None] - refs["tree_starts"][rows.batch]
  is_node = (node >= 0) & (node < nodes)
  mask = rows.exists[:, None] & is_node
  shows = plt.load(
    refs["tree"].at[rows.batch, rows.column[:, None], node],
    mask=mask,
    # The tree mask does not apply to keys outside of the tree.
    other=jnp.int8(1),
  )
  return shows != 0


def _divide(dividend, divisor: int):
  """Divides non-negative int32, without the sign handling of `//`."""
  return lax.div(dividend, jnp.full_like(dividend, divisor))


def _precision(dtype: np.dtype):
  """Returns HIGHEST for float32, whose default precision would be tf32."""
  is_float32 = dtype == np.dtype(np.float32)
  return lax.Precision.HIGHEST if is_float32 else None
