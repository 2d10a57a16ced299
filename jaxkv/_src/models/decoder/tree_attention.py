"""Softmax attention in trees of tokens, without a cache.

`prompt_tree` describes the trees. A token attends to its ancestors and to
earlier tokens of its branch, and to itself. For each level, one product scores
the queries of all completions with a prompt's keys, so keys are not repeated.

Letters in addition to those of `prompt_tree`: H query heads, K key-value heads,
D head size, X size of a value, g query heads per key-value head, l level of the
queries, j level of the keys, Q queries of level l that descend from one branch
of level j.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._src.models.decoder import prompt_tree
from jaxkv._src.models.decoder.prompt_tree import Tree


def attend(
  tree: Tree,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  window: int | None = None,
  scale: float | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Computes softmax attention of q [N, T, H, D]: [N, T, H, X] in q's dtype.

  Keys are [N, T, K, D] and values [N, T, K, X]; K divides H. `sinks`, [H], are
  an additional logit of each head's softmax. The other options are static, see
  `Attention`.
  """
  factor = q.shape[3] ** -0.5 if scale is None else scale
  keys = tree.split(k)
  values = tree.split(v)

  def scores_with(q: jax.Array, level: int, ancestor: int) -> jax.Array:
    """Scores a level's queries with an ancestor level's keys.

    Returns float32[N, C_j, K, g, Q, R_j], grouped by branches of the ancestors.
    """
    scores = jnp.einsum(
      "ncqkgd,ncrkd->nckgqr",
      _by_ancestor(q, tree.branches[ancestor], k.shape[2]),
      keys[ancestor].astype(q.dtype),
      preferred_element_type=jnp.float32,
    )
    scores = scores * factor
    if soft_cap is not None:
      scores = soft_cap * jnp.tanh(scores / soft_cap)
    # The mask is added, because the gradient of an addition stores nothing. The
    # gradient of `where` on the scores would store the mask.
    mask = _mask(tree, level, ancestor, window)[:, :, None, None]
    return scores + jnp.where(mask, jnp.float32(0), -jnp.inf)

  def attend_level(level: int, q: jax.Array) -> jax.Array:
    """Returns [N, C_l, R_l, H, X] for queries [N, C_l, R_l, H, D]."""
    parts = [scores_with(q, level, ancestor) for ancestor in range(level + 1)]
    if sinks is not None:
      logits = sinks.astype(jnp.float32).reshape(1, 1, k.shape[2], -1, 1, 1)
      parts.append(jnp.broadcast_to(logits, (*parts[-1].shape[:-1], 1)))
    weights = _softmax(tuple(parts))[: level + 1]
    out = jnp.float32(0)
    for weight, value in zip(weights, values, strict=False):
      part = jnp.einsum(
        "nckgqr,ncrkx->ncqkgx",
        weight.astype(q.dtype),
        value.astype(q.dtype),
        preferred_element_type=jnp.float32,
      )
      out = out + part.reshape(*q.shape[:4], v.shape[3])
    return out.astype(q.dtype)

  levels = enumerate(tree.split(q))
  return tree.join([attend_level(level, queries) for level, queries in levels])


def _by_ancestor(q: jax.Array, count: int, num_kv_heads: int) -> jax.Array:
  """Groups queries [N, C_l, R_l, H, D] by ancestor: [N, C_j, Q, K, g, D]."""
  return q.reshape(
    q.shape[0], count, -1, num_kv_heads, q.shape[3] // num_kv_heads, q.shape[4]
  )


def _mask(
  tree: Tree, level: int, ancestor: int, window: int | None
) -> jax.Array:
  """Returns the attention mask: bool[N or 1, C_j or 1, Q or 1, R_j]."""
  if level == ancestor:
    keys = jnp.arange(tree.widths[level], dtype=jnp.int32)
    distance = (keys[:, None] - keys[None])[None, None]
    # Padding attends to itself. If it attended to no token, its softmax would
    # be NaN.
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)
  columns = prompt_tree.columns(tree.widths[ancestor])
  mask = (columns < tree.lengths[ancestor][..., None])[:, :, None]
  if window is None:
    return mask
  positions = tree.positions()
  queries = positions[level].reshape(*mask.shape[:2], -1, 1)
  distance = queries - positions[ancestor][:, :, None]
  return mask & (distance < window)


@jax.custom_jvp
def _softmax(parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
  """Computes one softmax over the last axes of all parts.

  Part j has the scores [N, C_j, K, g, Q, R_j] of the same queries with the keys
  of level j, grouped by the branches of level j. Sinks are an additional part
  at the end, with one column, grouped by the branches of level l.
  """
  maxima = [_by_query_branch(jnp.max(part, axis=-1), parts) for part in parts]
  maximum = maxima[0]
  for part in maxima[1:]:
    maximum = jnp.maximum(maximum, part)
  powers = [jnp.exp(part - _by_key_branch(maximum, part)) for part in parts]
  denominator = _sum(powers)
  return tuple(power / _by_key_branch(denominator, power) for power in powers)


# Like the gradient of `jax.nn.softmax`, this rule stores only the weights. The
# automatic gradient of `_softmax` would also store scores and powers.


@_softmax.defjvp
def _softmax_jvp(primals: Any, tangents: Any) -> Any:
  weights = _softmax(*primals)
  products = [
    w * tangent for w, tangent in zip(weights, *tangents, strict=True)
  ]
  product_sum = _sum(products)
  changes = (
    product - weight * _by_key_branch(product_sum, weight)
    for weight, product in zip(weights, products, strict=True)
  )
  return weights, tuple(changes)


def _sum(parts: list[jax.Array]) -> jax.Array:
  """Sums the last axes of all parts, to one array [N, C_l, K, g, R_l]."""
  result = jnp.float32(0)
  for part in parts:
    result = result + _by_query_branch(jnp.sum(part, axis=-1), parts)
  return result


def _by_query_branch(x: jax.Array, parts: Any) -> jax.Array:
  """Regroups [N, C_j, K, g, Q] by branches of queries: [N, C_l, K, g, R_l]."""
  shape = parts[-1].shape[:-1]
  if x.shape == shape:
    return x
  x = x.reshape(*x.shape[:4], shape[1] // x.shape[1], shape[4])
  return jnp.moveaxis(x, 4, 2).reshape(shape)


def _by_key_branch(x: jax.Array, part: jax.Array) -> jax.Array:
  """Inverts `_by_query_branch` for a part: [N, C_j, K, g, Q, 1]."""
  shape = part.shape[:-1]
  if x.shape != shape:
    count = shape[1]
    x = x.reshape(x.shape[0], count, x.shape[1] // count, *x.shape[2:])
    x = jnp.moveaxis(x, 2, 4).reshape(shape)
  return x[..., None]
