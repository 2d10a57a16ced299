"""The gated delta rule and its short convolution, with a recurrent state.

Gated DeltaNet layers (Yang, Kautz and Hatamizadeh, 2025), as in Qwen3-Next, do
not store the keys and values of tokens. Each head stores one matrix S, which
maps keys to values. Token t decays S, moves the value that S stores for key k_t
towards v_t, and reads S with query q_t. With row vectors k_t, v_t and q_t:

  S = exp(decay_t) S
  S = S + beta_t k_t^T (v_t - k_t S)
  out_t = q_t S / sqrt(Dk)

`jaxkv.kv.write_state` stores S and the last inputs of the convolution in pages.
All functions are differentiable. Rows are B sequences of T tokens. Only the
first `num_tokens` tokens of a row are valid. The rest is padding, which does
not change the state. Letters: C channels, W kernel width, K heads of queries
and keys of size Dk, H value heads of size Dv.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import sharding

# By default a GPU or TPU may multiply float32 values with fewer bits. The state
# would accumulate these errors over all tokens of a sequence.
_PRECISION = lax.Precision.HIGHEST


def causal_conv(
  x: Array, weight: Array, state: Array, num_tokens: Array
) -> tuple[Array, Array]:
  """Computes a depthwise causal convolution over W tokens, without activation.

  The last column of `weight`, float[C, W], multiplies the current token of the
  inputs `x`, float[B, T, C]. `state`, float[B, C, W - 1], has the inputs before
  the first token, oldest first; zeros at the start of a sequence.

  Returns:
    The outputs [B, T, C] in x's dtype, and the state after `num_tokens`,
    int32[B], tokens: the last W - 1 valid inputs, in the dtype of `state`.
  """
  batch, columns, channels = x.shape
  width = weight.shape[1]
  chex.assert_shape(state, (batch, channels, width - 1))
  chex.assert_shape(num_tokens, (batch,))
  history = state.swapaxes(1, 2).astype(jnp.float32)
  inputs = jnp.concatenate([history, x.astype(jnp.float32)], axis=1)
  out = jnp.zeros((batch, columns, channels), jnp.float32)
  # W is small, so XLA fuses this sum of W shifted products into one loop.
  for shift in range(width):
    factor = weight[:, shift].astype(jnp.float32)[None, None]
    out = out + inputs[:, shift : shift + columns] * factor
  # `inputs` begins W - 1 tokens before x, so the W - 1 columns that begin at
  # `num_tokens` are the last valid inputs.
  tail = num_tokens[:, None] + jnp.arange(width - 1, dtype=jnp.int32)[None]
  last_inputs = jnp.take_along_axis(
    inputs, tail[..., None], axis=1, mode="clip"
  )
  return out.astype(x.dtype), last_inputs.swapaxes(1, 2).astype(state.dtype)


def l2_normalized(x: Array) -> Array:
  """Normalizes vectors float[..., D] to an L2 norm of 1, in the same dtype.

  Examples:
    >>> l2_normalized(jnp.asarray([3.0, 4.0])).round(3).tolist()
    [0.6000000238418579, 0.800000011920929]
  """
  wide = x.astype(jnp.float32)
  square = jnp.sum(wide * wide, axis=-1, keepdims=True)
  return (wide * lax.rsqrt(square + jnp.float32(1e-6))).astype(x.dtype)


def log_decay(a: Array, a_log: Array, dt_bias: Array) -> Array:
  """Returns logarithms of decay factors: -exp(a_log) softplus(a + dt_bias).

  Takes projections of the tokens, float[B, T, H], and the layer's parameters
  `decay_log` and `decay_bias`, float[H]. Returns float32[B, T, H], at most 0.
  """
  a, a_log, dt_bias = (
    x.astype(jnp.float32) for x in (a, a_log[None, None], dt_bias[None, None])
  )
  return -jnp.exp(a_log) * jax.nn.softplus(a + dt_bias)


def gated_delta_rule(
  q: Array,
  k: Array,
  v: Array,
  decay: Array,
  beta: Array,
  state: Array,
  num_tokens: Array,
  *,
  chunk: int = 64,
) -> tuple[Array, Array]:
  """Runs the gated delta rule over the tokens of each row.

  Scales the queries `q`, float[B, T, K, Dk], by Dk ** -0.5. The keys `k` have
  their shape, and norm 1, as from `l2_normalized`: with larger norms the state
  can diverge. Head h of the values `v`, float[B, T, H, Dv], uses the query and
  key head h // (H // K). `decay`, float[B, T, H], are logarithms, at most 0,
  and `beta`, float[B, T, H], 0 .. 1, is the share of the stored value to
  replace. `state`, float[B, H, Dk, Dv], is 0 at the start of a sequence. Only
  the first `num_tokens`, int32[B], tokens of a row are valid; `chunk` tokens
  are computed together.

  Returns:
    The outputs [B, T, H, Dv] in v's dtype, zeros past `num_tokens`, and the
    state after `num_tokens` tokens, float32[B, H, Dk, Dv].
  """
  batch, columns, heads, value_dim = v.shape
  chex.assert_equal_shape([q, k])
  chex.assert_shape([decay, beta], (batch, columns, heads))
  chex.assert_shape(state, (batch, heads, k.shape[3], value_dim))
  times = heads // k.shape[2]
  is_valid = jnp.arange(columns, dtype=jnp.int32)[None] < num_tokens[:, None]
  # With decay 0 and beta 0, padding does not change the state. The other inputs
  # are zeros too, because padding can hold NaN, and 0 * NaN is NaN.
  q, k, v, decay, beta = (_masked(x, is_valid) for x in (q, k, v, decay, beta))
  tokens = _Tokens(
    q=_by_head(jnp.repeat(q, times, axis=2)) * jnp.float32(k.shape[3] ** -0.5),
    k=_by_head(jnp.repeat(k, times, axis=2)),
    v=_by_head(v),
    decay=_by_head(decay),
    beta=_by_head(beta),
  )
  state = state.astype(jnp.float32)
  # A single token per row does not depend on other tokens of the call, so it
  # needs no triangular system.
  if columns == 1:
    state, out = _single_step(state, jax.tree.map(lambda x: x[:, :, 0], tokens))
    out = out[:, :, None]
  else:
    state, out = _scan_chunks(state, tokens, min(chunk, columns))
  return _masked(out.swapaxes(1, 2), is_valid).astype(v.dtype), state


class _Tokens(NamedTuple):
  """T tokens of each row and head, in float32.

  Attributes:
    q: [B, H, T, Dk], scaled by Dk ** -0.5.
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


def _masked(x: Array, is_valid: Array) -> Array:
  """Replaces the padding in [B, T, ...] by zeros; `is_valid` is [B, T]."""
  is_valid = jnp.expand_dims(is_valid, range(2, x.ndim))
  return jnp.where(is_valid, x, jnp.zeros_like(x))


def _by_head(x: Array) -> Array:
  """Converts [B, T, H, ...] to float32[B, H, T, ...]."""
  return x.swapaxes(1, 2).astype(jnp.float32)


def _einsum(terms: str, *arrays: Array) -> Array:
  return jnp.einsum(terms, *arrays, precision=_PRECISION)


def _single_step(state: Array, token: _Tokens) -> tuple[Array, Array]:
  """Runs one token per row, where `token` has no axis T."""
  state = state * jnp.exp(token.decay)[..., None, None]
  old_value = _einsum("bhk,bhkv->bhv", token.k, state)
  change = (token.v - old_value) * token.beta[..., None]
  state = state + token.k[..., None] * change[..., None, :]
  return state, _einsum("bhk,bhkv->bhv", token.q, state)


def _scan_chunks(
  state: Array, tokens: _Tokens, chunk: int
) -> tuple[Array, Array]:
  """Runs the chunks in order, and returns the state and the outputs."""
  columns = tokens.k.shape[2]
  num_chunks = -(-columns // chunk)

  def split(x: Array) -> Array:
    """Splits [B, H, T, ...] into [num_chunks, B, H, chunk, ...]."""
    # Zero padding leaves the state unchanged, because its decay and beta are 0.
    padding = [(0, 0)] * x.ndim
    padding[2] = (0, num_chunks * chunk - columns)
    x = jnp.pad(x, padding)
    x = x.reshape(*x.shape[:2], num_chunks, chunk, *x.shape[3:])
    return jnp.moveaxis(x, 2, 0)

  # The first state of a sequence is a constant, which varies over no mesh axis.
  state, tokens = sharding.match_varying_axes((state, tokens))
  state, out = lax.scan(_chunk, state, jax.tree.map(split, tokens))
  out = jnp.moveaxis(out, 0, 2)
  out = out.reshape(*out.shape[:2], num_chunks * chunk, out.shape[-1])
  return state, out[:, :, :columns]


def _chunk(state: Array, tokens: _Tokens) -> tuple[Array, Array]:
  """Runs all tokens of a chunk together, as one triangular system.

  Token t adds k_t^T d_t to the state. With the state S before the chunk and the
  cumulative sum G of `decay`, the changes d_t solve
  d_t = beta_t (v_t - e^(G_t) k_t S - sum_(j<t) e^(G_t - G_j) (k_t k_j^T) d_j).
  """
  q, k, v, decay, beta = tokens
  decay_sum = jnp.cumsum(decay, axis=2)
  index = jnp.arange(k.shape[2], dtype=jnp.int32)
  is_before = index[:, None] > index[None]
  is_causal = (index[:, None] >= index[None])[None, None]
  # The mask comes before `exp`, because `exp` of a positive difference could
  # overflow to inf. Then gradients would be NaN, even with a mask after `exp`.
  decays = decay_sum[..., :, None] - decay_sum[..., None, :]
  decays = jnp.exp(jnp.where(is_causal, decays, -jnp.inf))
  key_products = _einsum("bhtk,bhjk->bhtj", k, k) * decays
  system = jnp.where(
    is_before[None, None], key_products * beta[..., None], jnp.float32(0)
  )
  state_decay = jnp.exp(decay_sum)[..., None]
  old_value = _einsum("bhtk,bhkv->bhtv", k, state) * state_decay
  changes = lax.linalg.triangular_solve(
    system,
    (v - old_value) * beta[..., None],
    left_side=True,
    lower=True,
    unit_diagonal=True,
  )
  scores = _einsum("bhtk,bhjk->bhtj", q, k) * decays
  out = _einsum("bhtk,bhkv->bhtv", q, state) * state_decay
  out = out + _einsum("bhtj,bhjv->bhtv", scores, changes)
  # The last row of `decays` is the decay from each token to the chunk's end.
  decayed_keys = decays[:, :, -1][..., None] * k
  state = state * state_decay[:, :, -1][..., None]
  return state + _einsum("bhjk,bhjv->bhkv", decayed_keys, changes), out


def to_rows(packed: Array, num_tokens: Array, width: int) -> Array:
  """Unpacks N columns with the tokens of P rows to [P, T, ...].

  T is `width`. Tokens of a row past T are dropped; with T = N, none. The tokens
  past `num_tokens`, int32[P], are arbitrary.
  """
  row_starts = jnp.cumsum(num_tokens, dtype=jnp.int32) - num_tokens
  column = row_starts[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
  return packed.at[column].get(mode="clip")


def to_columns(rows: Array, num_tokens: Array, columns: int) -> Array:
  """Packs rows [P, T, ...] into [N, ...] with zeros at the end.

  Inverts `to_rows`. N is `columns`, and `num_tokens`, int32[P], is at most T.
  """
  row_starts = jnp.cumsum(num_tokens, dtype=jnp.int32) - num_tokens
  column = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
  # Padding goes to a column out of range, which "drop" ignores.
  target = jnp.where(
    column < num_tokens[:, None],
    row_starts[:, None] + column,
    jnp.int32(columns),
  )
  packed = jnp.zeros((columns, *rows.shape[2:]), rows.dtype)
  return packed.at[target].set(rows, mode="drop")
