"""Failure is data: a code for every row, a sticky code in the state."""

import enum

import jax.numpy as jnp
from jax import Array


class Code(enum.IntEnum):
  """What became of one row of a call.

  OK: done.
  SKIPPED: masked out; nothing was asked, so nothing failed.
  OUT_OF_PAGES: the free pages do not suffice. Pressure rather than a mistake:
    retry when pages were given back.
  SLOT_FULL: the sequence would need more pages than a slot holds.
  BAD_SLOT: a slot number out of range.
  SLOT_IN_USE: the slot holds pages already.
  SLOT_EMPTY: the slot holds no page.
  BAD_LENGTH: a length or a count that is zero, negative or too large.
  NO_ROOM: more tokens than the slot's pages have room for.
  BAD_PAGE: a page number out of range, or the null page.
  NOT_CACHED: no page, or not this one, is in the prefix index.
  NOT_PINNED: the page has no pin to give back.
  STILL_HELD: some page is still referenced.
  RECYCLED: a page that would be needed was given back by `recycle`, or is one
    of a state that was never kept.
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


def first_code(*cases: tuple[Array, Code | Array]) -> Array:
  """The code of the first condition that holds, row by row, else OK."""
  code = jnp.int32(Code.OK)
  for condition, value in reversed(cases):
    code = jnp.where(condition, jnp.asarray(value, jnp.int32), code)
  return code


def is_failure(code: Array) -> Array:
  """Whether a row asked for something and did not get it."""
  return (code != Code.OK) & (code != Code.SKIPPED)


def sticky(error: Array, code: Array) -> Array:
  """The state's error after a call with these row codes.

  The first failure stays, except that a mistake replaces OUT_OF_PAGES:
  running out of pages is part of normal life, and must not hide a mistake.

  Args:
    error: int32[], the error so far.
    code: int32[...], the codes of the call's rows.

  Returns:
    int32[].
  """
  code = code.reshape(-1)
  mistake = is_failure(code) & (code != Code.OUT_OF_PAGES)
  pressure = code == Code.OUT_OF_PAGES
  first_mistake = code[jnp.argmax(mistake)]
  error = jnp.where(
    (error == Code.OK) & jnp.any(pressure), jnp.int32(Code.OUT_OF_PAGES), error
  )
  open_ = (error == Code.OK) | (error == Code.OUT_OF_PAGES)
  return jnp.where(open_ & jnp.any(mistake), first_mistake, error)
