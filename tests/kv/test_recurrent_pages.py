"""States of recurrent layers: read before a token, written after it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkv
from jaxkv import kv as memory
from tests.kv.memory import draw
from tests.kv.memory import view
from tests.tools.pool_copies import pool_sized_rewrites

LAYERS, PAGES, SIZE = 3, 24, 4
_ALONE = (jaxkv.Recurrent(),)
TABLE = [[5, 9, 2, 24, 24], [7, 1, 24, 24, 24], [0, 0, 3, 24, 24]]
SHAPES = {"conv": ((6, 3), "bfloat16"), "delta": ((2, 4, 4), "float32")}


def config(pages=PAGES, page_size=SIZE, slots=3, groups=_ALONE, **more):
  return jaxkv.CacheConfig(
    num_pages=pages,
    page_size=page_size,
    num_slots=slots,
    pages_per_slot=8,
    groups=groups,
    **more,
  )


_HYBRID = config(groups=(jaxkv.FullAttention(), jaxkv.Recurrent()))


def make(shapes=None, **changes):
  """Small states."""
  return memory.init_states(
    config(**changes), num_layers=LAYERS, shapes=shapes or SHAPES
  )


def new_states(seed, rows=3):
  return {
    "conv": draw(seed, rows, 6, 3, dtype="bfloat16"),
    "delta": draw(seed + 1, rows, 2, 4, 4),
  }


def poisoned():
  """States of NaN everywhere."""
  pages = make()
  nan = {
    name: np.full(array.shape, np.nan, dtype).view(array.dtype)
    for (name, array), dtype in zip(
      pages.states.items(), (jnp.bfloat16, np.float32), strict=True
    )
  }
  return dataclasses.replace(pages, states=jax.tree.map(jnp.asarray, nan))


class TestInit:
  def test_sizes(self):
    pages = make()
    assert pages.states["conv"].shape == (LAYERS * PAGES, 6, 3)
    assert pages.states["conv"].dtype == np.uint16  # bits, on a CPU
    assert pages.states["delta"].shape == (LAYERS * PAGES, 2, 4, 4)
    assert pages.dtypes == (("conv", "bfloat16"), ("delta", "float32"))
    assert (pages.num_pages, pages.page_size) == (PAGES, SIZE)

  def test_pages_have_the_size_of_their_group(self):
    groups = (jaxkv.FullAttention(), jaxkv.Recurrent(page_size=8))
    pages = make(groups=groups)
    assert pages.page_size == 8

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"shapes": {}}, "`shapes` must be one array or more"),
      ({"shapes": {"a": ((0,), "float32")}}, r"`shapes\['a'\]` .* least 1"),
      ({"shapes": {"a": ((2,), "int8")}}, r"`shapes\['a'\]\[1\]` .* got int8"),
      ({"shapes": {"a": ((2,), "f3")}}, r"`shapes\['a'\]\[1\]` .* got 'f3'"),
      ({"num_layers": 0}, "`num_layers` must be .* got 0"),
      ({"num_layers": 2**30}, "`num_layers` .* fits int32, got 1073741824"),
      ({"group": 0}, "`group` must be a recurrent one, got 0"),
      ({"group": 2}, "`group` must be from 0 to 1, got 2"),
    ],
  )
  def test_bad_arguments(self, changes, message):
    arguments = {"num_layers": 2, "shapes": SHAPES, **changes}
    with pytest.raises(ValueError, match=message):
      memory.init_states(_HYBRID, **arguments)

  def test_configs_without_a_recurrent_group_are_refused(self):
    with pytest.raises(
      ValueError, match="`config` must have a recurrent group"
    ):
      make(groups=(jaxkv.FullAttention(),))


class TestReadAndWrite:
  def test_state_is_in_the_page_of_the_last_token(self):
    pages = make()
    new = new_states(0)
    where = view(TABLE, [6, 0, 8], [2, 3, 1])
    out = jax.jit(memory.write_state)(pages, where, jnp.int32(1), new)
    for name, array in out.states.items():
      expected = np.zeros(array.shape, new[name].dtype)
      for row, page in enumerate((9, 7, 3)):
        expected[PAGES + page] = new[name][row]
      np.testing.assert_array_equal(array, expected.view(array.dtype))
    # After 8, 3 and 9 tokens; another layer has none.
    next_view = dataclasses.replace(
      where, starts=where.starts + where.num_tokens
    )
    states = memory.read_state(out, next_view, 1)
    jax.tree.map(np.testing.assert_array_equal, states, new)
    for array in memory.read_state(out, next_view, 0).values():
      np.testing.assert_array_equal(array, 0)

  def test_state_of_an_empty_sequence_is_zero(self):
    where = view([[5, 9], [7, 1], [0, 3]], [0, 0, 1], [1] * 3)
    states = memory.read_state(poisoned(), where, 1)
    for array in states.values():
      np.testing.assert_array_equal(array, 0)

  @pytest.mark.parametrize(
    ("entry", "start", "count"),
    [
      (3, 0, 0),  # an idle row
      (3, 2, 0),
      (0, 0, 2),  # the null page
      (PAGES, 0, 2),  # would be the next layer's null page
      (PAGES + 3, 0, 2),
      (-1, 0, 2),
      (2**31 - 1, 0, 2),
      (3, 3, 2),  # past the table's end
      (3, 2**31 - 3, 1),
      (3, -2, 2),  # before the sequence
    ],
  )
  def test_invalid_entries_write_nothing(self, entry, start, count):
    where = view([[entry]], [start], [count])
    out = memory.write_state(make(), where, jnp.int32(1), new_states(0, 1))
    for array in out.states.values():
      np.testing.assert_array_equal(array, 0)

  def test_layer_out_of_range_writes_nothing(self):
    where = view([[3]], [0], [1])
    new = new_states(0, 1)
    with pytest.raises(ValueError, match="`layer` must be from 0 to 2, got 3"):
      memory.write_state(make(), where, 3, new)
    for layer in (3, -1):
      out = memory.write_state(make(), where, jnp.int32(layer), new)
      for array in out.states.values():
        np.testing.assert_array_equal(array, 0)

  @pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
      ({"conv": None}, TypeError, r"`states\['conv'\]` must be an array"),
      ({"conv": np.ones((2, 6, 3))}, ValueError, r"`states\['conv'\]` must"),
      ({"delta": np.ones((3, 2, 4, 4), int)}, TypeError, "must be floats"),
      ({"more": np.ones(3)}, ValueError, r"`states` must be arrays \['conv'"),
    ],
  )
  def test_bad_states(self, changes, error, message):
    where = view(TABLE, [0] * 3, [1] * 3)
    with pytest.raises(error, match=message):
      memory.write_state(make(), where, 0, {**new_states(0), **changes})

  def test_packed_views_are_refused(self):
    part = view(TABLE, [0] * 3, [1] * 3)
    packed = memory.PackedView(decode=part, prefill=part)
    with pytest.raises(
      TypeError, match="`view` must be a View, got PackedView"
    ):
      memory.read_state(make(), packed, 0)


class TestPools:
  def test_copy_of_several_pools(self):
    kv = memory.init(_HYBRID, num_layers=2, num_kv_heads=1, head_dim=8)
    kv = dataclasses.replace(kv, k=kv.k.at[3].set(7))
    where = view([[3]], [0], [1])
    new = new_states(0, 1)
    states = memory.write_state(make(), where, 2, new)
    src = jnp.asarray([3, 3], jnp.int32)
    dst = jnp.asarray([4, 0], jnp.int32)
    out = jax.jit(memory.copy)((kv, states), src, dst)
    assert isinstance(out, tuple)
    np.testing.assert_array_equal(out[0].k[4], kv.k[3])
    target = view([[4]], [1], [1])
    copied = memory.read_state(out[1], target, 2)
    jax.tree.map(np.testing.assert_array_equal, copied, new)
    for array in out[1].states.values():
      np.testing.assert_array_equal(array[2 * PAGES], 0)
    single = memory.copy(states, src, dst)
    jax.tree.map(np.testing.assert_array_equal, single, out[1])

  def test_check(self):
    kv = memory.init(_HYBRID, num_layers=2, num_kv_heads=1, head_dim=8)
    memory.check((kv, make()), _HYBRID)
    memory.check(make(), _HYBRID)
    with pytest.raises(ValueError, match=r"`kv\[1\]` must have 24 pages of 4"):
      memory.check((kv, make(pages=25)), _HYBRID)
    with pytest.raises(
      TypeError, match="`kv` must be KVPages, StatePages, ExpertIdPages or"
    ):
      memory.check((kv, kv.k), _HYBRID)
    with pytest.raises(ValueError, match="`kv` must be one pool or more"):
      memory.check((), _HYBRID)


def test_loops_are_in_place():
  """A token loop around a layer loop copies and converts no states."""
  shapes = {"conv": ((64, 3), "bfloat16"), "delta": ((4, 16, 16), "float32")}
  pages = make(shapes, pages=400, page_size=16)
  table = jnp.arange(1, 17, dtype=jnp.int32).reshape(4, 4)

  def token(pages, step):
    where = view(table, jnp.full((4,), step, jnp.int32), [1] * 4)

    def layer(index, pages):
      state = memory.read_state(pages, where, index)
      state = {name: x * jnp.asarray(2, x.dtype) for name, x in state.items()}
      return memory.write_state(pages, where, index, state)

    pages = lax.fori_loop(0, LAYERS, layer, pages)
    return memory.copy(pages, where.starts, where.starts + 30), None

  def run(pages):
    return lax.scan(token, pages, jnp.arange(9, dtype=jnp.int32))[0]

  compiled = jax.jit(run, donate_argnums=0).lower(pages).compile()
  largest = pages.states["delta"]
  smallest = pages.states["conv"]
  assert pool_sized_rewrites(compiled, smallest.shape) == []
  analysis = compiled.memory_analysis()
  assert analysis.alias_size_in_bytes >= largest.nbytes + smallest.nbytes
  assert analysis.temp_size_in_bytes < largest.nbytes // 4
