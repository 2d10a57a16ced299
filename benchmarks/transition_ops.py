"""The operations that `transitions.py` times, and the states they run on."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxkv

PAGE_SIZE = 16
PROMPT = 4096
PAGES = (4096, 65536, 262144)
STEPS = 512
SHORT, LONG = 128, 1008  # tokens of a sequence in decode_step
GROUPS = {
  "full": (jaxkv.FullAttention(),),
  "hybrid": (jaxkv.FullAttention(), *[jaxkv.SlidingWindow(1024)] * 5),
  "pools": (jaxkv.FullAttention(), jaxkv.SlidingWindow(1024, pool=1)),
}
NUM_LONG = 96  # sequences of a hybrid that are longer than the window
LONG_HYBRID = (1024, 1536)  # their first and last lengths
FREED = 16
FREED_PAGES = 64


def config_of(slots: int, pages: int, mode: str = "full") -> jaxkv.CacheConfig:
  """Returns the config of a cache for prompts of PROMPT tokens."""
  groups = GROUPS[mode]
  return jaxkv.CacheConfig(
    num_pages=(pages,) * (1 + max(group_kind.pool for group_kind in groups)),
    page_size=PAGE_SIZE,
    num_slots=slots,
    pages_per_slot=PROMPT // PAGE_SIZE,
    groups=groups,
  )


def pages_of_group(config: jaxkv.CacheConfig) -> int:
  """Returns the pages that each group can have at the same time."""
  # The first page of a pool is never given to a sequence.
  pools = zip(config.numbers.sizes, config.groups_of_pools, strict=True)
  return min((num_pages - 1) // len(groups) for num_pages, groups in pools)


class Op(NamedTuple):
  """A transition to time at one size.

  Attributes:
    name: the row's `op`.
    mode: the row's `mode`.
    steps: the number of steps in a timed call.
    prepare: `(state, rng) -> (state, inputs)`, untimed.
    step: `(state, inputs, step index) -> (state, int32[])`.
    expected: the sum of the int32 results of all steps; None if it varies.
  """

  name: str
  mode: str
  steps: int
  prepare: Callable[..., tuple[jaxkv.CacheState, Any]]
  step: Callable[..., tuple[jaxkv.CacheState, Array]]
  expected: int | None


def random_tokens(rng, shape) -> Array:
  return jnp.asarray(rng.integers(0, 2**31 - 1, shape, np.int32))


def fill_slots(state, tokens, lengths):
  """Fills the first slots with new sequences of these lengths."""
  num_tokens = np.zeros(state.config.num_slots, np.int32)
  num_tokens[: len(lengths)] = lengths
  state, allocated = jaxkv.allocate(state, jnp.asarray(num_tokens))
  state, committed = jaxkv.commit(state, tokens, jnp.asarray(num_tokens))
  assert allocated.ok.all() and committed.ok.all()
  return state


def free_all(state, rng):
  """Fills the pages of all slots, so that all are cached, and frees them."""
  room = state.num_pages[:, 0] * state.config.page_size - state.length
  tokens = random_tokens(rng, (state.config.num_slots, PROMPT))
  state, committed = jaxkv.commit(state, tokens, room)
  assert committed.ok.all()
  return jaxkv.free(state, mask=state.num_pages[:, 0] > 0)[0]


def full_cache(config: jaxkv.CacheConfig, rng) -> jaxkv.CacheState:
  """Returns a cache whose pages are all cached and free."""
  state = jaxkv.init(config)
  # All groups take the same number of pages. The remaining pages stay uncached,
  # so the cache hands them out first.
  usable = pages_of_group(config)
  left = usable
  while left > 0:
    lengths = []
    while left > 0 and len(lengths) < config.num_slots:
      lengths.append(min(left, config.pages_per_slot) * config.page_size)
      left -= lengths[-1] // config.page_size
    tokens = random_tokens(rng, (config.num_slots, PROMPT))
    state = free_all(fill_slots(state, tokens, lengths), rng)
  assert len(jaxkv.cached_pages(state)) == usable * config.num_groups
  return state


def decode_lengths(
  config: jaxkv.CacheConfig, mode: str
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the lowest initial length and the final length of each sequence."""
  slots, page_size = config.num_slots, config.page_size
  lowest, highest = np.zeros((2, slots), np.int32)
  highest[:] = (
    LONG if mode == "long" else min(SHORT, (PAGES[0] - 1) // slots * page_size)
  )
  if config.skips_pages:
    lowest[:NUM_LONG], highest[:NUM_LONG] = LONG_HYBRID
  return lowest, highest


def decode_op(config: jaxkv.CacheConfig, mode: str) -> Op:
  """Returns a decode step of all slots; no steps if sequences do not fit."""
  slots, page_size = config.num_slots, config.page_size
  lowest, highest = decode_lengths(config, mode)
  fits = highest.sum() < pages_of_group(config) * page_size
  longest = jnp.asarray(highest)
  nobody = jnp.zeros((4,), jnp.int32)

  def prepare(state, rng):
    lengths = np.arange(slots) % page_size
    pages = rng.integers(lowest // page_size, highest // page_size, slots)
    lengths += page_size * pages
    tokens = random_tokens(rng, (slots, PROMPT))
    state = fill_slots(free_all(state, rng), tokens, lengths)
    return jaxkv.recycle(state)[0], tokens[:, 0]

  def step(state, first, trip):
    tokens = first * (2 * trip + 1)
    state, _ = jaxkv.recycle(state)
    state, allocated = jaxkv.allocate(state, jnp.ones((slots,), jnp.int32))
    state, _ = jaxkv.commit(
      state, tokens[:, None], allocated.ok.astype(jnp.int32)
    )
    state, _ = jaxkv.free(state, mask=state.length >= longest)
    state, _ = jaxkv.admit(
      state,
      nobody,
      jnp.zeros((4, 256), jnp.int32),
      nobody,
      mask=jnp.zeros((4,), bool),
    )
    return state, jnp.sum(allocated.ok, dtype=jnp.int32)

  steps = STEPS if fits else 0
  return Op("decode_step", mode, steps, prepare, step, steps * slots)


def allocate_op(config: jaxkv.CacheConfig) -> Op:
  slots, page_size = config.num_slots, config.page_size
  free = config.total_pages - 1 - slots
  steps = min(STEPS, free * page_size // slots - page_size)

  def prepare(state, rng):
    state, _ = jaxkv.allocate(
      free_all(state, rng), jnp.ones((slots,), jnp.int32)
    )
    lengths = jnp.arange(slots, dtype=jnp.int32) % page_size
    tokens = random_tokens(rng, (slots, PROMPT))
    return jaxkv.commit(state, tokens, lengths)[0], ()

  def step(state, _, trip):
    state, out = jaxkv.allocate(state, jnp.full((slots,), trip + 1, jnp.int32))
    return state, jnp.sum(out.ok, dtype=jnp.int32)

  return Op("allocate", "", steps, prepare, step, steps * slots)


def prompt_ops(config: jaxkv.CacheConfig) -> list[Op]:
  """Returns `match` and `admit` of cached and of new prompts."""
  slots = config.num_slots
  columns = PROMPT // config.page_size
  steps = min(slots, (config.total_pages - 1) // (columns + 1), 64)

  def cached(state, rng):
    state = free_all(state, rng)
    tokens = random_tokens(rng, (slots, PROMPT))
    state = fill_slots(state, tokens, [PROMPT] * steps)
    return free_all(state, rng), tokens[:steps, None]

  def unknown(state, rng):
    return free_all(state, rng), random_tokens(rng, (steps, 1, PROMPT))

  def match(state, prompts, trip):
    out = jaxkv.match(state, prompts[trip], jnp.full((1,), PROMPT, jnp.int32))
    # XLA would remove the search if the pages were not used.
    used = jnp.sum(out.pages < 0, dtype=jnp.int32)
    return state, out.num_cached_tokens[0] + used

  def admit(state, prompts, trip):
    length = jnp.full((1,), PROMPT, jnp.int32)
    state, out = jaxkv.admit(state, trip[None], prompts[trip], length)
    return state, out.num_cached_tokens[0] - (~out.ok[0]).astype(jnp.int32)

  hits = steps * (PROMPT - config.page_size)
  return [
    Op("match_4096", "all_hit", steps, cached, match, hits),
    Op("match_4096", "none_hit", steps, unknown, match, 0),
    Op("admit_4096", "all_hit", steps, cached, admit, hits),
    Op("admit_4096", "none_hit_evicting", steps, unknown, admit, 0),
  ]


def free_op(
  config: jaxkv.CacheConfig, count: int = FREED, pages: int = FREED_PAGES
) -> Op:
  """Returns `free` of `count` sequences of `pages` pages."""
  max_sequences = min(config.num_slots, (config.total_pages - 1) // pages)
  steps = min(max_sequences // count, 64)

  def prepare(state, rng):
    tokens = random_tokens(rng, (config.num_slots, PROMPT))
    lengths = [pages * config.page_size] * (steps * count)
    return fill_slots(free_all(state, rng), tokens, lengths), ()

  def step(state, _, trip):
    slots = trip * count + jnp.arange(count, dtype=jnp.int32)
    state, out = jaxkv.free(state, slots=slots)
    return state, jnp.sum(out.ok, dtype=jnp.int32)

  return Op("free_16", "cached", steps, prepare, step, steps * count)
