"""Expert ids of tokens: in the page of the token, in every layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkv
from jaxkv import kv as memory
from tests.kv.memory import LAYERS
from tests.kv.memory import PAGES
from tests.kv.memory import SIZE
from tests.kv.memory import TABLE
from tests.kv.memory import view
from tests.tools.pool_copies import pool_sized_rewrites

_WIDTH = 3


def _config(**changes):
  fields = {"num_pages": PAGES, "page_size": SIZE, "num_slots": 1}
  return jaxkv.CacheConfig(pages_per_slot=8, **(fields | changes))


def _make(dtype="uint8", **changes):
  return memory.init_expert_ids(
    _config(**changes), num_layers=LAYERS, width=_WIDTH, dtype=dtype
  )


def _numbers(seed, *shape, high=256):
  ids = np.random.default_rng(seed).integers(1, high, (*shape, _WIDTH))
  return jnp.asarray(ids, jnp.int32)


class TestInit:
  def test_sizes(self):
    groups = (jaxkv.SlidingWindow(3), jaxkv.FullAttention(page_size=8))
    config = _config(groups=groups)
    pages = memory.init_expert_ids(config, num_layers=5, width=2, group=1)
    assert pages.values.shape == (5 * PAGES, 8, 2)
    assert (pages.num_pages, pages.page_size, pages.width) == (PAGES, 8, 2)
    assert pages.values.dtype == np.uint8 and pages.group == 1
    memory.check(pages, config)

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"num_layers": 0}, "`num_layers` must be .* got 0"),
      ({"width": 0}, "`width` must be .* got 0"),
      ({"width": 1.5}, "`width` must be .* got 1.5"),
      ({"num_layers": 2**30}, "`num_layers` .* fits int32, got 1073741824"),
      ({"group": 1}, "`group` must be from 0 to 0, got 1"),
      ({"dtype": "int32"}, "`dtype` must be one of uint8, uint16, got int32"),
      ({"dtype": "u3"}, "`dtype` must be one of uint8, uint16, got 'u3'"),
    ],
  )
  def test_bad_arguments(self, changes, message):
    arguments = {"num_layers": 2, "width": 1, **changes}
    with pytest.raises((TypeError, ValueError), match=message):
      memory.init_expert_ids(_config(), **arguments)


class TestWriteAndRead:
  def test_ids_are_written_at_their_tokens(self):
    """Positions 6 .. 10 of row 0, 3 and 4 of row 1; row 2 has no pages."""
    pages = _make()
    new = _numbers(0, 3, 5)
    where = view(TABLE, [6, 3, 0], [5, 2, 3])
    out = jax.jit(memory.write_expert_ids)(pages, where, jnp.int32(1), new)
    values = np.zeros(pages.values.shape, np.uint8)
    for row, start, count in ((0, 6, 5), (1, 3, 2)):
      for column in range(count):
        page = TABLE[row][(start + column) // SIZE] + PAGES
        values[page, (start + column) % SIZE] = new[row, column]
    np.testing.assert_array_equal(out.values, values)
    lengths = jnp.asarray([10, 5, 3], jnp.int32)
    read = memory.read_expert_ids(out, where.page_table, lengths)
    assert read.shape == (3, 5 * SIZE, LAYERS, _WIDTH)
    assert read.dtype == np.int16
    expected = np.full(read.shape, -1)
    expected[0, :10] = 0
    expected[0, 6:10, 1] = new[0, :4]
    expected[1, :5] = 0
    expected[1, 3:5, 1] = new[1, :2]
    np.testing.assert_array_equal(read, expected)

  def test_ids_of_16_bits(self):
    new = _numbers(1, 1, 2, high=2**16)
    where = view([[3]], [1], [2])
    out = memory.write_expert_ids(_make("uint16"), where, 2, new)
    read = memory.read_expert_ids(
      out, where.page_table, jnp.asarray([3], jnp.int32)
    )
    assert read.dtype == np.int32
    np.testing.assert_array_equal(read[0, 1:3, 2], new[0])

  @pytest.mark.parametrize(
    ("entry", "start"),
    [(0, 0), (PAGES, 0), (PAGES + 3, 0), (-1, 0), (3, SIZE), (3, -2)],
  )
  def test_invalid_entries_write_nothing(self, entry, start):
    where = view([[entry]], [start], [2])
    out = memory.write_expert_ids(
      _make(), where, jnp.int32(1), _numbers(0, 1, 2)
    )
    np.testing.assert_array_equal(out.values, 0)

  @pytest.mark.parametrize("entry", [0, PAGES, PAGES + 3, -1, 2**31 - 1])
  def test_invalid_entries_read_minus_one(self, entry):
    pages = dataclasses.replace(_make(), values=_make().values + 7)
    table = jnp.asarray([[entry, 3]], jnp.int32)
    read = memory.read_expert_ids(
      pages, table, jnp.asarray([SIZE + 2], jnp.int32)
    )
    np.testing.assert_array_equal(read[0, :SIZE], -1)
    np.testing.assert_array_equal(read[0, SIZE : SIZE + 2], 7)
    np.testing.assert_array_equal(read[0, SIZE + 2 :], -1)

  def test_write_through_a_packed_view(self):
    """Two rows that decode, then chunks of three tokens and of one."""
    decode = view(TABLE[:2], [6, 3], [1, 1])
    prefill = view([[4, 8], [11, 0]], [2, 0], [3, 1])
    packed = memory.PackedView(decode=decode, prefill=prefill)
    new = _numbers(2, 1, 8)  # two columns are padding
    out = memory.write_expert_ids(_make(), packed, 0, new)
    targets = [(9, 2), (7, 3), (4, 2), (4, 3), (8, 0), (11, 0)]
    expected = np.zeros(out.values.shape, np.uint8)
    for column, (page, offset) in enumerate(targets):
      expected[page, offset] = new[0, column]
    np.testing.assert_array_equal(out.values, expected)

  @pytest.mark.parametrize(
    ("values", "error", "message"),
    [
      ([[[1] * _WIDTH]], TypeError, "`values` must be an array, got list"),
      (np.ones((1, 2, _WIDTH)), TypeError, "`values` must be integers"),
      (np.ones((1, 2, 1), int), ValueError, r"`values` must be \[B, T, 3\]"),
      (np.ones((2, 2, _WIDTH), int), ValueError, r"`values` must be \[1, ..."),
    ],
  )
  def test_bad_values(self, values, error, message):
    with pytest.raises(error, match=message):
      memory.write_expert_ids(_make(), view([[3]], [0], [1]), 0, values)

  def test_layer_out_of_range_is_refused(self):
    with pytest.raises(ValueError, match="`layer` must be from 0 to 2, got 3"):
      memory.write_expert_ids(
        _make(), view([[3]], [0], [1]), 3, _numbers(0, 1, 1)
      )


def test_copy_of_kv_pages_and_expert_ids():
  """Page 3 over page 4 in every layer; the null page stays as it is."""
  kv = memory.init(_config(), num_layers=1, num_kv_heads=1, head_dim=8)
  pages = _make()
  new = _numbers(3, 1, 2)
  for layer in range(LAYERS):
    pages = memory.write_expert_ids(pages, view([[3]], [1], [2]), layer, new)
  src = jnp.asarray([3, 3], jnp.int32)
  dst = jnp.asarray([4, 0], jnp.int32)
  out = jax.jit(memory.copy)((kv, pages), src, dst)[1]
  memory.check((kv, out), _config())
  table = jnp.asarray([[4]], jnp.int32)
  read = memory.read_expert_ids(out, table, jnp.asarray([SIZE], jnp.int32))
  for layer in range(LAYERS):
    np.testing.assert_array_equal(read[0, 1:3, layer], new[0])
    np.testing.assert_array_equal(out.values[layer * PAGES], 0)


def test_loops_are_in_place():
  """A token loop around a layer loop copies and converts no page.

  The next step may overwrite what a step reads at its end.
  """
  pages = _make(num_pages=4000)
  table = jnp.arange(1, 9, dtype=jnp.int32).reshape(2, 4)

  def token(pages, step):
    where = view(table, jnp.full((2,), step, jnp.int32), [1] * 2)
    new = jnp.full((2, 1, _WIDTH), step, jnp.int32)

    def layer(index, pages):
      return memory.write_expert_ids(pages, where, index, new)

    pages = lax.fori_loop(0, LAYERS, layer, pages)
    pages = memory.copy(pages, where.starts, where.starts + 30)
    return pages, memory.read_expert_ids(pages, table[:1], step[None] + 1)

  def run(pages):
    return lax.scan(token, pages, jnp.arange(9, dtype=jnp.int32))

  compiled = jax.jit(run, donate_argnums=0).lower(pages).compile()
  assert pool_sized_rewrites(compiled, pages.values.shape) == []
