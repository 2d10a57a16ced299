"""Finds sequences by their ids."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.arguments import as_bool
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import check_shape
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.queue.queue import SequenceStatus


def as_ids(ids: Any) -> Array:
  """Returns ids of sequences as int32[R]; raises for other types or shapes."""
  ids = as_int32("ids", ids)
  # R may be 0, which `check_shape` does not accept for a letter.
  rows = ids.shape[0] if ids.ndim == 1 else "R"
  check_shape("ids", ids, (rows,), ", a list of numbers")
  return jnp.asarray(ids)


def as_mask(mask: Any, rows: int) -> Array:
  """Returns `mask` as bool[R], all True for None; raises for other arrays."""
  if mask is None:
    return jnp.ones((rows,), bool)
  mask = as_bool("mask", mask)
  check_shape("mask", mask, (rows,), ", one for each row")
  return jnp.asarray(mask)


def as_counts(name: str, counts: Any, rows: int) -> Array:
  """Returns `counts` as int32[R]; raises for other types or shapes."""
  return jnp.asarray(as_int32(name, counts, (rows,), ", one for each row"))


def find(queue: Queue, ids: Array, mask: Array) -> tuple[Array, Array, Array]:
  """Finds the sequences with `ids`, int32[R], where `mask`, bool[R], is True.

  Returns:
    int32[R], the row of each in the queue, Q for none; int32[R], its status;
    int32[R], SKIPPED, BAD_SEQUENCE or OK.
  """
  exists = queue.status != SequenceStatus.EMPTY
  is_same = (ids[:, None] == queue.ids[None]) & exists[None]
  row = jnp.argmax(is_same, axis=1).astype(jnp.int32)
  # If `ids` has an id several times, all but the first get BAD_SEQUENCE.
  exists_once = jnp.any(is_same, axis=1) & ~indexing.any_earlier(ids, mask)
  code = first_code(
    (~mask, Status.SKIPPED), (~exists_once, Status.BAD_SEQUENCE)
  )
  row = jnp.where(code == Status.OK, row, queue.no_row)
  status = indexing.take(queue.status, row, fill=SequenceStatus.EMPTY)
  return row, status, code
