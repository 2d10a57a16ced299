"""Memories of several pools: rows for their own pages, in one numbering."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import kv as memory
from jaxkv.results import Moves
from tests.kv.memory import draw
from tests.kv.memory import view

_PAGES, _STATES, _SIZE = 9, 7, 4
_CONFIG = jaxkv.CacheConfig(
  num_pages=(5, _PAGES, _STATES),
  page_size=_SIZE,
  num_slots=3,
  pages_per_slot=4,
  groups=(
    jaxkv.FullAttention(),
    jaxkv.SlidingWindow(6, pool=1),
    jaxkv.Recurrent(pool=2),
  ),
  offload_pages=(2, 3, 4),
)
_FIRST = _CONFIG.numbers.first_pages
_ALONE = dataclasses.replace(
  _CONFIG, num_pages=_PAGES, groups=(jaxkv.SlidingWindow(6),), offload_pages=0
)
_NO_PAGE = _CONFIG.no_page


def _filled(kv):
  """Fills a memory with different numbers."""
  leaves, structure = jax.tree.flatten(kv)
  values = [
    (jnp.arange(leaf.size) % 113).astype(leaf.dtype).reshape(leaf.shape)
    for leaf in leaves
  ]
  return jax.tree.unflatten(structure, values)


def _pages(config, group, dtype="float32"):
  return memory.init(
    config, num_layers=2, num_kv_heads=2, head_dim=8, dtype=dtype, group=group
  )


def _states(layers=3):
  shapes = {"a": ((3,), "float32"), "b": ((2, 4), "bfloat16")}
  return memory.init_states(_CONFIG, num_layers=layers, shapes=shapes)


def _all():
  """Makes memories of all classes, for three pools."""
  ids = memory.init_expert_ids(_CONFIG, num_layers=2, width=2, group=1)
  return _filled((_pages(_CONFIG, 0), _pages(_CONFIG, 1), _states(), ids))


def _equal(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)


class TestSizes:
  def test_a_memory_has_rows_of_one_pool(self):
    full, window, states, ids = _all()
    assert [x.num_pages for x in (full, window, states, ids)] == [5, 9, 7, 9]
    assert [x.first_page for x in (full, window, states, ids)] == [0, 5, 14, 5]
    assert states.states["a"].shape == (3 * _STATES, 3)

  def test_bytes_of_a_page_by_pool(self):
    """The expert ids are in the second pool."""
    kv_bytes = 2 * 2 * 2 * _SIZE * 8 * 4
    expected = kv_bytes, kv_bytes + 2 * _SIZE * 2, 3 * (3 * 4 + 8 * 2)
    assert memory.page_bytes(jax.eval_shape(_all)) == expected
    assert memory.page_bytes(_pages(_ALONE, 0)) == kv_bytes

  def test_memories_of_other_pools_are_refused(self):
    full, window, states, ids = _all()
    memory.check((full, window, states, ids), _CONFIG)
    with pytest.raises(ValueError, match=r"pool 2 of groups \(2,\); make"):
      memory.check((full, window), _CONFIG)
    other = dataclasses.replace(_CONFIG, num_pages=(5, _PAGES + 1, _STATES))
    with pytest.raises(ValueError, match="10 pages of 4 tokens from page 5 on"):
      memory.check((full, window, states), other)


def _shifted(table):
  """Converts rows of the second pool to page numbers."""
  table = np.asarray(table)
  table = np.where(table == _PAGES, _NO_PAGE - _FIRST[1], table)
  return np.where(table > 0, table + _FIRST[1], 0)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("columns", [1, 5])
def test_numbers_of_a_pool_are_rows_of_its_memory(dtype, columns):
  """Written and read as a pool alone; the third row lacks its first page."""
  table = [[3, 1, 9, 9], [7, 2, 9, 9], [0, 4, 5, 9]]
  starts = [2, 0, 6]
  counts = [columns, columns - 1, columns]
  k, v, q = (draw(seed, 3, columns, 2, 8) for seed in range(3))

  @jax.jit
  def run(kv, view):
    kv = memory.write(kv, view, 1, k, v)
    return kv, memory.attend(kv, view, 1, q)

  expected = run(_filled(_pages(_ALONE, 0, dtype)), view(table, starts, counts))
  kv, out = run(
    _filled(_pages(_CONFIG, 1, dtype)), view(_shifted(table), starts, counts)
  )
  np.testing.assert_array_equal(out, expected[1])
  _equal(jax.tree.leaves(kv), jax.tree.leaves(expected[0]))


def test_shared_pages_are_rows_too():
  table = [[3, 1, 9, 9], [3, 1, 2, 9], [5, 9, 9, 9]]
  q = draw(0, 3, 1, 2, 8)

  @functools.partial(jax.jit, static_argnums=2)
  def run(kv, view, refreshes):
    view = memory.share(kv, view, num_clusters=1, cluster_size=2)
    if refreshes:
      view = memory.refresh_shared(kv, view)
    return memory.attend(kv, view, 1, q)

  for refreshes in (False, True):
    counts = [1, 1, 1]
    expected = run(
      _filled(_pages(_ALONE, 0)), view(table, [7, 9, 2], counts), refreshes
    )
    out = run(
      _filled(_pages(_CONFIG, 1)),
      view(_shifted(table), [7, 9, 2], counts),
      refreshes,
    )
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("page", [0, 3, _FIRST[1], _FIRST[2], 16, _NO_PAGE, -1])
def test_pages_of_other_pools_are_never_written(page):
  """Neither is the first page of the memory's own pool."""
  _, window, states, ids = _all()
  where = view([[page] * 4], [0], [3])
  tokens = draw(0, 1, 3, 2, 8)
  _equal(memory.write(window, where, 1, tokens, tokens), window)
  _equal(
    memory.write_expert_ids(ids, where, 1, jnp.ones((1, 3, 2), jnp.int32)), ids
  )
  if page != 16:
    new = {"a": jnp.ones((1, 3)), "b": jnp.ones((1, 2, 4), jnp.bfloat16)}
    _equal(memory.write_state(states, where, 1, new), states)


def test_copies_stay_in_their_pools():
  """Pairs of pages of two pools, and the first page of a pool, are skipped."""
  kv = _all()
  src = jnp.asarray([2, 6, 15, 3, 8, _FIRST[1], 16, 17], jnp.int32)
  dst = jnp.asarray([1, 7, 20, 9, 4, 8, _FIRST[2], _NO_PAGE], jnp.int32)
  out = memory.copy(kv, src, dst)
  pairs = {0: [(2, 1)], 1: [(1, 2)], 2: [(1, 6)], 3: [(1, 2)]}
  for index, (old, new) in enumerate(zip(kv, out, strict=True)):
    for before, after in zip(*map(jax.tree.leaves, (old, new)), strict=True):
      shape = (old.num_layers, old.num_pages, *before.shape[1:])
      expected = np.array(before).reshape(shape)
      for source, target in pairs[index]:
        expected[:, target] = np.asarray(before).reshape(shape)[:, source]
      np.testing.assert_array_equal(np.asarray(after).reshape(shape), expected)


def test_moves_stay_in_their_pools():
  """A page of each pool is saved; then they return elsewhere in their pools."""
  kv = _all()
  offload = memory.init_offload(kv, _CONFIG)
  assert [x.shape[0] for x in offload.pages] == [2, 2, 3, 3, 4, 4, 3]
  memory.check(kv, _CONFIG, offload=offload)
  # The offloaded pages of the three pools have numbers from 0, 3 and 7 on.
  saved_to = [1, 5, 9]
  pages = [[2, 6, 15], [4, 9, 20]]
  no_pages = [Moves.NONE] * 3
  move = jax.jit(memory.move)
  out = kv
  for page, targets, sources in zip(
    pages, (saved_to, no_pages), (no_pages, saved_to), strict=True
  ):
    rows = (jnp.asarray(row, jnp.int32) for row in (page, targets, sources))
    names = ("page", "saved_to", "restored_from")
    moves = Moves(**dict(zip(names, rows, strict=True)), count=jnp.int32(3))
    out, offload = move(out, offload, moves)
  expected = memory.copy(kv, *(jnp.asarray(x, jnp.int32) for x in pages))
  _equal(out, expected)
