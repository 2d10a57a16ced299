"""Attention and recurrences in trees of tokens.

A token sees its ancestors, and those before it in its branch. Keys are read
once: those of a prompt meet the queries of all its completions in one product.

Letters besides those of `trees`: H query heads, K key-value heads, D head size,
g query heads of a key-value head, Q queries that are below one branch.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._src.models.decoder import memories
from jaxkv._src.models.decoder import states
from jaxkv._src.models.decoder import trees
from jaxkv._src.models.decoder.memories import Memory
from jaxkv._src.models.decoder.memories import Mixer
from jaxkv._src.models.decoder.memories import Read
from jaxkv._src.models.decoder.trees import Tree


@dataclasses.dataclass(frozen=True)
class Branches(memories.Nowhere):
  """No memory of tokens: they attend to those of their tree.

  Attributes:
    tree: where they stand in rows.
  """

  tree: Tree = dataclasses.field(kw_only=True)

  def attend(
    self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any
  ) -> jax.Array:
    """See `Nowhere`."""
    return attend(self.tree, q, k, v, **options)

  def recurrent(
    self,
    mixer: Mixer,
    run: states.Run,
    inputs: tuple[jax.Array, ...],
    memory: Memory,
  ) -> Read:
    """See `Nowhere`: a branch goes on with the states after those above it."""
    tree, outputs = self.tree, []
    carried = states.zeros(mixer.kind, inputs[0].shape[0])
    levels = zip(*(tree.split(array) for array in inputs), strict=True)
    for level, own in enumerate(levels):
      shape = own[0].shape[:3]
      rows = tuple(x.reshape(-1, *x.shape[2:]) for x in own)
      times = tree.branches[level] // tree.branches[max(level - 1, 0)]
      carried = jax.tree.map(lambda x, n=times: jnp.repeat(x, n, 0), carried)
      # Rows may be without the last column of the last level.
      counts = jnp.minimum(tree.lengths[level], tree.widths[level]).ravel()
      out, carried = run(rows, carried, counts)
      outputs.append(out.reshape(*shape, *out.shape[2:]))
    return tree.join(outputs), memory


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
  """Softmax attention in trees, with the arguments of `attend_causal`.

  Returns:
    [N, T, H, X]. Columns without a token have numbers, too.
  """
  factor = q.shape[3] ** -0.5 if scale is None else scale
  keys, values = tree.split(k), tree.split(v)

  def scores(q: jax.Array, level: int, above: int) -> jax.Array:
    """float32[N, C_j, K, g, Q, R_j]: of a level's queries, keys above."""
    own = jnp.einsum(
      "ncqkgd,ncrkd->nckgqr",
      _below(q, tree.branches[above], k.shape[2]),
      keys[above].astype(q.dtype),
      preferred_element_type=jnp.float32,
    )
    own = own * factor
    if soft_cap is not None:
      own = soft_cap * jnp.tanh(own / soft_cap)
    # Adding keeps nothing for a gradient; where would keep its condition.
    seen = _seen(tree, level, above, window)[:, :, None, None]
    return own + jnp.where(seen, jnp.float32(0), -jnp.inf)

  def one(level: int, q: jax.Array) -> jax.Array:
    """[N, C_l, R_l, H, X]: what a level's queries [N, C_l, R_l, H, D] read."""
    parts = [scores(q, level, above) for above in range(level + 1)]
    if sinks is not None:
      own = sinks.astype(jnp.float32).reshape(1, 1, k.shape[2], -1, 1, 1)
      parts.append(jnp.broadcast_to(own, (*parts[-1].shape[:-1], 1)))
    weights = _softmax(tuple(parts))[: level + 1]
    out = jnp.float32(0)
    for own, read in zip(weights, values, strict=False):
      part = jnp.einsum(
        "nckgqr,ncrkx->ncqkgx",
        own.astype(q.dtype),
        read.astype(q.dtype),
        preferred_element_type=jnp.float32,
      )
      out = out + part.reshape(*q.shape[:4], v.shape[3])
    return out.astype(q.dtype)

  return tree.join([one(level, own) for level, own in enumerate(tree.split(q))])


def _below(q: jax.Array, count: int, num_kv_heads: int) -> jax.Array:
  """[N, C_l, R_l, H, D] as [N, C_j, Q, K, g, D]: by the branch above."""
  return q.reshape(
    q.shape[0], count, -1, num_kv_heads, q.shape[3] // num_kv_heads, q.shape[4]
  )


def _seen(tree: Tree, level: int, above: int, window: int | None) -> jax.Array:
  """bool[N or 1, C_j or 1, Q or 1, R_j]: which keys the queries see.

  A query sees itself, even if there is no token in its column.
  """
  if level == above:
    keys = jnp.arange(tree.widths[level], dtype=jnp.int32)
    away = (keys[:, None] - keys[None])[None, None]
    return (away >= 0) if window is None else (away >= 0) & (away < window)
  columns = trees.columns(tree.widths[above])
  seen = (columns < tree.lengths[above][..., None])[:, :, None]
  if window is None:
    return seen
  positions = tree.positions()
  queries = positions[level].reshape(*seen.shape[:2], -1, 1)
  away = queries - positions[above][:, :, None]
  return seen & (away < window)


@jax.custom_jvp
def _softmax(parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
  """The softmax over the last axes of all parts together.

  Parts are [N, C_j, K, g, Q, R_j], of the same queries, by the branches that
  the keys are in. The last part is by the branches of the queries. Like that of
  jax, the gradient keeps the result, and nothing else.
  """
  tops = [_spread(jnp.max(part, axis=-1), parts) for part in parts]
  top = tops[0]
  for other in tops[1:]:
    top = jnp.maximum(top, other)
  powers = [jnp.exp(part - _fold(top, part)) for part in parts]
  total = _sum(powers)
  return tuple(power / _fold(total, power) for power in powers)


@_softmax.defjvp
def _softmax_jvp(primals: Any, tangents: Any) -> Any:
  weights = _softmax(*primals)
  moved = [own * by for own, by in zip(weights, *tangents, strict=True)]
  total = _sum(moved)
  changes = (
    by - own * _fold(total, own) for own, by in zip(weights, moved, strict=True)
  )
  return weights, tuple(changes)


def _sum(parts: list[jax.Array]) -> jax.Array:
  """[N, C_l, K, g, R_l]: over the last axes of all parts."""
  total = jnp.float32(0)
  for part in parts:
    total = total + _spread(jnp.sum(part, axis=-1), parts)
  return total


def _spread(x: jax.Array, parts: Any) -> jax.Array:
  """[N, C_j, K, g, Q] as [N, C_l, K, g, R_l], like the last part."""
  shape = parts[-1].shape[:-1]
  if x.shape == shape:
    return x
  x = x.reshape(*x.shape[:4], shape[1] // x.shape[1], shape[4])
  return jnp.moveaxis(x, 4, 2).reshape(shape)


def _fold(x: jax.Array, part: jax.Array) -> jax.Array:
  """What `_spread` made, for a part: [N, C_j, K, g, Q, 1]."""
  shape = part.shape[:-1]
  if x.shape != shape:
    count = shape[1]
    x = x.reshape(x.shape[0], count, x.shape[1] // count, *x.shape[2:])
    x = jnp.moveaxis(x, 2, 4).reshape(shape)
  return x[..., None]
