"""How a decoder computes what tokens do alone: all at once, or in tiles.

With `Decoder.numerics="exact"` a token has the same numbers, bit for bit, in a
rollout, in its score, and in a trainer; see `Decoder`.
"""

import functools
from collections.abc import Callable
from typing import Any

from jaxkv._src.exact import token_loop
from jaxkv._src.models.decoder import attention as attentions
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import DeltaNet
from jaxkv._src.models.decoder.params import Params

Each = Callable[..., Any]
"""`(function, weights, *arrays [B, T, ...])`: calls a function of them, which
treats each token alone, and closes over no arrays."""


def is_exact(decoder: Decoder) -> bool:
  """Whether tokens have the same numbers wherever they stand."""
  return decoder.numerics == "exact"


def token_wise(decoder: Decoder) -> Each:
  """How functions that treat each token alone are called."""
  if not is_exact(decoder):
    return lambda function, weights, *arrays: function(weights, *arrays)
  return functools.partial(token_loop.in_tiles, decoder.tile)


def recurrence(decoder: Decoder, attention: DeltaNet, weights: Params) -> Any:
  """The recurrence of a layer, see `memories.Nowhere.recurrent`."""
  run = functools.partial(attentions.recur, attention=attention)
  own = {"convolution": weights["convolution"]}
  if is_exact(decoder):
    return functools.partial(token_loop.recur, run, own)
  return functools.partial(run, own)
