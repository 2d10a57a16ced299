"""Prompts and sequences of a rollout with several shards."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import guides
from jaxkv import rollout
from jaxkv import sharding
from jaxkv._src.sharding import rebalance as rebalance_steps
from tests.engine import by_hand
from tests.sharding import recipes
from tests.sharding.recipes import assert_equal_results
from tests.sharding.recipes import axes_of

pytestmark = [
  pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices"),
]


def _names_of(lengths, num_samples=1, slots=2) -> dict:
  """Returns names for samples of given lengths, longest first."""
  names = recipes.attention_alone()
  count = len(lengths) // num_samples
  prompts = np.random.default_rng(2).integers(1, 5, (count, 3))
  config = rollout.RolloutConfig(
    num_samples=num_samples, max_new_tokens=max(lengths), prefill_chunk=4
  )
  sizes = by_hand.sizes(40, slots)

  def memory():
    return jaxkv.init(sizes, jax.random.key(4)), by_hand.pages(sizes)

  requests = rollout.Requests(
    prompts.astype(np.int32),
    np.full(count, 3, np.int32),
    sampling=rollout.Sampling(max_tokens=lengths),
    priority=-lengths,
  )
  return names | {"config": config, "memory": memory, "requests": requests}


def _local(leaf, shard):
  """Returns a shard's array [1, ...] as [...], read on its own device.

  An index of the whole array would be a program with collectives, and several
  of these can block each other on a CPU with fewer cores than devices.
  """
  return leaf.addressable_shards[shard].data[0]


def _balance(names, axes, state, **options) -> rollout.RolloutState:
  """Alternates steps and `rebalance` until the end."""
  until = rollout.Until(steps=3)
  model = names["model"]
  while not bool(rollout.is_done(state)):
    state = sharding.generate(None, state, until, axes=axes, model=model)
    state = sharding.rebalance(state, axes=axes, **options)
    for shard in range(axes.num_shards):
      rollout.check(jax.tree.map(lambda leaf, i=shard: _local(leaf, i), state))
  return state


class TestRebalance:
  @pytest.mark.deep
  @pytest.mark.parametrize(
    ("num_shards", "num_samples"),
    [(6, 2), (8, 1)],
  )
  def test_rebalance_evens_out_the_steps(self, num_shards, num_samples):
    """Waiting sequences move, and with `max_pages` running ones."""
    random = np.random.default_rng(1)
    lengths = random.lognormal(1.2, 0.6, 96).clip(1, 12).astype(np.int32)
    # One shard has most of the work.
    lengths = -np.sort(-lengths)
    names = _names_of(lengths, num_samples)
    axes = axes_of(data=num_shards)
    init = functools.partial(recipes.begun_on, names, axes)
    plain = recipes.done(names, init(), axes)
    expected = jax.device_get(sharding.generated(plain, axes=axes))
    for max_pages in (0, 30):
      state = _balance(names, axes, init(), max_groups=6, max_pages=max_pages)
      steps = np.asarray(state.counters.steps)
      assert steps.max() < 1.1 * steps.mean()
      assert 1.3 * steps.max() < np.asarray(plain.counters.steps).max()
      assert_equal_results(sharding.generated(state, axes=axes), expected)

  @pytest.mark.slow
  def test_rebalance_moves_running_sequences(self):
    """A running sequence moves with its pages, and none is computed again."""
    lengths = np.asarray([12, 11, 10, 9, 1, 1, 1, 1], np.int32)
    names, axes = _names_of(lengths, slots=4), axes_of(data=2)
    init = functools.partial(recipes.begun_on, names, axes)
    plain = recipes.done(names, init(), axes)
    state = _balance(names, axes, init(), max_pages=30)
    assert np.asarray(state.counters.recomputed).tolist() == [0, 0]
    # The last two of the long ones have moved.
    assert {2, 3} <= {*np.asarray(state.queue.ids)[1].tolist()}
    expected = jax.device_get(sharding.generated(plain, axes=axes))
    assert_equal_results(sharding.generated(state, axes=axes), expected)

  def test_groups_whose_ids_overlap_stay(self):
    """Samples 6 and 7 of one shard, and 7 and 8 of the other one."""
    config = rollout.RolloutConfig(
      num_samples=2, max_new_tokens=4, max_length=14
    )
    empty, waits, ended = by_hand.EMPTY, by_hand.WAITS, by_hand.DONE

    def shard(ids, status):
      state = by_hand.begun(by_hand.sizes(20, 2), config)
      return by_hand.with_queue(
        state,
        ids=jnp.asarray(ids, jnp.int32),
        status=jnp.asarray(status, jnp.int32),
      )

    states = (
      shard(range(8), [waits] * 8),
      shard([*range(7, 11), *[0] * 4], [ended] * 4 + [empty] * 4),
    )
    states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    axes = axes_of(data=2)

    def exchange(state):
      return rebalance_steps._exchange(
        state, 1, axes, max_groups=4, max_pages=0
      )

    states = jax.jit(jax.vmap(exchange, axis_name="data"))(states)
    exists = np.asarray(states.queue.status) != empty
    ids = [
      sorted(row[held].tolist())
      for row, held in zip(np.asarray(states.queue.ids), exists, strict=True)
    ]
    # The last two of the groups that may move, which have half of the work.
    assert ids == [[0, 1, 6, 7], [2, 3, 4, 5, 7, 8, 9, 10]]

  @pytest.mark.slow
  def test_sequences_of_other_versions_stay(self):
    names = _names_of(np.asarray([9, 8, 1, 1], np.int32))
    axes = axes_of(data=2)
    state = recipes.begun_on(names, axes)

    def update(state):
      is_first = jax.lax.axis_index("data") == 0
      new = rollout.update_weights(state)
      return jax.tree.map(
        lambda a, b: jax.lax.select(is_first, a, b), new, state
      )

    state = jax.jit(lambda s: sharding.each_shard(update, s, axes=axes))(state)
    state = sharding.rebalance(state, axes=axes)
    assert np.asarray(state.queue.ids).tolist() == [[0, 1], [2, 3]]

  @pytest.mark.slow
  def test_sequences_with_ids_of_both_shards_stay(self):
    """Each shard has a sequence 0, and no sequence is lost."""
    axes = axes_of(data=2)
    names = _names_of(np.asarray([9, 8, 1, 1], np.int32))
    state = recipes.begun_on(names, axes)
    ids = jnp.asarray([[0, 1], [0, 7]], jnp.int32)
    queue = dataclasses.replace(state.queue, ids=ids)
    state = dataclasses.replace(state, queue=queue)
    # The short sequences end, so their rows are free for others.
    state = sharding.generate(
      None, state, rollout.Until(steps=3), axes=axes, model=names["model"]
    )
    state = sharding.rebalance(state, axes=axes, max_pages=30)
    assert np.asarray(state.queue.ids).tolist() == [[0, 7], [0, 1]]
    assert np.all(np.asarray(state.queue.status) < by_hand.EMPTY)


class TestPrompts:
  def test_submitted_prompts_get_ids_and_codes(self):
    """Refused prompts take no row, so valid ones find all that are empty."""
    names = _names_of(np.asarray([2, 2, 2, 2]))
    axes = axes_of(data=2)
    batch = names["requests"]
    # Each shard has one sequence and one empty row.
    begun = dataclasses.replace(batch, num_samples=[1, 0, 0, 1])
    state = recipes.begun_on(names | {"requests": begun}, axes)
    assert state.queue.ids.reshape(-1).tolist()[::3] == [0, 3]
    ok = jaxkv.Status.OK
    bad_length = jaxkv.Status.BAD_LENGTH
    bad_id = jaxkv.Status.BAD_SEQUENCE
    full = jaxkv.Status.QUEUE_FULL
    lengths = np.asarray([0, 3, 3, 3])
    bad = dataclasses.replace(batch, lengths=lengths)
    _, out = sharding.submit(state, bad, axes=axes)
    assert out.code.tolist() == [bad_length, ok, ok, full]
    assert out.ids.tolist() == [-1, 4, 5, -1]
    _, out = sharding.submit(state, bad, axes=axes, ids=[9, 9, 3, 7])
    assert out.code.tolist() == [bad_length, ok, bad_id, ok]
    state, out = sharding.submit(state, batch, axes=axes, ids=[9, 0, 9, 8])
    assert out.code.tolist() == [ok, bad_id, bad_id, ok]
    assert sorted(state.queue.ids.reshape(-1).tolist()) == [0, 3, 8, 9]

  @pytest.mark.slow
  def test_submit_and_harvest(self):
    """A stream of prompts: ids are unique, and the idle shards get them."""
    lengths = np.asarray([2, 9, 9, 9], np.int32)
    names, axes = _names_of(lengths, slots=1), axes_of(data=4)
    state = recipes.begun_on(names, axes)
    results = {}
    batch = names["requests"]
    refused = None
    for _ in range(40):
      state = sharding.generate(
        None, state, rollout.Until(steps=2), axes=axes, model=names["model"]
      )
      state, out = sharding.harvest(state, axes=axes)
      for row in np.flatnonzero(out.results.valid).tolist():
        results[int(out.results.ids[row])] = out.results.tokens[row].tolist()
      if len(results) == 1 and refused is None:
        # The first prompt is refused, and takes no rows. Of the others, one
        # finds the rows of the one that ended.
        bad = dataclasses.replace(batch, lengths=np.r_[0, batch.lengths[1:]])
        state, refused = sharding.submit(state, bad, axes=axes)
      if bool(rollout.is_done(state)):
        break
    assert refused.ids.tolist() == [-1, 4, -1, -1]
    full = jaxkv.Status.QUEUE_FULL
    bad = jaxkv.Status.BAD_LENGTH
    assert refused.code.tolist() == [bad, jaxkv.Status.OK, full, full]
    # Equal to those of one device.
    single = recipes.begun(_names_of(lengths))
    end_state = recipes.done(names, single)
    expected = rollout.generated(end_state)
    assert sorted(results) == [0, 1, 2, 3, 4]
    for row in range(4):
      assert results[row] == expected.tokens[row].tolist()
    state, out = sharding.submit(state, batch, axes=axes, ids=[40, 30, 20, 10])
    _, second_out = sharding.submit(state, batch, axes=axes, ids=[10, 9, 9, 30])
    bad = jaxkv.Status.BAD_SEQUENCE
    assert second_out.code.tolist() == [bad, full, bad, bad]
    assert out.ok.all() and out.ids.tolist() == [40, 30, 20, 10]
    assert sorted(np.asarray(state.queue.ids).reshape(-1)) == [10, 20, 30, 40]

  @pytest.mark.slow
  def test_settings_of_samples_go_to_their_shard(self):
    """Settings follow their samples, also with an uneven number of prompts."""
    names = recipes.attention_alone()
    strings = rollout.stop_strings(
      [["b"], ["ca"]], guides.token_bytes([bytes([97 + n]) for n in range(11)])
    )
    names["requests"] = by_hand.requests_of(
      by_hand.PROMPTS[:3],
      sampling=rollout.Sampling(
        temperature=np.linspace(0.5, 2, 9),
        stop_tokens=[[n] for n in range(9)],
        logit_bias=[{n: 2.0} for n in range(9)],
        stop_strings=strings.select([0, 1, 1, 0, 0, 1, 0, 1, 0]),
      ),
      num_samples=[3, 1, 2],
    )
    single_end = recipes.done(names, recipes.begun(names))
    axes = axes_of(data=2)
    state = recipes.begun_on(names, axes)
    assert state.queue.ids.shape == (2, 6)
    state = recipes.done(names, state, axes)
    results = sharding.generated(state, axes=axes)
    assert_equal_results(results, jax.device_get(rollout.generated(single_end)))
