"""Sizes the cache of a decoder."""

import functools
from typing import Any

import jax

from jaxkv._src.cache.config import CacheConfig
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
  step_tokens: int = 256,
  **options: Any,
) -> CacheConfig:
  """Sizes the pools of a decoder's cache.

  Every pool first gets the pages that `num_slots` sequences of `max_length`
  tokens need at the same time:

  | layers | pages of a running sequence |
  |---|---|
  | full attention | those of all its tokens |
  | window | those of the window and of the tokens of a step |
  | recurrent | the last state and the state of a step |

  and one more, which admission keeps free. The rest of the memory is for cached
  pages of sequences that ended. It is divided such that all pools can hold the
  same number of cached conversations. A conversation of `max_length` tokens has
  the pages of all its tokens, those of a window, or two states.

  The least memory in GiB, with K/V in bfloat16 and pages of 16 tokens:

  | model | sequences | least memory | per cached conversation |
  |---|---|---|---|
  | Qwen3.5-9B | 64 of 8,192 tokens | ? | ? |
  | Gemma 4 26B-A4B | 64 of 32,768 tokens | ? | ? |
  | Gemma 4 31B | 64 of 32,768 tokens | ? | ? |

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
    step_tokens: the maximum number of tokens of a sequence in a step. For a
      rollout this is `prefill_chunk + decode_steps - 1`.
    **options: other fields of `jaxkv.CacheConfig`.

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
    (45, 131)
    >>> config = cache_config(
    ...   decoder, num_slots=2, max_length=1024, memory=2**20
    ... )
    >>> config.num_pages
    (99, 826)
  """
  make_kv = functools.partial(
    init_kv, decoder, dtype=dtype, record_experts=record_experts
  )
  return sized_config(
    cache_groups(decoder),
    num_slots=num_slots,
    max_length=max_length,
    page_size=page_size,
    step_tokens=step_tokens,
    num_pages=num_pages,
    memory=memory,
    page_bytes=lambda config: page_bytes(
      jax.eval_shape(lambda: make_kv(config))
    ),
    options=options,
  )
