"""Settings that change nothing, for rows that later get settings."""

import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.sampling.padding import PADDING
from jaxkv._src.sampling.settings import READ_ONCE
from jaxkv._src.sampling.settings import RULES
from jaxkv._src.sampling.settings import LogitBias
from jaxkv._src.sampling.settings import Sampling


def neutral(num_sequences: int, *others: Sampling) -> Sampling:
  """Returns settings of Q sequences that change nothing, with given fields.

  The result has the fields of `others`, except those that are read only when a
  sequence is created, and room for their longest lists. It has no stop strings.

  Examples:
    >>> from jaxkv._src.sampling.settings import as_sampling
    >>> sampling = Sampling(top_k=[3, 4], stop_tokens=[2, 3], seed=1)
    >>> sampling = neutral(1, as_sampling(sampling, 2))
    >>> sampling.top_k, sampling.stop_tokens, sampling.seed
    (Array([0], dtype=int32), Array([[-1, -1]], dtype=int32), None)
  """

  def full(name: str, dtype: Any, fill: float) -> Array | None:
    # The name of a list can be that of one in `logit_bias`.
    read = operator.attrgetter(name)
    arrays = [read(other) for other in others if _has(other, name)]
    if not arrays:
      return None
    sizes = np.max([array.shape[1:] for array in arrays], axis=0)
    shape = num_sequences, *sizes.astype(int).tolist()
    return jnp.full(shape, fill, dtype)

  fields: dict[str, Any] = {
    name: full(name, rule.dtype, rule.neutral)
    for name, rule in RULES.items()
    if name not in READ_ONCE
  }
  for name in ("stop_tokens", "bad_words"):
    fields[name] = full(name, jnp.int32, PADDING)
  biased_tokens = full("logit_bias.tokens", jnp.int32, PADDING)
  if biased_tokens is not None:
    fields["logit_bias"] = LogitBias(
      tokens=biased_tokens, values=full("logit_bias.values", jnp.float32, 0)
    )
  return Sampling(**fields)


def _has(sampling: Sampling, name: str) -> bool:
  return getattr(sampling, name.partition(".")[0]) is not None
