"""Failure is data: a status for every row, a sticky status in the state."""

import dataclasses
import enum

import jax
import jax.numpy as jnp
from jax import Array


class Status(enum.IntEnum):
  """What became of one row of a call.

  OK: done.
  SKIPPED: masked out. Nothing was asked, so nothing failed.
  OUT_OF_PAGES: too few pages are free. This is pressure, not a mistake: retry
    after pages were freed.
  SLOT_FULL: the sequence needs more pages than a slot holds.
  BAD_SLOT: a slot number is out of range, or named twice.
  SLOT_IN_USE: the slot holds pages already.
  SLOT_EMPTY: the slot holds no page.
  BAD_LENGTH: a length or a count is zero, negative or too large.
  NO_ROOM: there are more tokens than the slot's pages have room for.
  BAD_PAGE: a page number is out of range, or the null page.
  NOT_CACHED: the page, or every page of the prefix, is missing from the index.
  NOT_PINNED: the page has no pin to give back.
  STILL_HELD: a page is still referenced.
  RECYCLED: a page that is needed was given back by `recycle`, or a recurrent
    state that is needed was never kept.
  """

  OK = 0
  SKIPPED = 1
  OUT_OF_PAGES = 2
  SLOT_FULL = 3
  BAD_SLOT = 4
  SLOT_IN_USE = 5
  SLOT_EMPTY = 6
  BAD_LENGTH = 7
  NO_ROOM = 8
  BAD_PAGE = 9
  NOT_CACHED = 10
  NOT_PINNED = 11
  STILL_HELD = 12
  RECYCLED = 13


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """What a verb did with each row of its call.

  Attributes:
    code: a `Status` for each row.  # int32[R]
  """

  code: Array

  @property
  def ok(self) -> Array:
    """bool[R]: whether the row was done."""
    return self.code == Status.OK


def first_code(*cases: tuple[Array, Status | Array]) -> Array:
  """The status of the first condition that holds, row by row, else OK."""
  code = jnp.int32(Status.OK)
  for condition, value in reversed(cases):
    code = jnp.where(condition, jnp.asarray(value, jnp.int32), code)
  return code


def is_failure(code: Array) -> Array:
  """Whether a row asked for something and did not get it."""
  return (code != Status.OK) & (code != Status.SKIPPED)


def sticky(error: Array, code: Array) -> Array:
  """The state's error after a call.

  The first failure stays, except that a mistake replaces OUT_OF_PAGES: running
  out of pages is part of normal operation and must not hide a mistake.

  Args:
    error: int32[], the error so far.
    code: int32[...], the statuses of the call's rows.

  Returns:
    int32[].
  """
  code = code.reshape(-1)
  mistake = is_failure(code) & (code != Status.OUT_OF_PAGES)
  pressure = code == Status.OUT_OF_PAGES
  first_mistake = code[jnp.argmax(mistake)]
  error = jnp.where(
    (error == Status.OK) & jnp.any(pressure),
    jnp.int32(Status.OUT_OF_PAGES),
    error,
  )
  replaceable = (error == Status.OK) | (error == Status.OUT_OF_PAGES)
  return jnp.where(replaceable & jnp.any(mistake), first_mistake, error)
