"""Causal softmax attention among the tokens of a call, without a cache."""

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
  """Computes causal attention among the tokens of a call.

  Letters: B sequences of T tokens, H query heads, K key-value heads, D head
  size, X size of a value.

  Args:
    q: [B, T, H, D] queries.
    k: [B, T, K, D] keys; K divides H.
    v: [B, T, K, X] values.
    window: static; each token attends to this many most recent tokens, itself
      included; None for itself and all tokens before it.
    scale: static; factor of the attention logits; None for D ** -0.5.
    soft_cap: static; a cap c maps each attention logit x to c * tanh(x / c);
      None for no cap.
    sinks: [H], an additional logit of each head's softmax; None for no sinks.

  Returns:
    [B, T, H, X] in q's dtype.

  Examples:
    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 2, 4))
    >>> attend_causal(x, x[:, :, :1], x[:, :, :1]).shape
    (1, 3, 2, 4)
  """
  steps = jnp.arange(q.shape[1], dtype=jnp.int32)
  queries, keys = steps[:, None], steps[None, :]
  mask = keys <= queries
  if window is not None:
    mask &= keys > queries - window
  num_kv_heads, head_dim = k.shape[2:]
  q_heads = q.reshape(*q.shape[:2], num_kv_heads, -1, head_dim)
  # Scores are float32 even for bfloat16 inputs, for the accuracy of softmax.
  scores = jnp.einsum(
    "btkgd,bnkd->bkgtn",
    q_heads,
    k.astype(q.dtype),
    preferred_element_type=jnp.float32,
  )
  scores *= head_dim**-0.5 if scale is None else scale
  if soft_cap is not None:
    scores = soft_cap * jnp.tanh(scores / soft_cap)
  scores = jnp.where(mask[None, None, None], scores, -jnp.inf)
  if sinks is not None:
    # A sink adds to the sum of the softmax, but it has no value. So its weight
    # is dropped below.
    logits = sinks.astype(jnp.float32).reshape(1, num_kv_heads, -1, 1, 1)
    logits = jnp.broadcast_to(logits, (*scores.shape[:-1], 1))
    scores = jnp.concatenate([scores, logits], axis=-1)
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
