"""Dense key-value memory and plain softmax attention: the baseline.

Paged decoding is compared with it, token by token. Each row has `max_len`
contiguous tokens; attention scores all of them, masks, and takes a float32
softmax. Depends on jax alone.

XLA for a CPU rewrites all of a bfloat16 memory at every write; compare speeds
there in float32.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseCache:
  """Keys and values, `max_len` tokens for every row and layer.

  Attributes:
    k: keys. [L, B, max_len, K, D]
    v: values. [L, B, max_len, K, D]
  """

  k: jax.Array
  v: jax.Array

  @property
  def max_len(self) -> int:
    """Tokens that fit in a row."""
    return self.k.shape[2]


def init(
  *,
  num_layers: int,
  batch_size: int,
  max_len: int,
  num_kv_heads: int,
  head_dim: int,
  dtype: Any = jnp.float32,
) -> DenseCache:
  """An empty memory, all zeros.

  Args:
    num_layers: L.
    batch_size: B, rows.
    max_len: tokens that fit in a row.
    num_kv_heads: K.
    head_dim: D.
    dtype: of keys and values.

  Returns:
    A `DenseCache`.

  Examples:
    >>> init(num_layers=1, batch_size=2, max_len=8, num_kv_heads=1,
    ...      head_dim=4).k.shape
    (1, 2, 8, 1, 4)
  """
  shape = (num_layers, batch_size, max_len, num_kv_heads, head_dim)
  if min(shape) < 1:
    raise ValueError(
      "`num_layers`, `batch_size`, `max_len`, `num_kv_heads` and `head_dim` "
      f"must each be at least 1, got {shape}."
    )
  return DenseCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def write(
  cache: DenseCache,
  layer: jax.Array | int,
  starts: jax.Array,
  counts: jax.Array,
  k: jax.Array,
  v: jax.Array,
) -> DenseCache:
  """Writes one layer's new tokens, each row at its own offset.

  In place inside a jitted loop that carries the cache. Tokens past `max_len`
  are dropped.

  Args:
    cache: the memory.
    layer: int32[], which layer.
    starts: int32[B], offset of each row's first new token.
    counts: int32[B], how many of each row's T tokens are written.
    k: [B, T, K, D] keys.
    v: [B, T, K, D] values.

  Returns:
    The memory after the write.
  """
  num_rows, num_tokens = k.shape[:2]
  steps = jnp.arange(num_tokens, dtype=jnp.int32)[None, :]
  rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
  where = jnp.where(
    steps < counts[:, None], starts[:, None] + steps, cache.max_len
  )

  def put(memory: jax.Array, new: jax.Array) -> jax.Array:
    return memory.at[layer, rows, where].set(
      new.astype(memory.dtype), mode="drop", wrap_negative_indices=False
    )

  return DenseCache(k=put(cache.k, k), v=put(cache.v, v))


def attend(
  cache: DenseCache,
  layer: jax.Array | int,
  starts: jax.Array,
  q: jax.Array,
  *,
  window: int | None = None,
  scale: float | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Attends to one layer's memory, after its `write`.

  Args:
    cache: the memory.
    layer: int32[], which layer.
    starts: int32[B]; query t of row b sees the tokens up to `starts[b] + t`.
    q: [B, T, H, D] queries.
    window: static; how many of those tokens it sees, the last ones; None: all.
    scale: static; as for `attend_causal`.
    soft_cap: static; as for `attend_causal`.
    sinks: [H], as for `attend_causal`.

  Returns:
    [B, T, H, D]; NaN for a query past `max_len`.
  """
  k, v = (
    jax.lax.dynamic_index_in_dim(memory, layer, keepdims=False)
    for memory in (cache.k, cache.v)
  )
  steps = jnp.arange(q.shape[1], dtype=jnp.int32)
  places = starts[:, None] + steps[None, :]
  keys = jnp.arange(cache.max_len, dtype=jnp.int32)
  seen = _seen(places[:, :, None], keys[None, None, :], window)
  out = _masked_attention(q, k, v, seen, scale, soft_cap, sinks)
  fits = (places < cache.max_len)[:, :, None, None]
  return jnp.where(fits, out, jnp.array(jnp.nan, out.dtype))


def attend_causal(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  window: int | None = None,
  scale: float | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Causal attention among the tokens given, without any memory.

  Args:
    q: [B, T, H, D] queries.
    k: [B, T, K, D] keys; K divides H.
    v: [B, T, K, X] values.
    window: static; a token sees itself and the `window - 1` tokens before it;
      None: all tokens before it.
    scale: static; factor of the logits; None for D ** -0.5.
    soft_cap: static; c turns a logit x into c * tanh(x / c); None for no cap.
    sinks: [H], a logit of each head that has no value; None for none.

  Returns:
    [B, T, H, X].

  Examples:
    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 2, 4))
    >>> attend_causal(x, x[:, :, :1], x[:, :, :1]).shape
    (1, 3, 2, 4)
  """
  steps = jnp.arange(q.shape[1], dtype=jnp.int32)
  seen = _seen(steps[:, None], steps[None, :], window)[None]
  return _masked_attention(q, k, v, seen, scale, soft_cap, sinks)


def _seen(queries: jax.Array, keys: jax.Array, window: int | None) -> jax.Array:
  """Which positions of keys a query sees; arrays that broadcast: bool."""
  seen = keys <= queries
  return seen if window is None else seen & (keys > queries - window)


def _masked_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  seen: jax.Array,
  scale: float | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Softmax attention of q [B, T, H, D] to k [B, N, K, D], v [B, N, K, X].

  `seen` is bool[B or 1, T, N]. A query that sees no key gets NaN.
  """
  num_kv_heads, head_dim = k.shape[2:]
  grouped = q.reshape(*q.shape[:2], num_kv_heads, -1, head_dim)
  scores = jnp.einsum(
    "btkgd,bnkd->bkgtn",
    grouped,
    k.astype(q.dtype),
    preferred_element_type=jnp.float32,
  )
  scores *= head_dim**-0.5 if scale is None else scale
  if soft_cap is not None:
    scores = soft_cap * jnp.tanh(scores / soft_cap)
  scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
  if sinks is not None:
    own = sinks.astype(jnp.float32).reshape(1, num_kv_heads, -1, 1, 1)
    own = jnp.broadcast_to(own, (*scores.shape[:-1], 1))
    scores = jnp.concatenate([scores, own], axis=-1)
  weights = jax.nn.softmax(scores, axis=-1)
  if sinks is not None:
    weights = weights[..., :-1]
  out = jnp.einsum(
    "bkgtn,bnkd->btkgd",
    weights.astype(q.dtype),
    v.astype(q.dtype),
    preferred_element_type=jnp.float32,
  )
  return out.reshape(*q.shape[:3], v.shape[3]).astype(q.dtype)
