"""The model of an engine, with the sizes of its cache."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

from jaxkv._src.arrays.arguments import as_int
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.hooks import Model
from jaxkv._src.engine.hooks import check_model
from jaxkv._src.engine.hooks import keyword
from jaxkv._src.models.decoder import cache_config as decoder_sizes
from jaxkv._src.models.decoder import init_kv as decoder_kv
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.sharding.mesh_axes import MeshAxes

_MAX_SLOTS = 64
"""The most slots of a cache that is sized by its bytes."""


class ServedModel(NamedTuple):
  """A model, with what its checkpoint says about it.

  Attributes:
    call: the function that `generate` calls.
    decoder: the description of a model of `jaxkv.models`; None for other ones.
    init_kv: makes the K/V memory of a cache.
    max_length: the longest sequence that the model was trained for; None if it
      is not known.
    stop_tokens: tokens that end a sequence.
    tokenizer: returns the tokenizer; None without one.
  """

  call: Model
  decoder: Decoder | None
  init_kv: Callable[[CacheConfig], Any]
  max_length: int | None = None
  stop_tokens: tuple[int, ...] = ()
  tokenizer: Callable[[], Any] | None = None


def served(
  model: Any, config: RolloutConfig, init_kv: Callable | None
) -> ServedModel:
  """Returns a model with its memory; see `Engine`.

  Raises:
    TypeError: `model` is no function.
    ValueError: `init_kv` is missing.
  """
  is_loaded = hasattr(model, "open_tokenizer")
  call = model.forward if is_loaded else model
  check_model(call, config)
  decoder = model.config if is_loaded else keyword(call, "config")
  if not isinstance(decoder, Decoder):
    decoder = None
  elif init_kv is None:
    init_kv = functools.partial(
      decoder_kv.init_kv, decoder, record_experts=config.record_experts
    )
  if init_kv is None:
    raise ValueError(
      "`init_kv` must be given for a model that is not one of jaxkv.models; "
      "give the function that makes the K/V memory of a CacheConfig."
    )
  if not is_loaded:
    return ServedModel(call, decoder, init_kv)
  return ServedModel(
    call,
    decoder,
    init_kv,
    max_length=model.max_length,
    stop_tokens=tuple(model.stop_tokens),
    tokenizer=lambda: model.tokenizer,
  )


def sized(
  model: ServedModel, cache: CacheConfig | int, config: RolloutConfig
) -> CacheConfig:
  """Returns the sizes of a cache, which may be given as a number of bytes.

  As many slots as fit, up to 64, take sequences of the longest length.

  Raises:
    TypeError: `cache` is neither a CacheConfig nor an int.
    ValueError: `cache` has too few bytes, or the model does not say how long a
      sequence can be.
  """
  if isinstance(cache, CacheConfig):
    return cache
  num_bytes = as_int("cache", cache)
  max_length = config.max_length or model.max_length
  if model.decoder is None or not max_length:
    raise ValueError(
      "`cache` must be a CacheConfig for this model, got a number of bytes; "
      "only a model of jaxkv.models and a longest sequence, such as "
      "RolloutConfig.max_length, say what a page takes."
    )
  sizes = functools.partial(
    decoder_sizes.cache_config,
    model.decoder,
    max_length=max_length,
    memory=num_bytes,
    record_experts=config.record_experts,
    prefill_chunk=config.prefill_chunk,
    decode_tokens=max(config.decode_steps, 1 + config.draft_tokens),
  )
  num_slots = _MAX_SLOTS
  while num_slots > 1:
    try:
      return sizes(num_slots=num_slots)
    except ValueError:
      # Too few bytes for so many sequences. With one slot, the error names the
      # least that is needed.
      num_slots //= 2
  return sizes(num_slots=1)


def longest_config(
  config: RolloutConfig, cache: CacheConfig, axes: MeshAxes | None
) -> RolloutConfig:
  """Returns options for sequences of any length that fits a slot."""
  longest = config.max_length or cache.slot_tokens
  return dataclasses.replace(
    config,
    max_length=longest,
    # A request says how many tokens it generates.
    max_new_tokens=max(longest - 1, 1),
    vocab_parts=config.vocab_parts if axes is None else axes.num_parts,
  )
