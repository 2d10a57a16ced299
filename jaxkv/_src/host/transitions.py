"""What else a manager asks of the device; the state is donated."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import masked
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.prefix import longest_prefix
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.verbs import free as releasing
from jaxkv._src.cache.verbs import reset as forgetting
from jaxkv._src.cpu_options import CPU_COMPILER_OPTIONS

transition = functools.partial(
  jax.jit, donate_argnums=0, compiler_options=CPU_COMPILER_OPTIONS
)
"""Compiles a function of a state, its first argument, which it consumes."""


class Found(NamedTuple):
  """What is cached of a request.

  Attributes:
    num_tokens: int32[].
    junction: int32[].
    stop: int32[G].
    pages: int32[G, P].
  """

  num_tokens: Array
  junction: Array
  stop: Array
  pages: Array


@functools.partial(jax.jit, compiler_options=CPU_COMPILER_OPTIONS)
def look_up(
  state: CacheState, tokens: Array, length: Array, salt: Array
) -> Found:
  """Finds the longest cached prefix of one request.

  Args:
    state: a cache with prefix caching.
    tokens: int32[1, T].
    length: int32[1].
    salt: uint32[1, 4].
  """
  found = longest_prefix.find(state, tokens, length, salt, length > 0)
  assert found is not None
  pages = jnp.where(longest_prefix.inside(found), found.pages, 0)
  return Found(
    num_tokens=found.num_cached[0],
    junction=found.junction[0],
    stop=found.stop[0],
    pages=pages[:, 0],
  )


@transition
def free(state: CacheState, slots: Array) -> CacheState:
  """Releases the sequences in slots int32[R], in order."""
  return releasing.free(state, slots)[0]


@transition
def evict(state: CacheState, pages: Array) -> CacheState:
  """Takes pages int32[X], all different, out of the index if they are in it."""
  valid = (pages > 0) & (pages < state.config.num_pages)
  pool, _ = page_pool.unpublish(state.pool, pages, valid)
  return dataclasses.replace(state, pool=pool)


@transition
def forget_new(state: CacheState, pages: Array) -> CacheState:
  """Takes pages int32[X] out of what `take_new_pages` tells."""
  if state.pool.new is None:
    return state
  place = masked.where_valid(pages > 0, pages)
  new = masked.put(state.pool.new, place, values=False)
  return dataclasses.replace(
    state, pool=dataclasses.replace(state.pool, new=new)
  )


@transition
def reset(state: CacheState) -> CacheState:
  """Takes all pages out of the index, of a cache in which none is held."""
  return forgetting.reset_prefix_cache(state)[0]
