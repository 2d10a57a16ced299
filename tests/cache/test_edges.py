"""Small shapes, large numbers, other kinds, other types and other places."""

import dataclasses
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
from jaxkv import ChunkedLocal
from jaxkv import FullAttention
from jaxkv import SlidingWindow
from jaxkv._src.cache import checks as arguments


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
        r"num_slots \* pages_per_slot must be below 2\*\*31",
      ),
      (
        {"prefix_caching": False, "merge_duplicates": True},
        "merge_duplicates needs prefix_caching",
      ),
      (
        {"groups": (FullAttention(page_size=6),)},
        r"multiple of CacheConfig.page_size \(4\) .* got 6",
      ),
      (
        {"groups": (FullAttention(), SlidingWindow(3, page_size=12))},
        "a divisor of the slot's 16 tokens, got 12",
      ),
      (
        {"groups": (FullAttention(page_size=8),), "retention": 4},
        "retention must be a multiple of 8, .* got 4",
      ),
      ({"retention": -4}, "retention must be a multiple of 4, .* got -4"),
      ({"retention": 0, "classic": True}, "retention and classic contradict"),
    ],
  )
  def test_sizes_out_of_range(self, changes, message):
    with pytest.raises(ValueError, match=message):
      _config(**changes)

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"page_size": 2.5}, r"page_size must be an int, got 2.5"),
      ({"retention": True}, "retention must be None or an int, got True"),
      ({"prefix_caching": "no"}, "prefix_caching must be True or False, got "),
      ({"classic": 1}, "classic must be True or False, got 1"),
      ({"groups": ()}, r"must be a tuple of group kinds, .* got \(\)"),
      ({"groups": [FullAttention()]}, "must be a tuple of group kinds"),
      ({"groups": (FullAttention,)}, "which is no GroupKind; use"),
      ({"groups": (4,)}, "holds 4, which is no GroupKind; use"),
    ],
  )
  def test_sizes_of_another_type(self, changes, message):
    with pytest.raises(TypeError, match=message):
      _config(**changes)

  def test_kinds_check_their_sizes(self):
    with pytest.raises(ValueError, match=r"SlidingWindow.window must be at le"):
      SlidingWindow(0)
    with pytest.raises(
      ValueError, match=r"ChunkedLocal.chunk must be at least"
    ):
      ChunkedLocal(-1)
    with pytest.raises(ValueError, match=r"FullAttention.page_size must be at"):
      FullAttention(page_size=0)
    with pytest.raises(TypeError, match=r"window must be an int, got True of"):
      SlidingWindow(True)
    with pytest.raises(TypeError, match=r"chunk must be an int, got None of"):
      ChunkedLocal(None)
    with pytest.raises(TypeError, match=r"page_size must be an int, got 2.0"):
      SlidingWindow(4, page_size=2.0)
    with pytest.raises(ValueError, match=r"LastPages.keep must be at least 1"):
      LastPages(0)

  def test_a_list_says_what_to_do(self):
    with pytest.raises(ValueError, match=r"Wrap it in jnp.asarray"):
      arguments.check_array("slots", [0], ("R",), jnp.int32)

  @pytest.mark.parametrize("verb", ["touch", "unpin", "evict"])
  @pytest.mark.parametrize(
    ("pages", "message"),
    [
      ([1], r"pages must be an array int32\[...\], got list"),
      (jnp.ones((1,)), r"pages must be int32\[...\], got float32\[1\]"),
    ],
  )
  def test_pages_have_any_shape(self, verb, pages, message):
    with pytest.raises(ValueError, match=message):
      getattr(jaxkv, verb)(jaxkv.init(_config()), pages)

  @pytest.mark.parametrize("text", [3, None, ["a"]])
  def test_a_salt_is_of_text(self, text):
    with pytest.raises(TypeError, match="text must be a str or bytes, got"):
      jaxkv.salt(text)

  def test_another_dtype_is_named(self):
    state = jaxkv.init(_config())
    with pytest.raises(ValueError, match=r"num_tokens must be int32\[2\]"):
      jaxkv.allocate(state, jnp.ones((2,), jnp.float32))


@dataclasses.dataclass(frozen=True)
class LastPages(jaxkv.GroupKind):
  """Somebody's own kind: the page of four tokens at hand, and some before.

  Attributes:
    keep: pages before it that are kept.
  """

  keep: int

  def num_skipped(self, num_tokens: jax.Array) -> jax.Array:
    """Whole pages of four tokens."""
    return jnp.maximum(num_tokens // 4 - self.keep, 0) * 4


def _filled(*groups, **changes):
  """A cache with 14 tokens in slot 0, and the tokens."""
  state = jaxkv.init(_config(groups=groups, **changes))
  tokens = jnp.arange(16, dtype=jnp.int32)[None]
  state, _ = jaxkv.allocate(state, _ints(14, 0))
  state, _ = jaxkv.commit(state, jnp.tile(tokens, (2, 1)), _ints(14, 0))
  return state, tokens


def _table(state, group=0):
  return state.page_table[group, 0].tolist()


class TestKinds:
  def test_a_window_of_one_token(self):
    """It looks at nothing that was: every full page is left behind."""
    state, tokens = _filled(SlidingWindow(1))
    state, out = jaxkv.recycle(state)
    assert out.num_pages.tolist() == [3, 0]
    assert _table(state) == [0, 0, 0, 4]
    # A hit on nothing is none.
    assert jaxkv.match(state, tokens, _ints(14)).num_cached.tolist() == [0]
    state, room = jaxkv.allocate(state, _ints(2, 0))
    state, done = jaxkv.commit(state, tokens[:, 14:].repeat(2, 0), _ints(2, 0))
    assert room.ok.all() and done.ok.all()
    state, out = jaxkv.recycle(state)
    assert _table(state) == [0, 0, 0, 0]
    # No page is left, but the slot is not empty: it can be freed, once.
    assert state.num_pages.tolist() == [[4, 0]]
    state, out = jaxkv.free(state, _ints(0, 0))
    assert out.code.tolist() == [jaxkv.Code.OK, jaxkv.Code.SLOT_EMPTY]
    assert int(state.pool.queue.num_free) == 15
    jaxkv.check(jaxkv.clear_error(state))

  def test_a_window_of_one_token_beside_full_attention(self):
    state, tokens = _filled(FullAttention(), SlidingWindow(1))
    # Pages that nobody will look at are not even published.
    assert jaxkv.cached_pages(state) == [1, 2, 3]
    state, out = jaxkv.admit(state, _ints(1), tokens, _ints(14))
    assert out.num_cached.tolist() == [12]
    assert state.page_table[:, 1].tolist() == [[1, 2, 3, 9], [0, 0, 0, 10]]

  def test_a_window_larger_than_the_slot(self):
    state, tokens = _filled(SlidingWindow(2**31 - 1))
    state, out = jaxkv.recycle(state, _ints(2**31 - 1, 2**31 - 1))
    assert out.num_pages.tolist() == [0, 0]
    assert jaxkv.match(state, tokens, _ints(14)).pages.tolist() == [
      [[1, 2, 3, 16]]
    ]

  def test_a_chunk_larger_than_the_slot(self):
    state, tokens = _filled(ChunkedLocal(2**31 - 1))
    state, out = jaxkv.recycle(state, _ints(2**31 - 1, 0))
    assert out.num_pages.tolist() == [0, 0]
    assert jaxkv.match(state, tokens, _ints(14)).num_cached.tolist() == [12]

  def test_a_chunk_that_ends_inside_of_a_page(self):
    """Chunks of 6 in pages of 4: a page stays while any of it is needed."""
    state, tokens = _filled(FullAttention(), ChunkedLocal(6))
    for length, behind in ((5, 0), (6, 1), (11, 1), (12, 3)):
      later, _ = jaxkv.recycle(state, _ints(length, 0))
      assert _table(later, 1) == [0] * behind + list(range(5 + behind, 9))
    # Twelve tokens need no page of the chunk, eight need the second one.
    state, _ = jaxkv.evict(state, _ints(5, 7))
    assert jaxkv.match(state, tokens, _ints(13)).num_cached.tolist() == [12]
    assert jaxkv.match(state, tokens, _ints(12)).num_cached.tolist() == [8]
    assert jaxkv.match(state, tokens, _ints(8)).num_cached.tolist() == [0]

  def test_somebody_s_own_kind(self):
    state, tokens = _filled(LastPages(2), FullAttention(page_size=8))
    state, out = jaxkv.recycle(state)
    assert out.num_pages.tolist() == [1, 0]
    assert _table(state) == [0, 2, 3, 4]
    # Four tokens wait for the page of eight; page 3 has no key yet.
    assert jaxkv.cached_pages(state) == [1, 2, 5]
    found = jaxkv.match(state, tokens, _ints(14))
    assert found.num_cached.tolist() == [8]
    assert found.pages.tolist() == [[[1, 2, 16, 16]], [[5, 16, 16, 16]]]
    state, out = jaxkv.truncate(state, _ints(7, 0), jnp.asarray([True, False]))
    assert out.code.tolist() == [jaxkv.Code.RECYCLED, jaxkv.Code.SKIPPED]
    jaxkv.check(jaxkv.clear_error(state))

  def test_equal_kinds_said_in_two_ways(self):
    """A page size that is the default one changes nothing."""
    bare, tokens = _filled(FullAttention(), SlidingWindow(3))
    said, _ = _filled(
      FullAttention(page_size=4), SlidingWindow(window=3, page_size=4)
    )
    for state in (bare, said):
      found = jaxkv.match(state, tokens, _ints(14))
      assert found.pages[:, 0].tolist() == [[1, 2, 3, 16], [16, 16, 7, 16]]


class TestHost:
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
      "from tests.cache.test_edges import _life, _config, _ints\n"
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
  root = pathlib.Path(__file__).resolve().parents[2]
  paths = os.pathsep.join([str(root), str(root / "kernels")])
  return {**os.environ, "PYTHONPATH": paths, **more}
