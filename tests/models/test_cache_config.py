"""Sizes of the pools of a decoder's cache, from bytes or pages."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv import rollout
from tests.engine import by_hand
from tests.models import tiny_decoders as tiny

_GIB = 2**30


def _layer(mixer: Any) -> models.Layer:
  return models.Layer(attention=mixer, mlp=models.Mlp(inner_dim=8))


def _decoder(*mixers: Any, dtype: Any = jnp.bfloat16) -> models.Decoder:
  layers = tuple(_layer(mixer) for mixer in mixers)
  return models.Decoder(vocab_size=31, embed_dim=16, layers=layers, dtype=dtype)


def _attention(heads: int, dim: int, window: int | None = None) -> Any:
  return models.Attention(
    num_heads=heads, num_kv_heads=heads, head_dim=dim, window=window
  )


_DELTA_NET = models.DeltaNet(
  num_key_heads=16,
  num_value_heads=32,
  key_dim=128,
  value_dim=128,
  kernel_size=4,
)
QWEN = _decoder(*((_DELTA_NET,) * 3 + (_attention(4, 256),)) * 8)
GEMMA_26B = _decoder(
  *((_attention(8, 256, 1024),) * 5 + (_attention(2, 512),)) * 5
)
GEMMA_31B = _decoder(
  *((_attention(16, 256, 1024),) * 5 + (_attention(4, 512),)) * 10
)
# One full layer after two windowed ones, twice.
SMALL = models.llama(
  vocab_size=11, num_layers=6, embed_dim=8, num_heads=4, num_kv_heads=2,
  head_dim=2, mlp_dim=16, windows=(64, 64, None),
)  # fmt: skip


def _bytes(decoder: models.Decoder, config: jaxkv.CacheConfig) -> int:
  kv = jax.eval_shape(functools.partial(models.init_kv, decoder, config))
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kv))


def test_states_take_no_more_than_three_a_sequence():
  """The least memory of Qwen3.5-9B, 64 sequences of 8,192 tokens."""
  config = models.cache_config(QWEN, num_slots=64, max_length=8192)
  # Eight attention layers, each with keys and values of four heads of 256.
  kv = 64 * 8192 * 8 * 2 * 4 * 256 * 2
  # The matrices of 32 heads, and three inputs of each channel.
  state = 24 * 4 * (32 * 128 * 128 + 3 * 8192)
  num_bytes = _bytes(QWEN, config)
  assert num_bytes <= 1.05 * (kv + 64 * 3 * state)
  # A state at every interval takes a quarter of the bytes of K/V.
  interval = config.state_retention.interval
  assert 4 * state <= interval * kv / (64 * 8192) < 4 * state + 16 * 32768
  assert 25 * _GIB < num_bytes < 27 * _GIB


@pytest.mark.parametrize(
  ("decoder", "windowed", "full", "limit"),
  [
    # Bytes of a token in the windowed layers and in the full ones.
    (GEMMA_26B, 25 * 2 * 8 * 256 * 2, 5 * 2 * 2 * 512 * 2, 55),
    (GEMMA_31B, 50 * 2 * 16 * 256 * 2, 10 * 2 * 4 * 512 * 2, 221),
  ],
  ids=["26B-A4B", "31B"],
)
def test_windows_take_little_more_than_their_tokens(
  decoder, windowed, full, limit
):
  """The least memory of Gemma 4, 64 sequences of 32,768 tokens."""
  config = models.cache_config(decoder, num_slots=64, max_length=32768)
  # A window of whole pages begins inside a page.
  needed = 64 * (32768 * full + (1024 + 16) * windowed)
  num_bytes = _bytes(decoder, config)
  assert needed < num_bytes <= min(1.05 * needed, limit * _GIB)
  assert len(config.groups) == 2


@pytest.mark.parametrize("decoder", [QWEN, GEMMA_26B, SMALL], ids=str)
def test_pools_fill_the_memory_with_equally_many_conversations(decoder):
  sizes = {"num_slots": 4, "max_length": 4096}
  smallest = models.cache_config(decoder, **sizes)
  memory = 3 * _bytes(decoder, smallest)
  config = models.cache_config(decoder, **sizes, memory=memory)
  kv = jax.eval_shape(functools.partial(models.init_kv, decoder, config))
  page_bytes = jaxkv.kv.page_bytes(kv)
  assert isinstance(page_bytes, tuple)
  assert memory - sum(page_bytes) < _bytes(decoder, config) <= memory
  extra = np.subtract(config.numbers.sizes, smallest.numbers.sizes)
  # A conversation has two states, the pages of a window, or all pages.
  pages = [
    2 if kind.holds_states else kind.most_pages(16, 0, 4096)
    for kind in config.groups
  ]
  low, high = extra / pages, (extra + 1) / pages
  assert max(low) < min(high) and min(extra) > 0


def test_too_little_memory_is_refused_with_the_least():
  sizes = {"num_slots": 2, "max_length": 1024}
  min_bytes = _bytes(SMALL, models.cache_config(SMALL, **sizes))
  message = (
    rf"`memory` must be at least {min_bytes} bytes for 2 sequences of 1024"
  )
  with pytest.raises(ValueError, match=message):
    models.cache_config(SMALL, **sizes, memory=min_bytes - 1)
  config = models.cache_config(SMALL, **sizes, memory=min_bytes)
  assert _bytes(SMALL, config) == min_bytes


def test_an_offload_policy_gets_the_bytes_of_the_pages():
  policy = jaxkv.OffloadPolicy(bytes_per_second=1e9, tokens_per_second=1e3)
  options = {"offload_pages": (4, 4), "offload_policy": policy}
  sizes = {"num_slots": 2, "max_length": 64, "memory": 2**20}
  config = models.cache_config(SMALL, **sizes, **options)
  kv = jax.eval_shape(functools.partial(models.init_kv, SMALL, config))
  assert config.page_bytes == jaxkv.kv.page_bytes(kv)
  assert config.num_pages == models.cache_config(SMALL, **sizes).num_pages
  # The caller's bytes are kept.
  options["page_bytes"] = (7, 9)
  config = models.cache_config(SMALL, num_slots=2, max_length=64, **options)
  assert config.page_bytes == (7, 9)


def test_a_number_of_pages_is_divided():
  """All pages are used; too few for all slots are enough for some."""
  for num_pages in (100, 150, 1000):
    config = models.cache_config(
      SMALL, num_slots=2, max_length=1024, num_pages=num_pages
    )
    assert num_pages - 1 <= config.total_pages <= num_pages
  with pytest.raises(ValueError, match="`num_pages` must be at least 89, for"):
    models.cache_config(SMALL, num_slots=2, max_length=1024, num_pages=88)
  config = models.cache_config(
    SMALL, num_slots=2, max_length=1024, num_pages=(30, 70)
  )
  assert config.num_pages == (30, 70)
  with pytest.raises(ValueError, match="`num_pages` must be None with `memory"):
    models.cache_config(
      SMALL, num_slots=2, max_length=1024, num_pages=99, memory=10**9
    )


def test_a_step_has_as_many_tokens_as_that_of_a_rollout():
  config = rollout.RolloutConfig()
  sizes = {"num_slots": 3, "max_length": 4096}
  assert models.cache_config(SMALL, **sizes) == models.cache_config(
    SMALL,
    **sizes,
    prefill_chunk=config.prefill_chunk,
    decode_tokens=config.decode_steps,
  )


def test_a_cache_in_one_pool_is_refused():
  groups = (jaxkv.SlidingWindow(64), jaxkv.FullAttention())
  config = jaxkv.CacheConfig(
    num_pages=100, page_size=16, num_slots=2, pages_per_slot=64, groups=groups
  )
  message = r"`config.groups` must be .*pool=1\).*models.cache_config"
  with pytest.raises(ValueError, match=message):
    models.init_kv(SMALL, config)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize(
  "mixers",
  [
    (_attention(2, 4, 16), _attention(2, 4, 16), _attention(2, 4)),
    (tiny.DELTA_NET, tiny.DELTA_NET, _attention(2, 4)),
  ],
  ids=["window", "states"],
)
def test_all_slots_run_in_the_least_memory(mixers, steps):
  """No sequence waits for pages, or is preempted."""
  decoder = _decoder(*mixers, dtype=jnp.float32)
  slots, prompt, new, chunk = 4, 40, 56, 16
  config = models.cache_config(
    decoder,
    num_slots=slots,
    max_length=prompt + new,
    page_size=4,
    prefill_chunk=chunk,
    decode_tokens=steps,
  )
  prompts = np.random.default_rng(0).integers(0, 31, (slots, prompt))
  state = rollout.init(
    jaxkv.init(config),
    by_hand.poisoned(models.init_kv(decoder, config)),
    rollout.Requests(prompts.astype(np.int32), [prompt] * slots),
    jax.random.key(0),
    rollout.RolloutConfig(
      max_new_tokens=new, prefill_chunk=chunk, decode_steps=steps
    ),
  )
  params = models.init_params(jax.random.key(0), decoder)
  forward = functools.partial(models.forward, config=decoder)
  state = jax.jit(functools.partial(rollout.generate, model=forward))(
    params, state
  )
  rollout.check(state)
  assert int(state.counters.preempted) == 0
  peaks = np.asarray(state.counters.peak_pages)
  assert np.all(peaks < config.num_pages)
  for kind, peak in zip(config.groups, peaks, strict=True):
    # The last state at a page end, and the running state.
    assert not kind.holds_states or peak == 2 * slots
  # Prompts take at most a step for each page, and then all slots decode.
  num_steps = math.ceil(prompt / 4) * slots + new
  assert int(state.counters.steps) <= num_steps + 2
  assert bool(jnp.all(rollout.generated(state).mask.sum(axis=1) == new))
