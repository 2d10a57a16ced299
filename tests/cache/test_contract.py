"""Promises of every verb: one table of all verbs."""

import dataclasses
import functools
import inspect
import re
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.cache.differences import differences
from tests.cache.moves import ARGUMENTS
from tests.cache.moves import Moves
from tests.cache.pair import QUERIES
from tests.cache.pair import VERBS
from tests.cache.pair import Pair
from tests.cache.pair import Seeded
from tests.cache.pair import arrays
from tests.cache.pair import wander
from tests.cache.setups import LONG
from tests.cache.setups import MERGE
from tests.cache.setups import Full
from tests.cache.setups import Window
from tests.cache.setups import small
from tests.tools.collectives import collectives
from tests.tools.tiers import slow_except
from tests.tools.transforms import on_devices

SETUP = small(100, 2, (Window(3), Full(page_size=4)), **LONG, **MERGE)

TABLE = VERBS | {
  "usage": jaxkv.usage,
  "check_invariants": jaxkv.check_invariants,
}
"""Every public function of a state that can be traced."""

# Of tests that compile a verb in yet another way: one that takes pages, shares
# them, gives them back, and one that only reads.
FEW = ("admit", "fork", "truncate", "match")
CHANGING = [name for name in VERBS if name not in QUERIES]
ON_HOST = {
  *("init", "salt", "check", "free_pages"),
  *("cached_pages", "stats", "show", "view"),
  "enable_compilation_cache",
}
# test_reset
ELSEWHERE = {"clear_error"}


@functools.cache
def busy(seed: int) -> Pair:
  """A cache in the middle of its life, in which every verb has work to do."""
  pair = Pair(SETUP)
  while not all(legal(pair, verb) for verb in ARGUMENTS if ARGUMENTS[verb]):
    wander(pair, seed, 20)
    seed += 100
  return pair


def legal(pair: Pair, verb: str) -> tuple | None:
  """Lists for a legal call, the same ones each time; None if there is none."""
  return Moves(Seeded(7), pair.oracle, pair.setup).make(verb)


def example(verb: str, seed: int = 0) -> tuple[jaxkv.CacheState, dict]:
  """A state and the arrays of a legal call, by name."""
  pair = busy(seed)
  if not ARGUMENTS.get(verb):
    return pair.state, {}
  lists = legal(pair, verb) or ()
  return pair.state, jax.tree.map(jnp.asarray, arrays(verb, lists))


# Same structure, shapes, types and bits.
assert_same = functools.partial(chex.assert_trees_all_equal, strict=True)


def test_table_is_complete():
  public = {
    name
    for name, value in vars(jaxkv).items()
    if callable(value)
    and not inspect.isclass(value)
    and not name.startswith("_")
  }
  listed = {name.split("_slots")[0].split("_mask")[0] for name in TABLE}
  assert public - ON_HOST - ELSEWHERE == listed


# Operation by operation, each compiled by itself. The others have the same
# operations, in another order.
@pytest.mark.deep
@pytest.mark.parametrize("verb", TABLE)
def test_results_without_jit_are_equal(verb):
  state, args = example(verb)
  with jax.disable_jit():
    plain = TABLE[verb](state, **args)
  # A division that is compiled may differ in its last bit.
  chex.assert_trees_all_close(TABLE[verb](state, **args), plain, rtol=1e-6)


def test_a_second_trace_is_seen():
  """So that `test_values_do_not_cause_another_trace` can fail."""
  chex.clear_trace_counter()
  counted = jax.jit(chex.assert_max_traces(lambda *_: None, n=1))
  counted.trace(jnp.zeros((2,)))
  with pytest.raises(AssertionError, match="traced > 1 times"):
    counted.trace(jnp.zeros((3,)))


@pytest.mark.parametrize("verb", TABLE)
class TestEveryVerb:
  def test_shapes_without_running(self, verb):
    state, args = example(verb)
    shapes = jax.eval_shape(TABLE[verb], state, **args)
    out = TABLE[verb](state, **args)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, out)

  def test_a_config_of_other_sizes_is_refused(self, verb):
    state, args = example(verb)
    num_pages = state.config.total_pages
    config = dataclasses.replace(state.config, num_pages=num_pages + 1)
    message = (
      rf"`state\.pool\.ref_count` must have .* \({num_pages + 1},\), got "
      rf"\({num_pages},\)"
    )
    with pytest.raises(ValueError, match=message):
      TABLE[verb](dataclasses.replace(state, config=config), **args)

  def test_values_do_not_cause_another_trace(self, verb):
    state, args = example(verb)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def counted(state, **args):
      return TABLE[verb](state, **args)

    counted.trace(state, **args)
    counted.trace(
      jaxkv.init(SETUP.config), **jax.tree.map(jnp.zeros_like, args)
    )
    if verb in CHANGING:
      counted.trace(TABLE[verb](state, **args)[0], **args)

  @slow_except("verb", TABLE, *FEW)
  def test_vmap_equals_single_calls(self, verb):
    calls = [example(verb, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *calls)
    together = jax.jit(jax.vmap(TABLE[verb]))(stacked[0], **stacked[1])
    for i, (state, args) in enumerate(calls):
      single = TABLE[verb](state, **args)
      assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], together), single)

  @pytest.mark.deep
  def test_caches_on_several_devices_need_no_collective(self, verb):
    """One cache on each of eight devices; no device waits for another."""
    calls = [example(verb, seed % 3) for seed in range(8)]
    text, results = on_devices(TABLE[verb], calls)
    assert collectives(text) == {}
    for (state, args), result in zip(calls, results, strict=True):
      assert_same(result, TABLE[verb](state, **args))


@pytest.mark.parametrize("verb", CHANGING)
class TestEveryChange:
  def test_states_keep_their_types(self, verb):
    """Weak types too: what comes out may go in again."""
    state, args = example(verb)
    out = TABLE[verb](state, **args)[0]
    chex.assert_trees_all_equal_structs(out, state)
    old_types = jax.tree.map(jax.typeof, state)
    assert jax.tree.map(jax.typeof, out) == old_types

  def test_inputs_do_not_change(self, verb):
    state, args = example(verb)
    old_state = jax.device_get(state)
    TABLE[verb](state, **args)
    assert_same(state, old_state)

  @slow_except("verb", CHANGING, *FEW[:3])
  def test_donated_buffers_are_reused(self, verb):
    """Every buffer of the state is used again, and none is left unusable."""
    state, args = example(verb)
    expected = TABLE[verb](state, **args)
    donated = jax.tree.map(jnp.copy, state)
    step = jax.jit(
      lambda state, args: TABLE[verb](state, **args), donate_argnums=0
    )
    with warnings.catch_warnings():
      warnings.simplefilter("error")
      compiled = step.lower(donated, args).compile()
    leaves = jax.tree.leaves(state)
    aliases = re.search(
      r"input_output_alias=\{(.*)\}, entry", compiled.as_text()
    )
    assert aliases and len(re.findall(r"-alias\)", aliases[1])) == len(leaves)
    num_bytes = sum(leaf.nbytes for leaf in leaves)
    assert compiled.memory_analysis().alias_size_in_bytes >= num_bytes
    assert_same(compiled(donated, args), expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))

  @slow_except("verb", CHANGING, *FEW[:3])
  def test_calls_inside_control_flow_are_equal(self, verb):
    """A scan in a conditional in a while loop in a jit."""
    state, args = example(verb)

    def once(state):
      return TABLE[verb](state, **args)[0]

    def scanned(state):
      return jax.lax.scan(lambda s, _: (once(s), None), state, length=2)[0]

    def step(loop):
      trip, state = loop
      state = jax.lax.cond(trip == 1, scanned, lambda s: s, state)
      return trip + 1, state

    @jax.jit
    def program(state):
      start = (jnp.int32(0), state)
      return jax.lax.while_loop(lambda loop: loop[0] < 3, step, start)[1]

    assert_same(program(state), once(once(state)))

  def test_masked_rows_change_no_bit(self, verb):
    """Masked out, or zero of it: bit by bit the same state."""
    state, args = example(verb)
    idle = {
      "num_tokens": jnp.zeros_like,
      "mask": jnp.zeros_like,
      "pages": lambda x: jnp.full_like(x, SETUP.config.no_page),
    }
    if verb == "recycle":
      idle["lengths"] = lambda x: jnp.full_like(x, -1)
    if not args.keys() & idle.keys():
      pytest.skip("has no way to ask for nothing")
    args = {name: idle.get(name, lambda x: x)(x) for name, x in args.items()}
    assert_same(TABLE[verb](state, **args)[0], state)


# --- totals -------------------------------------------------------------------

EXTREMES = np.array([-(2**31), -(2**31) + 1, -1, 0, 1, 2**30, 2**31 - 1])


def garbage(rng, array):
  """Any numbers of the same shape and dtype."""
  if array.dtype == np.bool_:
    return jnp.asarray(rng.random(array.shape) < 0.8)
  small_values = rng.integers(-3, SETUP.config.total_pages + 3, array.shape)
  extreme_values = rng.choice(EXTREMES, array.shape)
  random_values = rng.integers(-(2**31), 2**31, array.shape)
  choice = rng.random(array.shape)
  mixed = np.where(choice < 0.75, extreme_values, random_values)
  mixed = np.where(choice < 0.5, small_values, mixed)
  return jnp.asarray(mixed.astype(np.int64).astype(np.uint32).view(array.dtype))


def slot_rows(state, slot):
  """Everything that belongs to one slot."""
  parts = (state.page_table, state.num_pages, state.num_skipped_pages)
  return (
    [part[slot] for part in parts]
    + [state.length[slot]]
    + [leaf[slot] for leaf in jax.tree.leaves(state.hashes)]
  )


def changed_slots(verb, args, out):
  """The slots that a call may have changed."""
  if verb in ("touch", "pin", "unpin", "evict", "reset_prefix_cache"):
    return set()
  ok = np.flatnonzero(np.asarray(out.code) == jaxkv.Status.OK)
  named = args.get("dst", args.get("slots"))
  return set((ok if named is None else np.asarray(named)[ok]).tolist())


@pytest.mark.parametrize("verb", [v for v in CHANGING if v != "new_epoch"])
def test_no_input_corrupts(verb):
  """Laws hold and the other slots do not change, whatever the numbers."""
  rng = np.random.default_rng(0)
  for trial in range(150):
    state, args = example(verb, trial % 3)
    args = {name: garbage(rng, array) for name, array in args.items()}
    new_state, out = TABLE[verb](state, **args)
    laws = jax.device_get(jaxkv.check_invariants(new_state))
    assert all(laws.values()), (laws, args)
    old_state, new_state = jax.device_get((state, new_state))
    for slot in set(range(4)) - changed_slots(verb, args, out):
      for old_rows, new_rows in zip(
        slot_rows(old_state, slot), slot_rows(new_state, slot), strict=True
      ):
        np.testing.assert_array_equal(new_rows, old_rows)


# --- helpers on the host ------------------------------------------------------


class TestHost:
  def test_free_and_cached_pages(self):
    pair = busy(0)
    assert differences(pair.oracle, pair.state) == []
    assert [jaxkv.free_pages(pair.state)] == pair.oracle.pool.free
    assert jaxkv.cached_pages(pair.state) == sorted(pair.oracle.pool.keys)

  def test_usage(self):
    pair = busy(0)
    in_use = sum(refs > 0 for refs in pair.oracle.pool.refs)
    usage = float(jaxkv.usage(pair.state))
    assert usage == pytest.approx(in_use / (SETUP.config.total_pages - 1))

  @pytest.mark.slow
  def test_defaults_are_as_documented(self):
    """No mask, no salt, room for all, and all that was committed."""
    for verb in ("match", "admit", "pin"):
      state, args = example(verb)
      args["salts"] = jnp.zeros_like(args["salts"])
      args["mask"] = jnp.ones_like(args["mask"])
      if verb == "admit":
        args["num_tokens"] = args["lengths"]
        args["keep_free"] = jnp.zeros_like(args["lengths"])
      explicit = TABLE[verb](state, **args)
      options = {"salts", "mask", "num_tokens", "keep_free"}
      bare = {name: args[name] for name in args.keys() - options}
      assert_same(TABLE[verb](state, **bare), explicit)
    state, _ = example("recycle")
    assert_same(
      jaxkv.recycle(state), jaxkv.recycle(state, lengths=state.length)
    )

  def test_wrong_arguments_are_named(self):
    state, args = example("admit")
    slots, tokens, lengths = (args[n] for n in ("slots", "tokens", "lengths"))
    with pytest.raises(ValueError, match="`slots` must have the shape"):
      jaxkv.admit(state, slots[:-1], tokens, lengths)
    with pytest.raises(TypeError, match="`tokens` must hold integers"):
      jaxkv.admit(state, slots, tokens.astype(jnp.float32), lengths)
    with pytest.raises(ValueError, match="`lengths` must have the shape"):
      jaxkv.admit(state, slots, tokens, lengths[:, None])
    for name in ("num_tokens", "keep_free"):
      message = rf"`{name}` must have the shape \[3\].*, got \[2\]"
      with pytest.raises(ValueError, match=message):
        jaxkv.admit(state, slots, tokens, lengths, **{name: lengths[:-1]})
    with pytest.raises(TypeError, match="`num_tokens` must hold integers"):
      jaxkv.admit(state, slots, tokens, lengths, num_tokens=lengths > 0)
    with pytest.raises(ValueError, match="`num_tokens` must have the shape"):
      jaxkv.allocate(state, 3)
    with pytest.raises(
      ValueError, match=r"`lengths` must have the shape \[4\]"
    ):
      jaxkv.recycle(state, lengths=lengths)
    with pytest.raises(TypeError, match="too many positional"):
      jaxkv.admit(state, slots, tokens, lengths, *[lengths])
    with pytest.raises(TypeError, match="room"):
      jaxkv.admit(state, slots, tokens, lengths, room=lengths)

  def test_lists_and_other_integers_are_cast(self):
    state, args = example("admit")
    expected = TABLE["admit"](state, **args)
    lists = {
      name: x if name == "salts" else np.asarray(x).tolist()
      for name, x in args.items()
    }
    assert_same(TABLE["admit"](state, **lists), expected)
    wide = {
      name: np.asarray(x, np.int64) if x.dtype == jnp.int32 else x
      for name, x in args.items()
    }
    assert_same(TABLE["admit"](state, **wide), expected)
    with pytest.raises(ValueError, match="`num_tokens` must fit int32"):
      jaxkv.allocate(state, [2**31, 0, 0, 0])
    with pytest.raises(TypeError, match="`mask` must hold True and False"):
      jaxkv.free(state, mask=[1, 0, 0, 0])
