"""A decode loop copies nothing of the pool's size: read off the compiled text.

The one exception is the sweep of the free queue, a separate loop that runs
once in many pushes. `without_sweep` takes it out, and then nothing may be left.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv._src.cache.page_numbers import PageNumbers
from jaxkv._src.cache.pool import free_queue
from tests.cache.setups import NumberedConfig
from tests.tools.compiled_loops import work_in_loops
from tests.tools.tiers import slow_except

SIZES = (16_384, 65_536)
SLOTS = 8
ROWS = 2
TOKENS = 24
STOP = 7
BEGIN = 3


def decode(state, tokens):
  """One step: room, commit, the finished leave, and the next ones enter."""
  ones = jnp.ones((SLOTS,), jnp.int32)
  state, _ = jaxkv.allocate(state, ones)
  state, _ = jaxkv.commit(state, tokens[:, None], ones)
  state, _ = jaxkv.free(state, mask=tokens == STOP)
  state, _ = jaxkv.admit(
    state,
    jnp.arange(ROWS, dtype=jnp.int32),
    jnp.broadcast_to(tokens[:1, None], (ROWS, TOKENS)),
    jnp.full((ROWS,), TOKENS, jnp.int32),
    salts=None,
    mask=tokens[:ROWS] == BEGIN,
  )
  return state


def sliding(state, tokens):
  """A step that first gives back what fell behind."""
  state, _ = jaxkv.recycle(state)
  return decode(state, tokens)


def branching(state, tokens):
  """One step of search: branch off, roll back, hold a prefix and let go."""
  rows = jnp.arange(ROWS, dtype=jnp.int32)
  prompts = jnp.broadcast_to(tokens[:1, None], (ROWS, TOKENS))
  lengths = jnp.full((ROWS,), TOKENS, jnp.int32)
  state, _ = jaxkv.fork(state, rows, rows + ROWS, mask=tokens[:ROWS] == BEGIN)
  state, _ = jaxkv.truncate(state, state.length // 2, mask=tokens == STOP)
  state, out = jaxkv.pin(state, prompts, lengths)
  state, _ = jaxkv.unpin(state, out.pages)
  state, _ = jaxkv.touch(state, out.pages)
  return jaxkv.new_epoch(state)[0]


def forgetting(state, tokens):
  """One step that gives pages back and drops them from the index."""
  state, _ = jaxkv.free(state, mask=tokens == STOP)
  state, _ = jaxkv.unpin(state, tokens)
  state, _ = jaxkv.evict(state, tokens)
  return state


def scanned(step, state, tokens):
  """Steps in a `scan`."""
  return jax.lax.scan(lambda s, t: (step(s, t), None), state, tokens)[0]


def looped(step, state, tokens):
  """Steps in a `while_loop`."""

  def body(carry):
    trip, state = carry
    return trip + 1, step(state, tokens[trip])

  start = (jnp.int32(0), state)
  return jax.lax.while_loop(lambda c: c[0] < tokens.shape[0], body, start)[1]


@functools.cache
def compiled(step, loop, num_pages: int, sweep: bool, **options):
  """The program that a user gets who jits the loop and donates the state."""
  pools = {kind.pool for kind in options.get("groups", ())} or {0}
  config = NumberedConfig(
    num_pages=(num_pages,) * len(pools),
    page_size=4,
    num_slots=SLOTS,
    pages_per_slot=16,
    number=2 + sweep,
    **options,
  )
  with pytest.MonkeyPatch.context() as patch:
    if not sweep:
      patch.setattr(free_queue, "reserve", lambda queue, count: queue)
    program = jax.jit(functools.partial(loop, step), donate_argnums=0)
    state = jaxkv.init(config)
    return program.lower(state, jnp.zeros((5, SLOTS), jnp.int32)).compile()


def pool_sized(num_pages: int) -> int:
  """Elements of the smallest array that grows with the pool: the buckets'."""
  return num_pages // 2


HYBRID = {
  "groups": (
    jaxkv.FullAttention(),
    jaxkv.SlidingWindow(9, page_size=8),
    jaxkv.ChunkedLocal(16),
  ),
  "merge_duplicates": True,
}

RETAINED = {
  "groups": (
    jaxkv.FullAttention(),
    jaxkv.SlidingWindow(9, pool=1),
    jaxkv.Recurrent(pool=2),
  ),
  "prefix_retention_interval": jaxkv.StateRetention(16),
}

PINNED_HOST = {"offload_pages": 70_000}

CASES = {
  "decode_scan": (decode, scanned, {}),
  "decode_while": (decode, looped, {}),
  "decode_merge_groups": (
    decode,
    scanned,
    {
      "merge_duplicates": True,
      "groups": (jaxkv.FullAttention(),) * 2,
      "free_policy": "lru",
    },
  ),
  "decode_hybrid": (sliding, scanned, HYBRID),
  "branching": (branching, scanned, {}),
  "branching_hybrid": (branching, scanned, HYBRID),
  "decode_retained": (sliding, scanned, RETAINED),
  "forgetting": (forgetting, scanned, {}),
  "decode_host": (decode, scanned, PINNED_HOST),
  "branching_host": (branching, scanned, HYBRID | PINNED_HOST),
}


# The others have the same parts.
FAST = ("decode_scan", "forgetting")


@slow_except("case", CASES, *FAST)
@pytest.mark.parametrize(
  "case",
  [
    # Others branch and decode with the same verbs and groups.
    pytest.param(case, marks=pytest.mark.deep)
    if case in ("branching", "branching_hybrid", "decode_hybrid")
    else case
    for case in CASES
  ],
)
class TestLoops:
  def test_loops_have_no_work_of_the_pool_size(self, case):
    step, loop, options = CASES[case]
    for num_pages in SIZES:
      program = compiled(step, loop, num_pages, sweep=False, **options)
      work = work_in_loops(program.as_text(), pool_sized(num_pages))
      assert work == {}

  def test_temporaries_do_not_grow(self, case):
    step, loop, options = CASES[case]
    small, large = (
      compiled(step, loop, num_pages, sweep=False, **options)
      .memory_analysis()
      .temp_size_in_bytes
      for num_pages in SIZES
    )
    assert abs(large - small) < 1024


class TestSweep:
  @pytest.mark.slow
  @pytest.mark.parametrize("num_pages", SIZES)
  def test_only_the_sweep_visits_all_pages(self, num_pages):
    """It is the loop that counts through the ring."""
    text = compiled(decode, scanned, num_pages, sweep=True).as_text()
    work = work_in_loops(text, pool_sized(num_pages))
    capacity = free_queue.capacity(PageNumbers((num_pages,)))
    assert len(work) == 1
    (lines,) = work.values()
    assert any(re.search(rf"\[{capacity}\]\S* iota\(", line) for line in lines)


def test_copies_in_loops_are_detected():
  """A loop that copies and one that does not, so that the test can fail."""

  def loop(body):
    def run(x):
      return jax.lax.fori_loop(0, 5, body, (x, jnp.int32(0)))

    program = jax.jit(run, donate_argnums=0)
    return program.lower(jnp.zeros((4096,), jnp.int32)).compile().as_text()

  def in_place(i, carry):
    x, value = carry
    new_x = x.at[i].set(value)
    return new_x, new_x[i + 1]

  def rewritten(i, carry):
    x, value = carry
    return x + i, value

  def read_too_late(i, carry):
    x, value = carry
    new_x = x.at[i].set(value)
    return new_x, x[new_x[i + 1]]

  assert work_in_loops(loop(in_place), 4096) == {}
  assert work_in_loops(loop(rewritten), 4096) != {}
  assert work_in_loops(loop(read_too_late), 4096) != {}
