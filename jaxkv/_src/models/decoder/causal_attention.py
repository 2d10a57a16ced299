"""Causal softmax attention among the tokens of a call, without any memory."""

import jax
import jax.numpy as jnp


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
  queries, keys = steps[:, None], steps[None, :]
  seen = keys <= queries
  if window is not None:
    seen &= keys > queries - window
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
  scores = jnp.where(seen[None, None, None], scores, -jnp.inf)
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
