"""Small shapes, large numbers, other types and other places."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv.cache import arguments


def _ints(*values) -> jax.Array:
  return jnp.asarray(values, jnp.int32)


def _config(**changes) -> jaxkv.CacheConfig:
  sizes = {"num_pages": 16, "page_size": 4, "num_slots": 2}
  return jaxkv.CacheConfig(**(sizes | {"pages_per_slot": 4} | changes))


class TestShapes:
  def test_sequences_shorter_than_a_page(self):
    state = jaxkv.init(_config())
    tokens = _ints([1, 2, 3])
    state, out = jaxkv.admit(state, _ints(0), tokens, _ints(3))
    assert bool(out.ok[0])
    state, out = jaxkv.pin(state, tokens, _ints(3))
    assert out.code.tolist() == [jaxkv.Code.NOT_CACHED]
    # What pin gives, unpin takes, also when it is no page at all.
    state, out = jaxkv.unpin(state, out.pages)
    assert out.code.shape == (1, 1, 0)
    assert jaxkv.match(state, tokens, _ints(3)).num_cached.tolist() == [0]

  @pytest.mark.parametrize("name", ["admit", "commit", "fork", "free"])
  def test_no_rows_at_all_is_refused(self, name):
    state, none = jaxkv.init(_config()), jnp.zeros((0,), jnp.int32)
    arguments_of = {
      "admit": (none, jnp.zeros((0, 4), jnp.int32), none),
      "commit": (jnp.zeros((2, 0), jnp.int32), _ints(0, 0)),
      "fork": (none, none),
      "free": (none,),
    }
    with pytest.raises(ValueError, match=r"must be int32\[.*0"):
      getattr(jaxkv, name)(state, *arguments_of[name])

  def test_the_smallest_cache(self):
    config = _config(num_pages=2, page_size=1, num_slots=1, pages_per_slot=1)
    state = jaxkv.init(config)
    state, _ = jaxkv.allocate(state, _ints(1))
    state, _ = jaxkv.commit(state, _ints([5]), _ints(1))
    state, full = jaxkv.allocate(state, _ints(1))
    assert full.code.tolist() == [jaxkv.Code.SLOT_FULL]
    state, _ = jaxkv.free(state, _ints(0))
    found = jaxkv.match(state, _ints([5, 6]), _ints(2))
    assert found.num_cached.tolist() == [1]

  def test_metadata_is_small(self):
    config = jaxkv.CacheConfig(
      num_pages=65536, page_size=16, num_slots=256, pages_per_slot=4096
    )
    state = jax.eval_shape(lambda: jaxkv.init(config))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert size <= 16 * 2**20


class TestArguments:
  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"num_pages": 1}, "num_pages must be at least 2, got 1"),
      ({"page_size": 0}, "page_size must be at least 1, got 0"),
      ({"num_pages": 2**28 + 1}, r"must be at most 2\*\*28"),
      (
        {"num_slots": 2**20, "pages_per_slot": 2**12},
        r"num_groups \* num_slots \* pages_per_slot must be below",
      ),
      (
        {"prefix_caching": False, "merge_duplicates": True},
        "merge_duplicates needs prefix_caching",
      ),
    ],
  )
  def test_sizes_out_of_range(self, changes, message):
    with pytest.raises(ValueError, match=message):
      _config(**changes)

  def test_sizes_of_another_type(self):
    with pytest.raises(TypeError, match=r"page_size must be an int, got 2.5"):
      _config(page_size=2.5)

  def test_a_list_says_what_to_do(self):
    with pytest.raises(ValueError, match=r"Wrap it in jnp.asarray"):
      arguments.check_array("slots", [0], ("R",), jnp.int32)

  def test_another_dtype_is_named(self):
    state = jaxkv.init(_config())
    with pytest.raises(ValueError, match=r"num_tokens must be int32\[2\]"):
      jaxkv.allocate(state, jnp.ones((2,), jnp.float32))


class TestHost:
  def test_a_stack_of_caches_is_refused(self):
    stack = jax.tree.map(lambda x: jnp.stack([x, x]), jaxkv.init(_config()))
    for look in (jaxkv.check, jaxkv.free_pages, jaxkv.cached_pages):
      with pytest.raises(ValueError, match=r"stack of caches of shape \(2,\)"):
        look(stack)

  def test_a_reading_outlives_a_donated_state(self):
    state = jaxkv.init(_config())
    before = jaxkv.stats(state)
    donating = jax.jit(jaxkv.allocate, donate_argnums=0)
    state, _ = donating(state, _ints(5, 0))
    interval = jaxkv.stats(state) - before
    assert int(interval.popped) == 2

  def test_an_error_stays_until_it_is_cleared(self):
    state, _ = jaxkv.free(jaxkv.init(_config()), _ints(7))
    with pytest.raises(jaxkv.CacheError, match="BAD_SLOT"):
      jaxkv.check(state)
    jaxkv.check(jaxkv.clear_error(state))

  def test_running_out_of_pages_is_no_error(self):
    config = _config(num_pages=3)
    state, out = jaxkv.allocate(jaxkv.init(config), _ints(16, 0))
    assert out.code[0] == jaxkv.Code.OUT_OF_PAGES
    jaxkv.check(state)
    assert int(jaxkv.stats(state).failed) == 1


def _life(state, tokens, lengths):
  """Most verbs, on one cache."""
  slots = _ints(0)
  state, out = jaxkv.admit(state, slots, tokens, lengths)
  rows = jnp.concatenate([tokens, tokens])
  counts = jnp.concatenate([lengths, lengths & 0])
  state, _ = jaxkv.commit(state, rows, counts)
  state, _ = jaxkv.fork(state, slots, _ints(1))
  state, cut = jaxkv.truncate(state, state.length - 1)
  state, held = jaxkv.pin(state, tokens, lengths)
  state, _ = jaxkv.free(state, state.length > 0)
  state, _ = jaxkv.unpin(state, held.pages)
  found = jaxkv.match(state, tokens, lengths)
  return state, (out.ok, cut.ok, found.num_cached)


class TestPlaces:
  @pytest.mark.parametrize("fresh", ["state", "tokens", "neither"])
  def test_inside_a_shard(self, fresh):
    """A state or tokens made inside vary over no axis, until they must."""
    mesh = jax.make_mesh(
      (4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    config = _config()
    states = jax.tree.map(
      lambda leaf: jnp.stack([leaf] * 4), jaxkv.init(config)
    )
    tokens = jnp.arange(36, dtype=jnp.int32).reshape(4, 1, 9)
    lengths = jnp.full((4, 1), 9, jnp.int32)

    @functools.partial(
      jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    def run(state, tokens, lengths):
      state = jax.tree.map(lambda leaf: leaf[0], state)
      if fresh == "state":
        state = jaxkv.init(config)
      tokens, lengths = tokens[0], lengths[0]
      if fresh == "tokens":
        tokens, lengths = jnp.ones((1, 9), jnp.int32), _ints(9)
      result = _life(state, tokens, lengths)
      return jax.tree.map(lambda leaf: leaf[None], result)

    _, (ok, cut, found) = jax.jit(run)(states, tokens, lengths)
    assert np.asarray(ok).all()
    assert np.asarray(cut).all()
    assert np.asarray(found).tolist() == [[8]] * 4

  def test_with_64_bit_types(self):
    """The same in a process whose default integer is int64."""
    program = (
      "import jax, jaxkv, jax.numpy as jnp\n"
      "from tests.test_edges import _life, _config, _ints\n"
      "state, out = jax.jit(_life)("
      "jaxkv.init(_config()), jnp.arange(9, dtype=jnp.int32)[None], _ints(9))\n"
      "jaxkv.check(state)\n"
      "print(out[2].tolist())"
    )
    done = subprocess.run(
      [sys.executable, "-c", program],
      env=_environment(JAX_ENABLE_X64="1"),
      capture_output=True,
      text=True,
      check=False,
    )
    assert done.stdout.split("\n")[0] == "[8]", done.stderr


def _environment(**more: str) -> dict[str, str]:
  root = pathlib.Path(__file__).resolve().parents[1]
  paths = os.pathsep.join([str(root), str(root / "kernels")])
  return {**os.environ, "PYTHONPATH": paths, **more}
