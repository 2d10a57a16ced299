"""Protocols of a caller's functions, their arguments, and checks of results."""

import functools
from typing import Any
from typing import NamedTuple
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.arguments import check_type
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.kv.kv_pages import KVPages
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.pools import pools_of
from jaxkv._src.kv.recurrent_pages import StatePages
from jaxkv._src.kv.view import Batch


class Rows(NamedTuple):
  """The sequence of each of R rows of logits, or of R tokens of a call.

  Attributes:
    numbers: int32[R], the row of the sequence in `state.queue`; Q for none.
    ids: int32[R], the id of the sequence.
    counts: int32[R], the number of tokens sampled so far in this turn.
    lengths: int32[R], the current length, including the prompt.
    last_tokens: int32[R], the last token of the sequence.
    extra: values of these sequences, a pytree of arrays [R, ...]; see
      `Requests`.
  """

  numbers: Array
  ids: Array
  counts: Array
  lengths: Array
  last_tokens: Array
  extra: Any


class Model(Protocol):
  """A function that computes the logits of the tokens of a call.

  It writes the keys and values of all tokens into the memory, attends through
  `jaxkv.kv`, and returns logits of the columns that need them. From the logits
  of all tokens, `logits[0].at[batch.columns].get(mode="clip")` selects them.
  `functools.partial(jaxkv.models.forward, config=decoder)` is a `Model`. If the
  bound `config` has exact numerics, tokens are sampled with them, too. Call
  `check_model` once for a model of your own: most mistakes raise no error.
  """

  def __call__(
    self, params: Any, batch: Batch, kv: Any, /
  ) -> tuple[Array, Any]:
    """Returns logits and the new K/V memory.

    Args:
      params: weights, as `generate` received them.
      batch: the tokens of the call in one row of C columns, with their
        positions, a `jaxkv.kv.PackedView` for each group of the cache, the X
        columns whose logits are needed, and the sequence of each column.
      kv: K/V memory, as `init` received it: a pool or a tuple of pools.

    Returns:
      Logits [X, V] of any float dtype, which sampling converts to float32; and
      `kv` with the same structure, shapes and dtypes, or None if the model
      writes nothing.
    """
    ...


class Process(Protocol):
  """A function that changes logits before tokens are sampled from them.

  Each call gets the logits for the next token of every slot.
  """

  def __call__(
    self, logits: Array, rows: Rows, extra: Any, /
  ) -> tuple[Array, Any]:
    """Returns new logits and new values of `extra`.

    Args:
      logits: float32[R, V], after penalties.
      rows: the sequence of each row of logits.
      extra: `rows.extra`, which a rollout carries from token to token.

    Returns:
      Logits float32[R, V] and `extra` with the same structure, shapes and
      dtypes. Both are ignored for rows that sample no token.
    """
    ...


class Draft(Protocol):
  """A function that proposes the next tokens of every slot's sequence."""

  def __call__(
    self, params: Any, rows: Rows, tokens: Array, /
  ) -> tuple[Array, Array]:
    """Returns draft tokens and the number of drafts of each row.

    Args:
      params: weights, as `generate` received them.
      rows: the sequence of each of B slots; none if the slot does not decode.
      tokens: int32[B, W], the tokens of each slot's sequence, then 0.

    Returns:
      Tokens int32[B, K], where K is `RolloutConfig.draft_tokens`, and the
      number of drafts in each row, int32[B]. A wrong draft costs time, but does
      not change the sampled tokens.
    """
    ...


def rows_of(queue: Queue, queue_rows: Array) -> Rows:
  """Returns the `Rows` of the sequences in `queue_rows`, int32[R]."""
  length = indexing.take(queue.length, queue_rows)
  return Rows(
    numbers=queue_rows,
    ids=indexing.take(queue.ids, queue_rows),
    counts=length - indexing.take(queue.start, queue_rows),
    lengths=length,
    last_tokens=indexing.take(queue.tokens, queue_rows, length - 1),
    extra=jax.tree.map(
      lambda leaf: indexing.take(leaf, queue_rows), queue.extra
    ),
  )


class StaticFunction:
  """A function as a static argument of `jax.jit`.

  JAX compares functions by identity, and so would compile again for each new
  `functools.partial`. Here, partials of one function with equal arguments are
  equal.
  """

  def __init__(self, function: Any):
    self.function = function
    self._key: Any = function
    if isinstance(function, functools.partial):
      keywords = tuple(sorted(function.keywords.items()))
      bound = *function.args, *(value for _, value in keywords)
      # The types too, because 1 == True. `repr` tells 0.0 from -0.0.
      kinds = tuple(
        (type(value), repr(value)) for value in bound if _is_number(value)
      )
      key = function.func, function.args, keywords, kinds
      try:
        hash(key)
        self._key = key
      except TypeError:
        # A bound array cannot be hashed. The partial is compared by identity.
        pass

  def __eq__(self, other: object) -> bool:
    return isinstance(other, StaticFunction) and self._key == other._key

  def __hash__(self) -> int:
    return hash(self._key)


def _is_number(value: Any) -> bool:
  return isinstance(value, bool | int | float)


def check_model(model: Any, config: RolloutConfig) -> None:
  """Raises unless `model` is callable and its `expert_axis` fits `config`."""
  if not callable(model):
    raise TypeError(
      "`model` must be a function, see `Model`, got "
      f"{type(model).__name__}; give functools.partial(models.forward, "
      "config=config)."
    )
  # Without this check, shards that make fewer calls would block the others.
  axis = keyword(model, "expert_axis")
  if axis not in (None, config.lockstep_axis):
    raise ValueError(
      "`expert_axis` of `model` must be the `lockstep_axis` of the rollout, "
      f"{config.lockstep_axis!r}, got {axis!r}; call jaxkv.sharding.generate "
      "with `MeshAxes.experts`, or omit `expert_axis` in `score`."
    )


def is_exact(model: Model) -> bool:
  """Returns True if the `config` bound in `model` has exact numerics."""
  return getattr(keyword(model, "config"), "numerics", None) == "exact"


def vocab_size_of(model: Model) -> int | None:
  """Returns the `vocab_size` of the `config` bound in `model`; None without."""
  return getattr(keyword(model, "config"), "vocab_size", None)


def keyword(model: Any, name: str) -> Any:
  """Returns a keyword argument that is bound in a `functools.partial`."""
  return getattr(model, "keywords", {}).get(name)


def check_result(logits: Any, new_kv: Any, kv: Pools, num_columns: int) -> None:
  """Raises unless a model returned float[X, V] and the updated memory.

  `new_kv` is None if the model writes nothing. A model that returns a pool of
  K/V or states as it received it did not write it.
  """
  hint = "let `model` return (logits, kv), in this order"
  check_type("logits", logits, jax.Array | np.ndarray, "an array", hint)
  if logits.shape[:-1] != (num_columns,):
    raise ValueError(
      f"`logits` must have the shape [{num_columns}, V], with one row for each "
      f"of batch.columns, got {list(logits.shape)}; select the rows with "
      'logits[0].at[batch.columns].get(mode="clip").'
    )
  if not jnp.issubdtype(logits.dtype, jnp.floating):
    raise TypeError(
      f"`logits` must be floats, got {logits.dtype}; return the output of the "
      "model's last layer."
    )
  if new_kv is not None:
    _check_memory(new_kv, kv)


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
  _check_shapes("process", "logits", new_logits, logits)
  _check_shapes("process", "extra", new_extra, extra)
  return new_logits, new_extra


def _check_shapes(
  function: str, name: str, value: Any, received: Any, *, hint: str = ""
) -> None:
  received_shapes = _shapes(received)
  shapes = _shapes(value)
  if jax.tree.flatten(received_shapes) != jax.tree.flatten(shapes):
    raise TypeError(
      f"`{name}` that `{function}` returns must have the structure, shapes and "
      f"dtypes of the `{name}` that it received, {received_shapes}, got "
      f"{shapes}{hint}."
    )


def _check_memory(new_kv: Any, kv: Pools) -> None:
  hint = "; return the memory after the last `write`"
  _check_shapes("model", "kv", new_kv, kv, hint=hint)
  for pool, new_pool in zip(pools_of(kv), pools_of(new_kv), strict=True):
    # A model without experts does not write `ExpertIdPages`.
    if not isinstance(pool, KVPages | StatePages):
      continue
    # A write to a traced array returns a new object.
    leaves = zip(jax.tree.leaves(pool), jax.tree.leaves(new_pool), strict=True)
    if all(leaf is new_leaf for leaf, new_leaf in leaves):
      raise ValueError(
        "`kv` that `model` returns must be the memory after `write`, got the "
        f"{type(pool).__name__} that it received; return the result of the "
        "last jaxkv.kv.write, or None for a model that writes nothing."
      )


def _shapes(tree: Any) -> Any:
  def describe(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
      return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}"

  return jax.tree.map(describe, tree)
