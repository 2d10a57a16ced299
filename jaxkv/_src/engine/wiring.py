"""Checks the results of a model and of a `Process`, while they are traced."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.kv.kv_pages import KVPages
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.pools import pools_of
from jaxkv._src.kv.recurrent_pages import StatePages


def check_result(
  logits: Any, new_kv: Any, kv: Pools, shape: tuple[int, ...], name: str
) -> None:
  """Raises unless a model returned float[*shape, V] and the updated memory.

  `name` is the phrase that names the model in messages. `new_kv` is None if the
  model writes nothing.

  Raises:
    TypeError: `logits` is not an array of floats, or the structure, shapes or
      dtypes of `new_kv` are not those of `kv`.
    ValueError: the logits have another shape, or the model did not write a pool
      of K/V or states, but returned the pool that it received.
  """
  if not isinstance(logits, jax.Array | np.ndarray):
    raise TypeError(
      f"`logits` must be an array, got {type(logits).__name__}; let {name} "
      "return (logits, kv), in this order."
    )
  if logits.shape[:-1] != shape or logits.ndim != len(shape) + 1:
    sizes = ", ".join(map(str, shape))
    hint = "with one row for each of batch.columns"
    if len(shape) > 1:
      hint = f"the logits of all tokens, from {name}"
    raise ValueError(
      f"`logits` must have the shape [{sizes}, V], {hint}, got "
      f"{list(logits.shape)}; convert a function that returns logits of all "
      "tokens with jaxkv.rollout.all_logits."
    )
  if not jnp.issubdtype(logits.dtype, jnp.floating):
    raise TypeError(
      f"`logits` must be floats, got {logits.dtype}; return the output of the "
      "model's last layer."
    )
  if new_kv is not None:
    _check_memory(new_kv, kv, name)


def check_processed(
  results: Any, logits: Array, extra: Any
) -> tuple[Array, Any]:
  """Returns the results of a `Process`, or raises TypeError for invalid ones.

  They must be a pair with the structure, shapes and dtypes of the logits and of
  the `extra` that the `Process` received.
  """
  if not isinstance(results, tuple | list) or len(results) != 2:
    raise TypeError(
      f"`process` must return (logits, extra), got {_shapes(results)}; return "
      "the `extra` that it received if it changes only logits."
    )
  new_logits, new_extra = results
  for name, value, received in (
    ("logits", new_logits, logits),
    ("extra", new_extra, extra),
  ):
    before, after = _shapes(received), _shapes(value)
    if jax.tree.flatten(before) != jax.tree.flatten(after):
      raise TypeError(
        f"`{name}` that `process` returns must have the structure, shapes and "
        f"dtypes of the `{name}` that it received, {before}, got {after}."
      )
  return new_logits, new_extra


def _check_memory(new_kv: Any, kv: Pools, name: str) -> None:
  before, after = _shapes(kv), _shapes(new_kv)
  if before != after:
    raise TypeError(
      f"`kv` that {name} returns must have the structure, shapes and dtypes of "
      f"the `kv` that it received, {before}, got {after}; return the memory "
      "after the last `write`."
    )
  for old, new in zip(pools_of(kv), pools_of(new_kv), strict=True):
    # A model without experts does not write `ExpertIdPages`.
    if not isinstance(old, KVPages | StatePages):
      continue
    # A write to a traced array returns a new object.
    leaves = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    if all(leaf is new_leaf for leaf, new_leaf in leaves):
      raise ValueError(
        f"`kv` that {name} returns must be the memory after `write`, got the "
        f"{type(old).__name__} that it received; return the result of the last "
        "jaxkv.kv.write, or None for a model that writes nothing."
      )


def _shapes(tree: Any) -> Any:
  def describe(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
      return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}"

  return jax.tree.map(describe, tree)
