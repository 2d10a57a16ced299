"""Chooses between fast and exact numerics, see `Decoder.numerics`."""

import functools
from collections.abc import Callable
from typing import Any

from jaxkv._src.exact import token_loop
from jaxkv._src.models.decoder import attention as attentions
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import DeltaNet
from jaxkv._src.models.decoder.params import Params

TokenWise = Callable[..., Any]
"""A call with `(function, weights, *arrays)` returns `function(weights,
*arrays)`, for arrays [B, T, ...]. The function must compute each token
independently and must not close over arrays."""


def is_exact(decoder: Decoder) -> bool:
  """Returns True if the decoder uses exact numerics."""
  return decoder.numerics == "exact"


def token_wise(decoder: Decoder) -> TokenWise:
  """Returns a `TokenWise`, which runs tile by tile if numerics are exact."""
  if not is_exact(decoder):
    return lambda function, weights, *arrays: function(weights, *arrays)
  # A tile fixes the number of tokens in a product, on which rounding depends.
  return functools.partial(token_loop.in_tiles, decoder.tile)


def recurrence(decoder: Decoder, attention: DeltaNet, weights: Params) -> Any:
  """Returns the `recurrent_pages.Recurrence` of a layer."""
  run = functools.partial(attentions.recur, attention=attention)
  weights = {"convolution": weights["convolution"]}
  if is_exact(decoder):
    # Rounding depends on how tokens are chunked, so tokens run one by one.
    return functools.partial(token_loop.recur, run, weights)
  return functools.partial(run, weights)
