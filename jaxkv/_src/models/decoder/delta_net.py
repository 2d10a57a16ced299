"""The gated delta rule, and the convolution before it, with a carried state.

Layers of Gated DeltaNet (Yang, Kautz and Hatamizadeh 2025), as Qwen3-Next has
them, replace keys and values by a matrix S for each head. Token t decays it,
reads what it says of the token's key, and writes what it should say:

  S = exp(decay_t) S
  S = S + beta_t k_t (v_t - k_t S)
  out_t = q_t S

`jaxkv.kv.read_state` and `write_state` keep the matrix, and the last inputs of
the convolution. All functions take rows of tokens, [B, T, ...], of which only
the first `counts` count: the others change no state. Many tokens are computed
in chunks by matrix products; one token is a single step.

| function | what it does |
|---|---|
| `causal_conv` | depthwise convolution over a token and those before it |
| `l2_normalized` | queries and keys of length 1 |
| `log_decay` | the decays from a projection and the layer's parameters |
| `gated_delta_rule` | the recurrence |
| `to_rows`, `to_columns` | packed tokens as rows, and back |

All are differentiable.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

_EXACT = lax.Precision.HIGHEST


def causal_conv(
  x: Array,
  weight: Array,
  state: Array,
  counts: Array,
) -> tuple[Array, Array]:
  """Each channel convolved with itself, over a token and the W - 1 before it.

  No activation is applied.

  Args:
    x: float[B, T, C].
    weight: float[C, W]; the last one is that of the token itself.
    state: float[B, C, W - 1], the inputs before the first token, the oldest
      first; zeros where a sequence begins.
    counts: int32[B], tokens of each row.

  Returns:
    [B, T, C] in x's dtype; and the last W - 1 inputs after `counts` tokens,
    in the dtype of `state`.

  Examples:
    >>> x = jnp.asarray([[[1.0], [2.0], [3.0]]])
    >>> out, state = causal_conv(
    ...   x,
    ...   jnp.asarray([[10.0, 1.0]]),
    ...   jnp.zeros((1, 1, 1)),
    ...   jnp.asarray([2], jnp.int32),
    ... )
    >>> out[0, :2, 0].tolist(), state.tolist()
    ([1.0, 12.0], [[[2.0]]])
  """
  batch, columns, channels = x.shape
  width = weight.shape[1]
  chex.assert_shape(state, (batch, channels, width - 1))
  chex.assert_shape(counts, (batch,))
  before = state.swapaxes(1, 2).astype(jnp.float32)
  inputs = jnp.concatenate([before, x.astype(jnp.float32)], axis=1)
  out = jnp.zeros((batch, columns, channels), jnp.float32)
  for place in range(width):
    factor = weight[:, place].astype(jnp.float32)[None, None]
    out = out + inputs[:, place : place + columns] * factor
  last = counts[:, None] + jnp.arange(width - 1, dtype=jnp.int32)[None]
  after = jnp.take_along_axis(inputs, last[..., None], axis=1, mode="clip")
  return out.astype(x.dtype), after.swapaxes(1, 2).astype(state.dtype)


def l2_normalized(x: Array) -> Array:
  """Vectors float[..., D] of length 1, in the same dtype.

  Examples:
    >>> l2_normalized(jnp.asarray([3.0, 4.0])).round(3).tolist()
    [0.6000000238418579, 0.800000011920929]
  """
  wide = x.astype(jnp.float32)
  square = jnp.sum(wide * wide, axis=-1, keepdims=True)
  return (wide * lax.rsqrt(square + jnp.float32(1e-6))).astype(x.dtype)


def log_decay(a: Array, a_log: Array, dt_bias: Array) -> Array:
  """The logarithms of the decays: -exp(a_log) softplus(a + dt_bias).

  Args:
    a: float[B, T, H], a projection of the tokens.
    a_log: float[H].
    dt_bias: float[H].

  Returns:
    float32[B, T, H], never positive.
  """
  a, a_log, dt_bias = (
    some.astype(jnp.float32)
    for some in (a, a_log[None, None], dt_bias[None, None])
  )
  return -jnp.exp(a_log) * jax.nn.softplus(a + dt_bias)


def gated_delta_rule(
  q: Array,
  k: Array,
  v: Array,
  decay: Array,
  beta: Array,
  state: Array,
  counts: Array,
  *,
  chunk: int = 64,
) -> tuple[Array, Array]:
  """The outputs of all tokens, and the state after `counts` of them.

  Args:
    q: float[B, T, K, Dk].
    k: float[B, T, K, Dk]. `l2_normalized` keeps the recurrence stable.
    v: float[B, T, H, Dv], H a multiple of K; head h has the query and the key
      of head h // (H // K).
    decay: float[B, T, H], logarithms; not positive.
    beta: float[B, T, H], 0 .. 1.
    state: float[B, H, Dk, Dv]; zeros where a sequence begins.
    counts: int32[B], tokens of each row, 0 .. T.
    chunk: tokens that are computed at once.

  Returns:
    [B, T, H, Dv] in v's dtype, zeros behind `counts`; and the state,
    float32[B, H, Dk, Dv].

  Raises:
    ValueError: H is not a multiple of K, or `chunk` is less than 1.

  Examples:
    >>> one = jnp.ones((1, 2, 1, 1))
    >>> out, state = gated_delta_rule(
    ...   one,
    ...   one,
    ...   one * 8,
    ...   jnp.zeros((1, 2, 1)),
    ...   jnp.full((1, 2, 1), 0.5),
    ...   jnp.zeros((1, 1, 1, 1)),
    ...   jnp.asarray([2], jnp.int32),
    ... )
    >>> out.ravel().tolist(), state.item()
    ([4.0, 6.0], 6.0)
  """
  batch, columns, heads, value_dim = v.shape
  if heads % k.shape[2]:
    raise ValueError(
      f"`v` must have a multiple of the {k.shape[2]} heads of k, got {heads}."
    )
  if chunk < 1:
    raise ValueError(f"`chunk` must be at least 1, got {chunk}.")
  chex.assert_equal_shape([q, k])
  chex.assert_shape([decay, beta], (batch, columns, heads))
  chex.assert_shape(state, (batch, heads, k.shape[3], value_dim))
  times = heads // k.shape[2]
  real = jnp.arange(columns, dtype=jnp.int32)[None] < counts[:, None]
  real = real[..., None]
  tokens = _Tokens(
    q=_by_head(jnp.repeat(q, times, axis=2)) * jnp.float32(k.shape[3] ** -0.5),
    k=_by_head(jnp.repeat(k, times, axis=2)),
    v=_by_head(v),
    # Without decay and without a change a token leaves the state as it is.
    decay=_by_head(jnp.where(real, decay, jnp.zeros_like(decay))),
    beta=_by_head(jnp.where(real, beta, jnp.zeros_like(beta))),
  )
  state = state.astype(jnp.float32)
  if columns == 1:
    state, out = _one(state, jax.tree.map(lambda x: x[:, :, 0], tokens))
    out = out[:, :, None]
  else:
    state, out = _many(state, tokens, min(chunk, columns))
  out = jnp.where(real[..., None], out.swapaxes(1, 2), jnp.float32(0))
  return out.astype(v.dtype), state


class _Tokens(NamedTuple):
  """T tokens of each row and head, in float32.

  Attributes:
    q: [B, H, T, Dk], scaled.
    k: [B, H, T, Dk].
    v: [B, H, T, Dv].
    decay: [B, H, T].
    beta: [B, H, T].
  """

  q: Array
  k: Array
  v: Array
  decay: Array
  beta: Array


def _by_head(x: Array) -> Array:
  """[B, T, H, ...] as float32[B, H, T, ...]."""
  return x.swapaxes(1, 2).astype(jnp.float32)


def _einsum(terms: str, *arrays: Array) -> Array:
  return jnp.einsum(terms, *arrays, precision=_EXACT)


def _one(state: Array, token: _Tokens) -> tuple[Array, Array]:
  """One step; the tokens have no axis T."""
  state = state * jnp.exp(token.decay)[..., None, None]
  known = _einsum("bhk,bhkv->bhv", token.k, state)
  change = (token.v - known) * token.beta[..., None]
  state = state + token.k[..., None] * change[..., None, :]
  return state, _einsum("bhk,bhkv->bhv", token.q, state)


def _many(state: Array, tokens: _Tokens, chunk: int) -> tuple[Array, Array]:
  """Chunk after chunk; outputs float32[B, H, T, Dv]."""
  columns = tokens.k.shape[2]
  number = -(-columns // chunk)

  def cut(x: Array) -> Array:
    """[B, H, T, ...] as [number, B, H, chunk, ...], padded with zeros."""
    spare = [(0, 0)] * x.ndim
    spare[2] = (0, number * chunk - columns)
    x = jnp.pad(x, spare)
    x = x.reshape(*x.shape[:2], number, chunk, *x.shape[3:])
    return jnp.moveaxis(x, 2, 0)

  state, out = lax.scan(_chunk, state, jax.tree.map(cut, tokens))
  out = jnp.moveaxis(out, 0, 2)
  out = out.reshape(*out.shape[:2], number * chunk, out.shape[-1])
  return state, out[:, :, :columns]


def _chunk(state: Array, tokens: _Tokens) -> tuple[Array, Array]:
  """All tokens of a chunk at once.

  The change d_t that token t writes depends on the changes before it in the
  chunk: d_t = beta_t (v_t - e^(G_t) k_t S - sum_(j<t) e^(G_t - G_j) (k_t k_j)
  d_j), where G sums the decays. That is a triangular system.
  """
  q, k, v, decay, beta = tokens
  size = k.shape[2]
  total = jnp.cumsum(decay, axis=2)
  place = jnp.arange(size, dtype=jnp.int32)
  before = place[:, None] > place[None]
  until = (place[:, None] >= place[None])[None, None]
  # Differences that are positive are left out before the exponential.
  between = total[..., :, None] - total[..., None, :]
  between = jnp.exp(jnp.where(until, between, -jnp.inf))
  alike = _einsum("bhtk,bhjk->bhtj", k, k) * between
  system = jnp.where(
    before[None, None], alike * beta[..., None], jnp.float32(0)
  )
  from_state = jnp.exp(total)[..., None]
  known = _einsum("bhtk,bhkv->bhtv", k, state) * from_state
  changes = lax.linalg.triangular_solve(
    system,
    (v - known) * beta[..., None],
    left_side=True,
    lower=True,
    unit_diagonal=True,
  )
  seen = _einsum("bhtk,bhjk->bhtj", q, k) * between
  out = _einsum("bhtk,bhkv->bhtv", q, state) * from_state
  out = out + _einsum("bhtj,bhjv->bhtv", seen, changes)
  # The last row says what is left of each change at the end of the chunk.
  left = between[:, :, -1][..., None] * k
  state = state * from_state[:, :, -1][..., None]
  return state + _einsum("bhjk,bhjv->bhkv", left, changes), out


def to_rows(packed: Array, counts: Array, width: int) -> Array:
  """Tokens packed one row after another, as the prompts of a `PackedView`.

  Args:
    packed: [C, ...].
    counts: int32[P], tokens of each row.
    width: T; the tokens of a row behind it are left out. In a rollout with
      recurrent groups no row has more than a page.

  Returns:
    [P, T, ...]; whatever is near behind `counts`.

  Examples:
    >>> counts = jnp.asarray([1, 2], jnp.int32)
    >>> rows = to_rows(jnp.asarray([5, 6, 7, 0]), counts, 2)
    >>> rows[1].tolist(), to_columns(rows, counts, 4).tolist()
    ([6, 7], [5, 6, 7, 0])
  """
  begins = jnp.cumsum(counts, dtype=jnp.int32) - counts
  column = begins[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
  return packed.at[column].get(mode="clip")


def to_columns(rows: Array, counts: Array, columns: int) -> Array:
  """What `to_rows` undid: [P, T, ...] as [C, ...], zeros behind all tokens.

  Args:
    rows: [P, T, ...].
    counts: int32[P], at most T.
    columns: C.
  """
  begins = jnp.cumsum(counts, dtype=jnp.int32) - counts
  place = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
  target = jnp.where(
    place < counts[:, None], begins[:, None] + place, jnp.int32(columns)
  )
  packed = jnp.zeros((columns, *rows.shape[2:]), rows.dtype)
  return packed.at[target].set(rows, mode="drop")
