"""Pins: page references that a pool's user holds, not a request."""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool.page_pool import PoolState


def take(pool: PoolState, count: Array, width: int) -> tuple[PoolState, Array]:
  """Pops `count` pages from the free queue, with one pin and no key each.

  Takes nothing if fewer are free. Returns the pool and int32[width], the pages
  and then null pages.
  """
  wanted = jnp.where(count > pool.queue.num_free, 0, count)

  def trip(loop):
    done, pool, pages = loop
    pool, popped = page_pool.pop(pool, wanted - done, window=loops.WINDOW)
    place = indexing.where_valid(popped.valid, done + popped.rank)
    pages = indexing.put(pages, place, values=popped.pages)
    return done + jnp.sum(popped.valid, dtype=jnp.int32), pool, pages

  start = (jnp.int32(0), pool, jnp.zeros((width,), jnp.int32))
  _, pool, pages = lax.while_loop(lambda loop: loop[0] < wanted, trip, start)
  return add(pool, pages, pages > 0, 1), pages


def add(pool: PoolState, pages: Array, valid: Array, amount: int) -> PoolState:
  """Adds `amount` pins to the valid pages int32[X]."""
  place = indexing.where_valid(valid, pages)
  pins = indexing.add(pool.pin_count, place, values=amount)
  return dataclasses.replace(pool, pin_count=pins)
