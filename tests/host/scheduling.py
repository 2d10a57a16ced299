"""Calls of a scheduler to a cache manager, for tests that follow traces."""

import contextlib
from typing import Any

import chex
import jax
import numpy as np

from jaxkv import FullAttention
from jaxkv import SlidingWindow
from jaxkv.host import Request
from tests.model_of_the_cache.manager import ReferenceManager

PAGE = 4
FULL = FullAttention(page_size=PAGE)
WINDOW = SlidingWindow(window=2 * PAGE, page_size=PAGE)
HYBRID = (FULL, WINDOW, WINDOW)
LONGEST = 64
"""Tokens of a sequence. Tests share few sizes, as each is compiled."""


def single(make: Any, **options: Any) -> Any:
  """Makes a manager of one group with 10 usable pages."""
  return make(11, (FULL,), LONGEST, **options)


def hybrid(make: Any, **options: Any) -> Any:
  """Makes a manager of three groups with 24 usable pages."""
  return make(25, HYBRID, LONGEST, **options)


def fill_pages(cache: Any) -> Any:
  """Fills three pages of each group; returns a request with the same prefix."""
  req = request("0", [*range(12), *range(100, 103)])
  assert admit(cache, req)[1] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
  return request("1", [*range(12), *range(200, 202)])


def reference(num_pages=11, groups=(FULL,), max_model_len=8192, **options):
  """Makes the reference model of the host manager."""
  return ReferenceManager(num_pages, groups, max_model_len, **options)


def request(name, tokens, **fields):
  return Request(name, list(tokens), **fields)


def admit(cache, request, new=None, **options):
  """Looks up and allocates; returns hit ids, and new ids or None."""
  pages, hit = cache.get_computed_pages(request)
  external = options.get("num_external_computed_tokens", 0)
  if new is None:
    new = request.num_tokens - hit - external
  out = cache.allocate_slots(request, new, hit, pages, **options)
  if out is None:
    return ids(pages), None
  request.num_computed_tokens += hit + external + new
  request.status = "running"
  return ids(pages), ids(out)


def decode(cache, request, tokens, **options):
  """Appends tokens and allocates pages for them; returns new ids or None."""
  request.token_ids.extend(tokens)
  new = request.num_tokens - request.num_computed_tokens
  out = cache.allocate_slots(request, new, **options)
  if out is None:
    return None
  request.num_computed_tokens += new
  return ids(out)


def hit_of(cache, request):
  pages, tokens = cache.get_computed_pages(request)
  return ids(pages), tokens


def ids(pages):
  return [list(map(int, column)) for column in pages.get_page_ids()]


def move_rows(moves: Any) -> list[list[int]]:
  """Returns device page, `saved_to` and `restored_from` of each move."""
  columns = (moves.page, moves.saved_to, moves.restored_from)
  rows = np.stack([np.asarray(column) for column in columns], axis=1)
  return rows[: int(moves.count)].tolist()


def references(cache, pages):
  """Returns the reference counts of pages."""
  pool = getattr(cache, "pool", None)
  counts = cache.state.pool.ref_count if pool is None else pool.refs
  return np.asarray(counts)[list(pages)].tolist()


def running(name="a", **fields):
  """Returns a running request in the state that a scheduler gives it."""
  fields = {"num_computed_tokens": 9, "status": "running", **fields}
  return request(name, range(9), **fields)


@contextlib.contextmanager
def unchanged(cache):
  """Checks that the block does not change the manager's state."""
  old_state = jax.tree.map(np.array, cache.state)
  pages = [cache.get_page_ids(name) for name in "abc"]
  yield
  chex.assert_trees_all_equal(
    jax.device_get(cache.state), old_state, strict=True
  )
  assert pages == [cache.get_page_ids(name) for name in "abc"]
