"""Checks that the cache, the memory and the prompts of a rollout fit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import check_shape
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import check_single
from jaxkv._src.kv.check import check
from jaxkv._src.kv.memory import KVPages
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.recurrent_pages import StatePages
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.config import RolloutConfig
from jaxkv._src.rollout.routing import check_experts


def check_random_key(key: Any) -> None:
  """Raises TypeError unless `key` is a key[] of `jax.random.key`."""
  dtype = getattr(key, "dtype", None)
  if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
    found = type(key).__name__ if dtype is None else dtype
    raise TypeError(
      f"`key` must be a jax.random.key, got {found}; make it with "
      "jax.random.key(seed)."
    )
  check_shape("key", key, ())


def check_memory(cache: CacheState, kv: Pools, config: RolloutConfig) -> None:
  """Raises unless a rollout can use the cache and its memory `kv`.

  Raises:
    TypeError: the memory does not hold pages.
    ValueError: they do not fit together, or a slot of the cache is in use.
  """
  check_pools(cache, kv, config)
  check_experts(cache.config, kv, config)
  if isinstance(cache.num_pages, Tracer):
    return
  if np.any(np.asarray(cache.num_pages)):
    raise ValueError(
      "`cache` must have no slot in use, got some; free them before a rollout."
    )


def check_pools(cache: CacheState, kv: Pools, config: RolloutConfig) -> None:
  """Raises unless the cache and its memory are supported and fit together."""
  check_single(cache)
  sizes = cache.config
  if len(set(sizes.page_sizes)) > 1:
    raise ValueError(
      "`cache` must have one page size for all groups, got "
      f"{sizes.page_sizes}: a rollout has one K/V memory."
    )
  if sizes.holds_encoder:
    raise ValueError(
      "`cache` must have no group of CrossAttention, got "
      f"{sizes.groups}: a rollout computes no encoder; write a loop with "
      "`jaxkv.kv.attend(causal=False)`."
    )
  check(kv, sizes)
  _check_kinds(sizes, kv, config)


def _check_kinds(sizes: CacheConfig, kv: Pools, config: RolloutConfig) -> None:
  """Raises ValueError unless each group is supported and has a pool."""
  pools = kv if isinstance(kv, tuple) else (kv,)
  for kind in sizes.groups:
    wanted = StatePages if kind.holds_states else KVPages
    if not any(isinstance(pool, wanted) for pool in pools):
      made = "init_states" if kind.holds_states else "init"
      raise ValueError(
        f"`kv` must have {wanted.__name__} for the layers of {kind}, got "
        f"{', '.join(type(pool).__name__ for pool in pools)}; make a tuple of "
        f"pools, one of them with jaxkv.kv.{made}."
      )
    if kind.num_speculative:
      raise ValueError(
        f"`Recurrent.num_speculative` must be 0 in a rollout, got {kind}: no "
        "state is computed on trial."
      )
    if kind.holds_states and config.draft_tokens:
      raise ValueError(
        "`RolloutConfig.draft_tokens` must be 0 with a recurrent group, got "
        f"{config.draft_tokens}: the state before a guess that was wrong would "
        "be lost."
      )


def most_pages(
  sizes: CacheConfig, in_flight: int, longest: int
) -> tuple[int, ...]:
  """Returns the maximum pages of one sequence of `longest` tokens, by group.

  A recurrent group holds the page of the last state and one for the next,
  because a step never passes the end of a page.
  """
  return tuple(
    min(2, -(-longest // size))
    if kind.holds_states
    else kind.most_pages(size, in_flight, longest)
    for kind, size in zip(sizes.groups, sizes.page_sizes, strict=True)
  )


def as_version(cache: CacheState, version: Array | int | None) -> Array:
  """Returns bool[], True if the cache's pages belong to weights `version`.

  Raises:
    TypeError: the version is not an integer.
    ValueError: it is not a scalar, or the pages are known to be of other
      weights; or it is None and the cache holds pages.
  """
  epoch, index = cache.epoch, cache.pool.index
  # NumPy, because in a trace jax would trace even concrete arrays.
  if version is None:
    if index is None or isinstance(index.buckets, Tracer):
      return jnp.ones((), bool)
    if not np.asarray(index.buckets).any():
      return jnp.ones((), bool)
    raise ValueError(
      "`version` must be given, because the cache holds pages of the weights "
      f"of version {int(epoch)}; give that one for the same weights, and call "
      "jaxkv.new_epoch, or jaxkv.rollout.update_weights, after a change."
    )
  if getattr(version, "dtype", None) == jnp.uint32:  # As `epoch` itself.
    version = jnp.asarray(version).astype(jnp.int32)
  number = as_int32("version", version)
  check_shape("version", number, ())
  if isinstance(number, Tracer) or isinstance(epoch, Tracer):
    return jnp.asarray(number).astype(jnp.uint32) == epoch
  if int(number) != int(epoch):
    raise ValueError(
      f"`version` must be {int(epoch)}, that of the weights which the cache's "
      f"pages belong to, got {int(number)}; call jaxkv.new_epoch, or "
      "jaxkv.rollout.update_weights, once for each change of the weights."
    )
  return jnp.ones((), bool)


def check_fits(
  sizes: CacheConfig,
  prompts: Array,
  lengths: Array,
  num_samples: Any,
  max_tokens: Array | None,
  config: RolloutConfig,
) -> None:
  """Raises ValueError unless the sequences fit into slots, rows and the pool.

  Traced numbers are not checked.
  """
  columns, width = prompts.shape[1], queue.width_of(prompts.shape[1], config)
  if width > sizes.slot_tokens:
    what = f"{columns} columns and {width - columns}"
    name = "`prompts` and `max_new_tokens`"
    if config.max_length:
      name, what = "`RolloutConfig.max_length`", str(width)
    raise ValueError(
      f"{name} must fit a slot of {sizes.slot_tokens} tokens, got {what}; "
      "raise CacheConfig.pages_per_slot."
    )
  if any(isinstance(x, Tracer) for x in (lengths, num_samples, max_tokens)):
    return
  longest = _longest(columns, lengths, num_samples, max_tokens, config)
  if longest > width:
    raise ValueError(
      f"`RolloutConfig.max_length` must be at least {longest}, for the longest "
      f"prompt and the tokens that it draws, got {width}."
    )
  needed = sum(most_pages(sizes, config.prefill_chunk, longest))
  if longest and needed > sizes.num_pages - 1:
    raise ValueError(
      f"`CacheConfig.num_pages` must be at least {needed + 1} for the longest "
      f"sequence of {longest} tokens, got {sizes.num_pages}."
    )


def _longest(
  columns: int,
  lengths: Any,
  num_samples: Any,
  max_tokens: Any,
  config: RolloutConfig,
) -> int:
  """Returns the maximum length of a sequence, 0 without sequences."""
  # NumPy, because in a trace jax would trace even concrete arrays.
  known = np.asarray(lengths)
  exists = np.full(known.shape, True)
  if num_samples is not None:
    exists = np.asarray(num_samples) > 0
  for row in np.flatnonzero(exists).tolist():
    if not 1 <= known[row] <= columns:
      raise ValueError(
        f"`lengths[{row}]` must be 1 .. {columns}, the tokens of a prompt, got "
        f"{known[row]}."
      )
  budget = np.full(known.shape, config.max_new_tokens)
  if max_tokens is not None:
    own = np.asarray(max_tokens).reshape(-1, config.num_samples)
    budget = np.minimum(budget, own.max(axis=1))
  return int((known + budget)[exists].max(initial=0))
