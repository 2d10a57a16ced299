"""Sizes the cache of a decoder."""

import dataclasses
import functools
from typing import Any

import jax

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.config import StateRetention
from jaxkv._src.cache.config import by_pool
from jaxkv._src.cache.pool_sizes import sized_config
from jaxkv._src.kv.pools import page_bytes
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.init_kv import cache_groups
from jaxkv._src.models.decoder.init_kv import init_kv


def cache_config(
  decoder: Decoder,
  *,
  num_slots: int,
  max_length: int,
  page_size: int = 16,
  memory: int | None = None,
  num_pages: int | tuple[int, ...] | None = None,
  dtype: Any = None,
  record_experts: bool = False,
  prefill_chunk: int = 256,
  decode_tokens: int = 1,
  **options: Any,
) -> CacheConfig:
  """Sizes the pools of a decoder's cache.

  Every pool first gets the pages that `num_slots` sequences of `max_length`
  tokens need at the same time, with one to spare for each sequence and group:

  | layers | pages of a running sequence |
  |---|---|
  | full attention | those of all its tokens |
  | window | those of the window, and for one sequence those of a chunk |
  | recurrent | two states: the last one at a page end, and the running state |

  The rest of the memory is for cached pages of sequences that ended. It is
  divided such that all pools can hold the same number of cached conversations.
  A conversation of `max_length` tokens has the pages of all its tokens, those
  of a window, or two states.

  With K/V in bfloat16, states in float32, and pages of 16 tokens, 64 sequences
  need at least:

  | model | tokens | full attention | windows or states | per conversation |
  |---|---|---|---|---|
  | Qwen3.5-9B | 8,192 | 16.0 GiB | 9.5 GiB | 0.35 GiB |
  | Gemma 4 26B-A4B | 32,768 | 40.0 GiB | 12.9 GiB | 0.82 GiB |
  | Gemma 4 31B | 32,768 | 160.1 GiB | 51.8 GiB | 3.29 GiB |

  Args:
    decoder: the decoder.
    num_slots: B, the maximum number of sequences at a time.
    max_length: the maximum number of tokens of a sequence.
    page_size: S, tokens per page of all groups.
    memory: bytes of the arrays of `init_kv`; None for the least with which all
      slots can run. Page tables and other parts of the cache are not counted.
    num_pages: in place of `memory`, the pages of all pools together, which can
      be too few for all slots to run; or a tuple, the pages of each pool.
    dtype: see `init_kv`.
    record_experts: see `init_kv`.
    prefill_chunk: the maximum number of prompt tokens in a step; that of
      `jaxkv.rollout.RolloutConfig`.
    decode_tokens: the maximum number of tokens that a sequence decodes in a
      step: `decode_steps` of a rollout, or with drafts `1 + draft_tokens`.
    **options: other fields of `jaxkv.CacheConfig`. With an `OffloadPolicy`, the
      default of `page_bytes` is those of the decoder. With recurrent layers,
      the default of `prefix_retention_interval` is a `jaxkv.StateRetention`
      whose states at regular intervals take a quarter of the bytes of the K/V.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: a size is out of range, `memory` is too small for all slots,
      `num_pages` is too small for one sequence, or both are given.

  Examples:
    >>> from jaxkv import models
    >>> decoder = models.llama(
    ...   vocab_size=11, num_layers=6, embed_dim=8, num_heads=4,
    ...   num_kv_heads=2, head_dim=2, mlp_dim=16, windows=(64, 64, None)
    ... )
    >>> config = cache_config(decoder, num_slots=2, max_length=1024)
    >>> config.num_pages  # of four windowed and of two full layers
    (29, 131)
    >>> config = cache_config(
    ...   decoder, num_slots=2, max_length=1024, memory=2**20
    ... )
    >>> config.num_pages
    (85, 854)
  """
  groups = cache_groups(decoder)
  # A page has as many bytes in a small cache as in a large one.
  smallest = sized_config(
    groups, num_slots=1, max_length=1, page_size=page_size
  )
  make_kv = functools.partial(
    init_kv, decoder, smallest, dtype=dtype, record_experts=record_experts
  )
  bytes_by_pool = page_bytes(jax.eval_shape(make_kv))
  config = sized_config(
    groups,
    bytes_by_pool,
    num_slots=num_slots,
    max_length=max_length,
    page_size=page_size,
    prefill_chunk=prefill_chunk,
    decode_tokens=decode_tokens,
    num_pages=num_pages,
    memory=memory,
    **options,
  )
  has_states = any(group_kind.holds_states for group_kind in groups)
  is_set = "prefix_retention_interval" in options
  is_classic = config.prefix_rules == "classic"
  if not has_states or is_set or is_classic or not config.prefix_caching:
    return config
  retention = StateRetention(_interval(config, bytes_by_pool))
  return dataclasses.replace(config, prefix_retention_interval=retention)


def _interval(config: CacheConfig, bytes_by_pool: int | tuple[int, ...]) -> int:
  """Returns the tokens whose K/V take four times the bytes of a state."""
  costs = by_pool(bytes_by_pool)
  state_bytes = 0
  kv_bytes = 0
  for group_kind in config.groups:
    if group_kind.holds_states:
      state_bytes += costs[group_kind.pool]
    else:
      kv_bytes += costs[group_kind.pool]
  # Without K/V, no number of states is small beside them.
  num_pages = -(-4 * state_bytes // kv_bytes) if kv_bytes else 0
  return num_pages * config.page_size
