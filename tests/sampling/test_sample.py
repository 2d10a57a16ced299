"""Tokens drawn from logits, and their log-probs."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv._src.sampling import sample as sample_steps
from jaxkv._src.sampling import settings
from jaxkv._src.sampling.penalties import adjust
from jaxkv._src.sampling.penalties import see
from jaxkv._src.sampling.sample import sample_tokens
from jaxkv._src.sampling.settings import Sampling
from tests.sampling import by_definition
from tests.sampling.by_definition import Row
from tests.tools import traced_loops
from tests.tools.draws import probabilities
from tests.tools.draws import sample
from tests.tools.tiers import slow_except
from tests.tools.transforms import TRANSFORMS
from tests.tools.transforms import check_under


@functools.partial(
  jax.jit, static_argnames=("raw_log_probs", "entropy", "top_log_probs")
)
def _compiled(*arguments, **options):
  return sample_tokens(*arguments, **options)


_LOGITS = jnp.asarray([[0.0, 1.0, 3.0, -2.0], [5.0, 5.0, 1.0, 0.0]])


def _keys(count, seed=0):
  key = jax.random.key(seed)
  indices = jnp.arange(count, dtype=jnp.int32)
  return jax.vmap(lambda number: jax.random.fold_in(key, number))(indices)


def _sample(temperature, logits=_LOGITS, counts=None, keys=None):
  rows = logits.shape[0]
  counts = jnp.zeros((rows,), jnp.int32) if counts is None else counts
  keys = _keys(rows) if keys is None else keys
  return sample(keys, counts, logits, jnp.float32(temperature))


class TestGreedy:
  def test_greedy_rows_take_the_first_of_the_best_tokens(self):
    tokens, log_probs = _sample(0.0)
    assert tokens.tolist() == [2, 0]
    expected = jax.nn.log_softmax(_LOGITS)[jnp.arange(2), tokens]
    np.testing.assert_allclose(log_probs, expected, rtol=1e-6)

  @pytest.mark.parametrize("temperature", [1.2e-38, 1e-30, 1e-6])
  def test_a_low_temperature_takes_the_best_token(self, temperature):
    """Nothing overflows: the best two of the second row stay equal."""
    logits = jnp.asarray([[0.0, 80.0, 3.0], [80.0, 80.0, 1.0]])
    tokens, log_probs = _sample(temperature, logits)
    assert int(tokens[0]) == 1 and int(tokens[1]) in (0, 1)
    np.testing.assert_allclose(log_probs, [0, -np.log(2)], rtol=1e-6)

  def test_the_highest_temperature_is_uniform(self):
    tokens, log_probs = _sample(2.0**126)
    assert max(tokens.tolist()) < 4
    np.testing.assert_allclose(log_probs, -np.log(4), rtol=1e-6)


class TestDraws:
  def test_a_draw_depends_on_key_and_count_alone(self):
    logits = jnp.zeros((6, 50))
    keys = _keys(6)
    counts = jnp.arange(6, dtype=jnp.int32)
    tokens, _ = _sample(1.0, logits, counts, keys)
    # As many rows, so that one program serves all calls.
    order = jnp.asarray([4, 0, 5, 2, 2, 1])
    moved_tokens, _ = _sample(1.0, logits[order], counts[order], keys[order])
    assert moved_tokens.tolist() == tokens[order].tolist()
    later_tokens, _ = _sample(1.0, logits, counts + 1, keys)
    reseeded_tokens, _ = _sample(1.0, logits, counts, _keys(6, seed=1))
    assert tokens.tolist() != later_tokens.tolist()
    assert tokens.tolist() != reseeded_tokens.tolist()

  @slow_except("vocab_size", [1, 2, 3, 100, 513], 3)
  @pytest.mark.parametrize("vocab_size", [1, 2, 3, 100, 513])
  def test_every_token_is_drawn_as_often_as_its_probability(self, vocab_size):
    """Whatever the size of the vocabulary: blocks may be padded."""
    count = 400 * vocab_size
    weights = np.random.default_rng(vocab_size).integers(0, 4, vocab_size)
    weights[-1] = 2
    logits = jnp.log(jnp.asarray(weights, jnp.float32))
    # A call needs several copies of its logits, of 420 MB for all rows at once.
    rows = jnp.broadcast_to(logits[None], (count // 20, vocab_size))
    draws = jax.lax.map(
      lambda keys: _sample(1.0, rows, keys=keys), _keys(count).reshape(20, -1)
    )
    tokens, log_probs = (np.ravel(x) for x in draws)
    expected = weights / weights.sum()
    frequencies = np.bincount(np.asarray(tokens), minlength=vocab_size)
    assert len(frequencies) == vocab_size
    assert not np.any(frequencies[weights == 0])
    spread = (count * expected * (1 - expected)) ** 0.5
    assert np.all(np.abs(frequencies - count * expected) <= 6 * spread)
    np.testing.assert_allclose(
      log_probs, np.log(expected[np.asarray(tokens)]), rtol=1e-4, atol=1e-6
    )


class TestMixed:
  """Rows with different settings."""

  def _draw(self, rows, logits, seed=0, counts=None, **options):
    sampling = by_definition.sampling_of(
      rows, "temperature", "top_k", "top_p", "min_p"
    )
    if counts is None:
      counts = jnp.arange(len(rows), dtype=jnp.int32)
    keys = _keys(len(rows), seed)
    return sampling, _compiled(keys, counts, logits, sampling, **options)

  def test_by_hand(self):
    """Log-probs are those of the filtered distribution."""
    logits = jnp.log(jnp.asarray([[1.0, 8.0, 4.0, 2.0]]))
    rows = [
      Row(top_k=1),
      Row(top_p=0.5),
      Row(min_p=1.0),
      Row(temperature=0.0),
      Row(temperature=0.0, top_k=2, top_p=0.1, min_p=0.9),
      Row(top_k=2),
      Row(temperature=0.5, top_k=2),
    ]
    _, samples = self._draw(rows, jnp.repeat(logits, len(rows), axis=0))
    assert samples.tokens[:5].tolist() == [1] * 5
    np.testing.assert_allclose(
      samples.log_probs[:5], np.log([1, 1, 1, 8 / 15, 8 / 15]), rtol=1e-6
    )
    shares = {1: 8 / 12, 2: 4 / 12}
    assert float(samples.log_probs[5]) == pytest.approx(
      np.log(shares[int(samples.tokens[5])]), rel=1e-6
    )
    shares = {1: 64 / 80, 2: 16 / 80}
    assert float(samples.log_probs[6]) == pytest.approx(
      np.log(shares[int(samples.tokens[6])]), rel=1e-6
    )

  @slow_except("vocab_size", [1, 2, 3, 11, 64, 513], 64)
  @pytest.mark.parametrize("vocab_size", [1, 2, 3, 11, 64, 513])
  def test_rows_are_drawn_as_defined_in_any_batch(self, vocab_size):
    rng = np.random.default_rng(vocab_size)
    rows = [
      Row(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 2.5])),
        top_k=int(rng.choice([-1, 0, 1, 2, 7, 10_000])),
        top_p=float(rng.choice([1.0, 0.95, 0.6, 0.05])),
        min_p=float(rng.choice([0.0, 0.01, 0.2])),
      )
      for _ in range(40)
    ]
    logits = (3 * rng.normal(size=(len(rows), vocab_size))).astype(np.float32)
    sampling, samples = self._draw(rows, jnp.asarray(logits), seed=vocab_size)
    all_probabilities = jax.jit(probabilities)(jnp.asarray(logits), sampling)
    keys = _keys(len(rows), vocab_size)
    for i, row in enumerate(rows):
      shares = by_definition.probabilities(logits[i].astype(float), row)
      np.testing.assert_allclose(
        all_probabilities[i], shares, rtol=1e-5, atol=1e-7
      )
      token = int(samples.tokens[i])
      assert token == by_definition.drawn(shares, keys[i], i)
      score = np.log(shares[token])
      if row.temperature == 0:
        plain = by_definition.probabilities(logits[i].astype(float), Row())
        score = np.log(plain[token])
      assert float(samples.log_probs[i]) == pytest.approx(score, abs=1e-5)
      row_slice = slice(i, i + 1)
      row_sample = _compiled(
        keys[row_slice],
        jnp.asarray([i], jnp.int32),
        jnp.asarray(logits[row_slice]),
        jax.tree.map(lambda leaf, one=row_slice: leaf[one], sampling),
      )
      assert int(row_sample.tokens[0]) == token
      np.testing.assert_allclose(
        row_sample.log_probs[0],
        samples.log_probs[i],
        rtol=1e-6,
        atol=1e-6,
      )

  @pytest.mark.parametrize("value", [-np.inf, np.nan])
  @pytest.mark.parametrize("temperature", [0.0, 1.0])
  def test_a_row_without_a_distribution_does_not_change_others(
    self, value, temperature
  ):
    """They get some token, and change nothing for others."""
    logits = np.random.default_rng(3).normal(size=(3, 50)).astype(np.float32)
    whole = logits.copy()
    part = logits.copy()
    whole[1] = part[1, 7] = value
    row = Row(temperature=temperature, top_k=5, top_p=0.9, min_p=0.1)
    _, expected = self._draw([row] * 3, jnp.asarray(logits))
    for broken in (whole, part):
      _, samples = self._draw([row] * 3, jnp.asarray(broken))
      assert 0 <= int(samples.tokens[1]) < 50
      assert np.isnan(samples.log_probs[1]) == bool(
        np.isnan(value) or broken is whole
      )
      for i in (0, 2):
        assert int(samples.tokens[i]) == int(expected.tokens[i])

  def test_no_token_of_weight_zero_is_drawn(self, monkeypatch):
    """Prefix sums are rounded independently, so they may grow at a zero."""
    weights = jnp.asarray([[0.0, 3.0, 0.0, 5.0, 0.0]] * 4)
    rounded_sums = jnp.asarray([[0.0, 3.0, 3.25, 8.0, 8.5]] * 4)
    monkeypatch.setattr(jnp, "matmul", lambda *_, **__: rounded_sums)
    uniforms = jnp.asarray([0.0, 2.0, 3.125, 8.25]) / 8.5
    tokens = sample_steps._inverse_cdf(weights, uniforms)
    # The last one exceeds all sums at positive weights.
    assert tokens.tolist() == [1, 1, 3, 3]

  def test_nothing_is_drawn_from_masked_tokens(self):
    """Fewer tokens than top-k are left."""
    logits = jnp.where(jnp.arange(40) % 20 == 3, 0.0, -jnp.inf)[None]
    row = Row(top_k=5, top_p=0.999, min_p=0.001)
    _, samples = self._draw([row] * 200, jnp.repeat(logits, 200, axis=0))
    assert set(samples.tokens.tolist()) == {3, 23}
    np.testing.assert_allclose(samples.log_probs, np.log(0.5), rtol=1e-6)

  @pytest.mark.slow
  def test_half_precision(self):
    logits = jnp.asarray([[1.0, 3.0, 2.0]], jnp.bfloat16)
    _, half = self._draw([Row(top_k=2)], logits)
    _, full = self._draw([Row(top_k=2)], logits.astype(jnp.float32))
    assert half.log_probs.dtype == jnp.float32
    np.testing.assert_array_equal(half.log_probs, full.log_probs)
    with pytest.raises(TypeError, match="`logits` must be floats, got int32"):
      self._draw([Row()], jnp.zeros((1, 3), jnp.int32))


class TestWhatIsCompiled:
  """Unused settings add no operation to the program."""

  def _primitives(self, sampling, **options):
    equations = traced_loops.equations(
      functools.partial(sample_tokens, **options),
      _keys(2),
      jnp.zeros((2,), jnp.int32),
      jnp.zeros((2, 30)),
      sampling,
    )
    return [equation.primitive.name for equation in equations]

  def test_without_settings(self):
    names = self._primitives(Sampling())
    assert "while" not in names and "cond" not in names
    assert names.count("exp") == 2  # All tokens; those of a block.
    assert names.count("div") == 0

  def test_with_a_temperature_alone(self):
    names = self._primitives(Sampling(temperature=jnp.ones((2,))))
    # One of them chooses by platform.
    assert "while" not in names and names.count("cond") == 3

  def test_penalties_add_no_operation_to_a_draw(self):
    sampling = settings.as_sampling(
      Sampling(logit_bias={1: 2.0}, presence_penalty=1.0, min_tokens=3), 2
    )
    assert self._primitives(sampling) == self._primitives(Sampling())

  def test_nothing_is_sorted(self):
    rows = [Row(top_k=3, top_p=0.5, min_p=0.1)] * 2
    names = self._primitives(
      by_definition.sampling_of(rows), top_log_probs=3, entropy=True
    )
    assert not {"sort", "top_k", "approx_top_k"} & {*names}


class TestTheModelsOwn:
  """Records of the distribution before filters and penalties."""

  def _rows(self, logits, raw_logits=None, **options):
    rows = len(logits)
    raw_logits = (
      None if raw_logits is None else jnp.asarray(raw_logits, jnp.float32)
    )
    return _compiled(
      _keys(rows),
      jnp.zeros((rows,), jnp.int32),
      jnp.asarray(logits, jnp.float32),
      Sampling(top_k=jnp.ones((rows,), jnp.int32)),
      raw_logits=raw_logits,
      **options,
    )

  def test_by_hand(self):
    raw_logits = np.log([[0.5, 0.125, 0.25, 0.125]])
    samples = self._rows(
      [[0, 0, 9, 0]],
      raw_logits,
      raw_log_probs=True,
      entropy=True,
      top_log_probs=3,
    )
    assert samples.tokens.tolist() == [2] and samples.log_probs.tolist() == [0]
    np.testing.assert_allclose(
      samples.records.raw_log_probs, np.log([0.25]), rtol=1e-6
    )
    np.testing.assert_allclose(
      samples.records.entropy, [1.75 * np.log(2)], rtol=1e-6
    )
    assert samples.records.top_tokens.tolist() == [[0, 2, 1]]
    np.testing.assert_allclose(
      samples.records.top_log_probs, np.log([[0.5, 0.25, 0.125]]), rtol=1e-6
    )

  def test_only_requested_records_are_returned(self):
    samples = self._rows([[0.0, 1.0]])
    assert not jax.tree.leaves(samples.records)
    samples = self._rows([[0.0, 1.0]], entropy=True)
    assert (
      samples.records.entropy is not None
      and samples.records.raw_log_probs is None
    )
    samples = self._rows([[0.0, 1.0]], top_log_probs=1)
    assert (
      samples.records.top_tokens.tolist() == [[1]]
      and samples.records.entropy is None
    )

  @pytest.mark.parametrize("exact", [False, True])
  def test_log_probs_before_the_filters(self, exact):
    """At the temperature: 1/4, 1/16 and 1/16; `top_k` leaves the first one."""
    samples = sample_tokens(
      jax.random.split(jax.random.key(0), 1),
      jnp.zeros((1,), jnp.int32),
      jnp.log(jnp.array([[0.5, 0.25, 0.25]])),
      Sampling(
        temperature=jnp.array([0.5], jnp.float32),
        top_k=jnp.ones((1,), jnp.int32),
      ),
      unfiltered_log_probs=True,
      exact=exact,
    )
    assert samples.tokens.tolist() == [0] and samples.log_probs.tolist() == [0]
    np.testing.assert_allclose(
      samples.records.unfiltered_log_probs, np.log([2 / 3]), rtol=1e-6
    )

  def test_raw_log_probs_without_raw_logits(self):
    samples = self._rows([[0.0, 1.0]], raw_log_probs=True)
    np.testing.assert_allclose(
      samples.records.raw_log_probs, [-np.log1p(np.exp(-1))], rtol=1e-6
    )


@pytest.mark.slow
class TestTransforms:
  """A step of all settings, under all of them equal to that under `jit`."""

  _SIZE = 40

  def _step(self, keys, counts, logits, sampling, history):
    outputs = adjust(logits, sampling, history)
    samples = sample_tokens(
      keys,
      counts,
      outputs,
      sampling,
      raw_logits=logits,
      raw_log_probs=True,
      entropy=True,
      top_log_probs=3,
    )
    return samples, see(history.seen, samples.tokens, counts >= 0)

  def _arguments(self):
    rng = np.random.default_rng(6)
    rows = [
      Row(
        prompt=rng.integers(0, self._SIZE, 5).tolist(),
        drawn=rng.integers(0, self._SIZE, 6).tolist(),
        temperature=temperature,
        top_k=9,
        top_p=0.8,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        repetition_penalty=1.5,
        min_tokens=8,
        stop_tokens=[1, 2],
        logit_bias={3: 1.5},
        bad_words=[[4], [5, 6]],
      )
      for temperature in (0.0, 0.5, 1.0, 2.0)
    ]
    sampling = by_definition.sampling_of(rows)
    history = by_definition.history_of(rows, sampling, self._SIZE)
    logits = (2 * rng.normal(size=(4, self._SIZE))).astype(np.float32)
    counts = jnp.asarray([6, 6, 6, 6], jnp.int32)
    # What is static has no rows.
    history = history._replace(stop_token=jnp.full((4, 1), 7, jnp.int32))
    return _keys(4), counts, jnp.asarray(logits), sampling, history

  @pytest.mark.parametrize("transform", TRANSFORMS)
  def test_a_step(self, transform):
    def check(step):
      self._same(step(*self._arguments()))

    check_under(transform, check, self._step)

  def test_settings_of_all_sequences(self):
    """Each shard reads the settings of its rows from those of all."""
    keys, counts, logits, sampling, history = self._arguments()
    sequences = jnp.arange(4, dtype=jnp.int32)

    def step(sampling, keys, counts, logits, sequences, history):
      row_sampling = settings.rows(sampling, sequences)
      return self._step(keys, counts, logits, row_sampling, history)

    def check(step):
      self._same(step(sampling, keys, counts, logits, sequences, history))

    check_under("shard_map", check, step, shared=1)

  def _same(self, out):
    expected = jax.jit(self._step)(*self._arguments())
    chex.assert_trees_all_equal_dtypes(out, expected)
    chex.assert_trees_all_close(out, expected, rtol=1e-5, atol=1e-6)
