"""States that rollouts keep: steps, computed tokens and hits.

The model computes nothing, so these tests count. `test_states.py` and
`test_pools.py` check the contents.
"""

import functools

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import kv as memory
from jaxkv import rollout
from tests.engine import by_hand

pytestmark = pytest.mark.slow

_PAGE, _WORDS = 16, 50
_GROUPS = (jaxkv.FullAttention(), jaxkv.Recurrent(pool=1))
_RETENTION = jaxkv.StateRetention()


@functools.cache
def _program():
  params = 9 * jax.random.normal(jax.random.key(2), (_WORDS, _WORDS))
  run = functools.partial(rollout.generate, model=by_hand.last_token_model)
  return jax.jit(functools.partial(run, params))


def _words(seed: int, *shape: int) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, _WORDS, shape)


def _started(
  prompts: list[np.ndarray],
  *,
  num_slots: int,
  max_length: int,
  num_pages: tuple[int, int] | None = None,
  retention: jaxkv.StateRetention | int | None = _RETENTION,
  **options,
) -> rollout.RolloutState:
  """Starts a rollout with a page of K/V and a state for all that is kept."""
  pages_per_slot = -(-max_length // _PAGE)
  num_columns = pages_per_slot * max(len(prompts), num_slots)
  sizes = jaxkv.CacheConfig(
    num_pages=num_pages or (2 + num_columns, 2 + num_columns),
    page_size=_PAGE,
    num_slots=num_slots,
    pages_per_slot=pages_per_slot,
    groups=_GROUPS,
    prefix_retention_interval=retention,
  )
  kv = (
    memory.init(sizes, num_layers=1, num_kv_heads=1, head_dim=1),
    memory.init_states(sizes, num_layers=1, shapes={"x": ((1,), "float32")}),
  )
  config = rollout.RolloutConfig(max_length=max_length, **options)
  return by_hand.begun(sizes, config, prompts, kv=kv)


def _ended(state: rollout.RolloutState) -> rollout.RolloutState:
  state = _program()(state)
  assert bool(rollout.is_done(state))
  assert not np.any(np.asarray(state.queue.code))
  rollout.check(state)
  return state


class TestSteps:
  def test_prompts_cross_page_ends(self):
    """39 steps with a state at each page end."""
    state = _started(
      [*_words(0, 2, 512)],
      num_slots=2,
      max_length=520,
      max_new_tokens=8,
      prefill_chunk=256,
    )
    assert int(_ended(state).counters.steps) <= 14

  def test_calls_of_a_long_prompt(self):
    state = _started(
      [*_words(0, 1, 4096)],
      num_slots=1,
      max_length=4098,
      max_new_tokens=2,
      prefill_chunk=512,
    )
    assert int(np.sum(_ended(state).counters.calls)) <= 11


def _with_head(seed: int, head: int, tail: int, count: int) -> list[np.ndarray]:
  words = _words(seed, head)
  return [np.append(words, row) for row in _words(seed + 1, count, tail)]


def _num_prefilled(head: int, **options) -> int:
  """Returns the prompt tokens computed for 12 prompts with a common head."""
  prompts = _with_head(head, head, 60, 12)
  options = {"prefill_chunk": 256, "max_new_tokens": 4, **options}
  state = _ended(_started(prompts, max_length=head + 64, **options))
  # The last token of a prompt is computed with the answer.
  return int(state.counters.prefilled) + len(prompts)


class TestHeads:
  @pytest.mark.parametrize(("head", "limit"), [(400, 1108), (100, 852)])
  def test_waiting_prompts_compute_their_head_once(self, head, limit):
    """The limits are the tokens computed with a state at each page end."""
    assert _num_prefilled(head, num_slots=4) <= 1.05 * limit

  @pytest.mark.parametrize(("head", "limit"), [(400, 1520), (100, 960)])
  def test_third_prompt_finds_the_head_of_two_earlier_ones(self, head, limit):
    """One prompt after another; the second computes its head again."""
    assert _num_prefilled(head, num_slots=1, window=1) <= limit

  @pytest.mark.parametrize(
    ("head", "tail"),
    [(150, 70), pytest.param(1500, 700, marks=pytest.mark.deep)],
  )
  def test_head_of_64_prompts_is_computed_once(self, head, tail):
    state = _started(
      _with_head(0, head, tail, 64),
      num_slots=16,
      max_length=head + tail + 2,
      max_new_tokens=2,
      prefill_chunk=256,
    )
    counters = _ended(state).counters
    shared = head // _PAGE * _PAGE
    num_tokens = shared + 64 * (head - shared + tail - 1)
    assert int(counters.prefilled) == num_tokens


def _num_cached(state: rollout.RolloutState, prompts: list) -> list[int]:
  """Returns the cached tokens that each prompt would find."""
  width = max(map(len, prompts))
  rows = np.stack([np.resize(prompt, width) for prompt in prompts])
  hit = jaxkv.match(state.memory.cache, rows, [*map(len, prompts)])
  return hit.num_cached_tokens.tolist()


class TestHits:
  @pytest.mark.parametrize("retention", [_RETENTION, 0, None])
  def test_prompts_hit_when_they_return(self, retention):
    """Also prompts of whole pages, whose last token is computed again."""
    prompts = [_words(n, n) for n in (31, 32, 33, 48, 49, 64, 65)]
    state = _started(
      prompts,
      num_slots=3,
      max_length=70,
      max_new_tokens=4,
      prefill_chunk=24,
      retention=retention,
    )
    num_cached = _num_cached(_ended(state), prompts)
    assert num_cached == [16, 16, 32, 32, 48, 48, 64]

  @pytest.mark.parametrize(
    ("retention", "num_cached"), [(_RETENTION, 304), (0, 0)]
  )
  def test_prompts_that_leave_a_cached_one_near_its_end(
    self, retention, num_cached
  ):
    """A chat template ends 324 tokens; the next turn shares 318 of them."""
    prompt = _words(0, 324)
    state = _started(
      [prompt],
      num_slots=1,
      max_length=330,
      max_new_tokens=4,
      prefill_chunk=64,
      retention=retention,
    )
    other = np.append(prompt[:318], (prompt[318:] + 1) % _WORDS)
    assert _num_cached(_ended(state), [other]) == [num_cached]

  def test_all_answers_to_a_prompt_are_resumed(self):
    """And what continues them; each turn computes less than two pages."""
    state = _started(
      [_words(0, 50)],
      num_slots=2,
      max_length=150,
      num_samples=2,
      max_new_tokens=20,
      prefill_chunk=64,
    )
    state = _ended(state)
    for turn in range(2):
      num_prefilled = int(state.counters.prefilled)
      words = _words(turn, 2, 9)
      state, out = rollout.extend(state, [0, 1], words, [9, 9])
      assert out.ok.all()
      state = _ended(state)
      # New words, the last token of the answer, and tokens of an open page.
      num_new = int(state.counters.prefilled) - num_prefilled
      assert num_new <= 2 * (9 + _PAGE)

  def test_conversations_hit_with_few_states(self):
    """40 conversations of eight turns continue in random order."""
    num_slots = 8
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 90, 40)
    state = _started(
      [rng.integers(0, _WORDS, length) for length in lengths],
      num_slots=num_slots,
      max_length=640,
      num_pages=(1602, 2 * num_slots + 60),
      max_new_tokens=20,
      prefill_chunk=128,
    )
    state = _ended(state)
    turns = rng.permutation(np.repeat(np.arange(40), 7))
    most_hits = 0
    while len(turns):
      # A conversation continues once at a time.
      ids, positions = np.unique(turns[:num_slots], return_index=True)
      turns = np.delete(turns, positions)
      # The last token of an answer is not computed.
      num_cached = (state.queue.length[ids] - 1) // _PAGE * _PAGE
      most_hits += int(num_cached.sum())
      state, out = rollout.extend(
        state,
        np.resize(ids, num_slots),
        rng.integers(0, _WORDS, (num_slots, 60)),
        rng.integers(5, 60, num_slots),
        mask=np.arange(num_slots) < len(ids),
      )
      assert int(out.ok.sum()) == len(ids)
      state = _ended(state)
    assert most_hits > 60_000
    hits = int(jaxkv.stats(state.memory.cache).hit_tokens)
    assert hits >= 0.95 * most_hits
