"""What an encoder gets for each prompt of a rollout."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxkv._src.cache import ops
from jaxkv._src.cache.checks import as_int32
from jaxkv._src.cache.checks import check_shape
from jaxkv._src.cache.config import CacheConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderInputs:
  """The inputs of an encoder; the G samples of a prompt have one in common.

  Attributes:
    values: a pytree of arrays [P, ...], with an entry for each group of rows.
    lengths: tokens of each input.  # int32[P]
  """

  values: Any
  lengths: Array


def as_encoder_inputs(
  values: Any,
  lengths: Any,
  rows: int,
  sizes: CacheConfig,
  *,
  known: bool = True,
) -> EncoderInputs | None:
  """Checked inputs of an encoder; None for a cache without one.

  Args:
    values: a pytree of arrays [P, ...].
    lengths: int32[P].
    rows: P.
    sizes: of the cache.
    known: whether lengths that do not fit a slot raise.

  Raises:
    TypeError: the lengths are no integers.
    ValueError: what the cache needs is missing, or given in vain; an array has
      another number of rows, or a length does not fit a slot. Traced lengths
      are not checked.
  """
  if not sizes.holds_encoder:
    if values is not None or lengths is not None:
      raise ValueError(
        "`encoder_inputs` and `encoder_lengths` must be None, because the "
        "cache has no group of CrossAttention."
      )
    return None
  if values is None or lengths is None:
    raise ValueError(
      "`encoder_inputs` and `encoder_lengths` must be given, because the cache "
      "has a group of CrossAttention."
    )
  lengths = as_int32("encoder_lengths", lengths)
  check_shape("encoder_lengths", lengths, (rows,), ", one for each prompt")
  if known and not isinstance(lengths, Tracer):
    numbers = np.asarray(lengths)
    wrong = (numbers < 0) | (numbers > sizes.slot_tokens)
    for row in np.flatnonzero(wrong).tolist():
      raise ValueError(
        f"`encoder_lengths[{row}]` must be 0 .. {sizes.slot_tokens}, the "
        f"tokens of a slot, got {numbers[row]}; raise "
        "CacheConfig.pages_per_slot."
      )

  def checked(path: Any, leaf: Any) -> Array:
    array = jnp.asarray(leaf)
    if array.shape[:1] != (rows,):
      raise ValueError(
        f"`encoder_inputs{jax.tree_util.keystr(path)}` must have the shape "
        f"[{rows}, ...], a row for each prompt, got {list(array.shape)}."
      )
    return array

  values = jax.tree_util.tree_map_with_path(checked, values)
  return EncoderInputs(values=values, lengths=jnp.asarray(lengths))


def lengths_of(
  inputs: EncoderInputs | None, rows: Array, num_samples: int
) -> Array | None:
  """int32[R]: tokens of the encoder of some rows; None without an encoder.

  Args:
    inputs: of all prompts.
    rows: int32[R], of sequences; Q for none, which has 0 tokens.
    num_samples: G.
  """
  if inputs is None:
    return None
  return ops.take(inputs.lengths, ops.quotient(rows, num_samples))
