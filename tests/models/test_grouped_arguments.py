"""Arguments that `grouped_log_probs` takes and refuses."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from tests.models import tiny_decoders as tiny

pytestmark = pytest.mark.slow

_CONFIG = tiny.llama()
_EXACT = dataclasses.replace(_CONFIG, numerics="exact")
_LENGTHS = np.array([[2, 1], [0, 2], [1, 2]], np.int32)


@functools.cache
def _params() -> Any:
  return models.init_params(jax.random.key(0), _CONFIG)


def _arguments() -> tuple[Any, ...]:
  """Three prompts of three tokens, and two completions of each."""
  draw = np.random.default_rng(0)
  prompts = draw.integers(0, 11, (3, 3)).astype(np.int32)
  completions = draw.integers(0, 11, (3, 2, 2)).astype(np.int32)
  return prompts, np.array([3, 1, 2], np.int32), completions, _LENGTHS


def _run(changes: dict[int, Any] | None = None, **options: Any) -> Any:
  arguments = list(_arguments())
  for index, value in (changes or {}).items():
    arguments[index] = value
  options = {"params": _params(), "config": _CONFIG} | options
  params = options.pop("params")
  return models.grouped_log_probs(params, *arguments, **options)


class TestTemperature:
  @pytest.mark.parametrize("config", [_CONFIG, _EXACT], ids=["fast", "exact"])
  def test_temperature_0_is_scored_at_1(self, config):
    """As in a rollout, whose greedy rows have log-probs at temperature 1."""
    expected = _run(config=config)
    assert np.isfinite(expected).all()
    assert (np.asarray(expected) < 0).sum() == _LENGTHS.sum()
    for zero in (0, 0.0, -0.0, np.array(0.0), np.float32(0), jnp.float32(0)):
      log_probs = _run(config=config, temperature=zero)
      np.testing.assert_array_equal(log_probs, expected)

  @pytest.mark.parametrize("config", [_CONFIG, _EXACT], ids=["fast", "exact"])
  def test_traced_temperatures(self, config):
    run = jax.jit(lambda heat: _run(config=config, temperature=heat))
    for temperature in (0.0, 0.3, 1.0, 4.0):
      expected = _run(config=config, temperature=temperature)
      np.testing.assert_allclose(
        run(temperature), expected, rtol=1e-5, atol=1e-6
      )
    np.testing.assert_allclose(
      run(2), _run(config=config, temperature=2.0), rtol=1e-5, atol=1e-6
    )
    is_drawn = np.arange(2) < _LENGTHS[..., None]
    for temperature in (-1.0, np.nan, np.inf, -np.inf):
      log_probs = np.asarray(run(temperature))
      np.testing.assert_array_equal(np.isnan(log_probs), is_drawn)

  @pytest.mark.parametrize("config", [_CONFIG, _EXACT], ids=["fast", "exact"])
  def test_a_very_low_temperature_gives_no_nan(self, config):
    """The most likely token has all of the probability, and no NaN."""
    log_probs = np.asarray(_run(config=config, temperature=1e-37))
    assert not np.isnan(log_probs).any()
    logits = models.forward_uncached(
      _params(),
      jnp.asarray(_arguments()[0][:1]),
      jnp.arange(3)[None],
      config=config,
    )
    best_tokens = jnp.argmax(logits[:, -1], axis=-1).reshape(1, 1, 1)
    completions = np.broadcast_to(best_tokens, (3, 2, 2)).astype(np.int32)
    log_probs = _run({2: completions}, config=config, temperature=1e-37)
    assert float(log_probs[0, 0, 0]) == 0

  def test_the_temperature_has_a_gradient(self):
    def total(temperature: Any) -> jax.Array:
      return jnp.sum(_run(temperature=temperature))

    gradient = jax.grad(total)(jnp.float32(0.7))
    expected = (total(0.71) - total(0.69)) / 0.02
    np.testing.assert_allclose(gradient, expected, rtol=1e-2)

  @pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
      (-1.0, ValueError, "must be 0, or a finite float32 of .* got -1.0; use"),
      (np.array(-1.0), ValueError, "must be 0, or .* got -1.0; use 0"),
      (jnp.float32(jnp.nan), ValueError, "must be 0, or .* got nan; use 0"),
      (np.float64(np.inf), ValueError, "must be 0, or .* got inf; use 0"),
      (1e-40, ValueError, "must be 0, or a finite float32 of .* got 1e-40"),
      (np.ones(3), ValueError, "must have the shape"),
      (None, TypeError, "must hold real numbers, got object"),
      ("hot", TypeError, "must hold real numbers"),
      (True, TypeError, "must hold real numbers, got bool"),
      (1j, TypeError, "must hold real numbers, got complex128"),
      (np.array(1j), TypeError, "must hold real numbers, got complex128"),
    ],
  )
  def test_invalid_temperatures_are_refused(self, wrong, error, message):
    with pytest.raises(error, match=f"`temperature` {message}"):
      _run(temperature=wrong)


@pytest.mark.parametrize("config", [_CONFIG, _EXACT], ids=["fast", "exact"])
@pytest.mark.parametrize("wrong", [11, -1])
def test_tokens_outside_the_vocabulary_give_nan(config, wrong):
  """The log-prob of the token is NaN, and those of tokens after it."""
  draw = np.random.default_rng(1)
  completions = draw.integers(0, 11, (3, 2, 4)).astype(np.int32)
  turns = np.ones((3, 2, 1, 2), np.int32)
  lengths = np.full((3, 2), 4, np.int32), np.full((3, 2, 1), 2, np.int32)
  for column, expected in ((0, [1, 1, 1, 1]), (2, [0, 1, 1, 1])):
    tokens = completions.copy()
    tokens[0, 1, column] = wrong
    log_probs = _run({2: (tokens, turns), 3: lengths}, config=config)
    nan_tokens, nan_turns = map(np.isnan, log_probs)
    assert nan_tokens[0].tolist() == [[0] * 4, expected]
    assert nan_turns[0].tolist() == [[[0, 0]], [[1, 1]]]
    assert not nan_tokens[1:].any() and not nan_turns[1:].any()
  tokens = completions.copy()
  tokens[0, 1, 3] = wrong  # No input: nothing follows it.
  log_probs = np.isnan(_run({2: tokens, 3: lengths[0]}, config=config))
  assert log_probs[0].tolist() == [[0] * 4, [0, 0, 0, 1]]
  assert not log_probs[1:].any()
  tokens = _arguments()[0].copy()
  tokens[0, 1] = wrong
  log_probs = np.isnan(_run({0: tokens}, config=config))
  np.testing.assert_array_equal(
    log_probs[0], np.arange(2) < _LENGTHS[0, :, None]
  )
  assert not log_probs[1:].any()


@pytest.mark.fast
@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({0: np.zeros(3, np.int32)}, "`prompts` must have the shape"),
    ({0: np.zeros((3, 0), np.int32)}, "`prompts` must have the shape"),
    ({1: np.zeros(2, np.int32)}, "`prompt_lengths` must have the shape"),
    ({2: np.zeros((2, 4, 5), np.int32)}, "`completions` must have the shape"),
    ({3: np.zeros((3, 3), np.int32)}, "`completion_lengths` must have"),
    (
      {3: (_LENGTHS, _LENGTHS)},
      r"the same number of levels \(at least one\), got 1 and 2",
    ),
    ({2: (), 3: ()}, r"number of levels \(at least one\), got 0 and 0"),
  ],
)
def test_wrong_shapes_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    _run(changes)


@pytest.mark.fast
def test_float_tokens_are_refused():
  with pytest.raises(TypeError, match="`completions` must hold integers"):
    _run({2: _arguments()[2] * 1.0})


@pytest.mark.parametrize("wrong", [None, {}, "llama"])
def test_a_config_of_another_type_is_refused(wrong):
  with pytest.raises(TypeError, match=r"`config` must be a Decoder, got"):
    _run(config=wrong)


def test_params_of_another_decoder_are_refused():
  for wrong in (None, {}, {"layers": ()}, np.zeros(3)):
    with pytest.raises(TypeError, match='`params` must be a dict with "embed"'):
      _run(params=wrong)
  params = dict(_params(), embed=_params()["embed"][1:])
  with pytest.raises(ValueError, match="must be float32"):
    _run(params=params)


@pytest.mark.parametrize(
  ("wrong", "error", "message"),
  [
    (
      (None, None),
      TypeError,
      "` must hold arrays, one for prompts .* None;",
    ),
    (
      np.zeros((3, 3, 1, 2), int),
      TypeError,
      "` must be a tuple, the experts of",
    ),
    ((np.zeros(3),), TypeError, "` must be a tuple, .* got a tuple of 1;"),
    (
      (np.zeros(3), ()),
      ValueError,
      r"\[1\]` must have as many levels as `completions`, 1, got 0",
    ),
  ],
)
def test_experts_that_are_refused(wrong, error, message):
  with pytest.raises(error, match=f"`experts{message}"):
    _run(experts=wrong)


def test_experts_of_a_decoder_without_any():
  used = np.zeros((3, 3, 1, 2), np.int32), np.zeros((3, 2, 2, 1, 2), np.int32)
  with pytest.raises(
    ValueError, match=r"`config` must have .* got none; leave out `experts`"
  ):
    _run(experts=used)
