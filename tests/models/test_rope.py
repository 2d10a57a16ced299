"""Frequencies of rotary positions, by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv._src.models.decoder import rope as ropes
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.rope_config import rope_of
from jaxkv._src.models.loading.rope_config import rope_table


def test_yarn_divides_low_frequencies_by_its_factor():
  """Pairs make 100, 10, 1 and 0.1 turns in the original length."""
  length = 628
  base = 10.0**4
  plain = [1.0, 0.1, 0.01, 0.001]
  scaling = ropes.YarnScaling(
    factor=4.0,
    original_length=length,
    beta_fast=10.0 * length / (200 * math.pi),
    beta_slow=0.1 * length / (200 * math.pi),
    truncate=False,
  )
  rope = ropes.Rope(base=base, scaling=scaling)
  # Pair 1 keeps its frequency, pair 3 is divided; pair 2 is half-way.
  expected = plain * np.asarray([1, 1, (1 + 1 / 4) / 2, 1 / 4])
  np.testing.assert_allclose(ropes.frequencies(rope, 8), expected, rtol=1e-5)


def test_yarn_multiplies_cosines_and_sines():
  scaling = ropes.YarnScaling(
    factor=4.0, original_length=628, attention_factor=1.5
  )
  rope = ropes.Rope(scaling=scaling)
  positions = jnp.asarray([[0, 7]], jnp.int32)
  cosines, sines = ropes.rotation(rope, 4, positions)
  angles = 7 * ropes.frequencies(rope, 4)
  np.testing.assert_allclose(cosines[0, 0, 0], [1.5, 1.5])
  np.testing.assert_allclose(cosines[0, 1, 0], 1.5 * np.cos(angles), rtol=1e-5)
  np.testing.assert_allclose(sines[0, 1, 0], 1.5 * np.sin(angles), rtol=1e-5)


@pytest.mark.parametrize(
  ("settings", "factor", "attention_factor"),
  [
    # YaRN's default: 0.1 log(factor) + 1.
    ({"factor": 4.0}, 4, 0.1 * math.log(4) + 1),
    # Without a factor, that of the context lengths.
    ({}, 2.5, 0.1 * math.log(2.5) + 1),
    ({"factor": 4.0, "attention_factor": 1.25}, 4, 1.25),
    (
      {"factor": 4.0, "mscale": 2.0, "mscale_all_dim": 0.5},
      4,
      (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
    ),
  ],
)
def test_factors_of_yarn_are_read(settings, factor, attention_factor):
  scaling = {
    "rope_type": "yarn",
    "original_max_position_embeddings": 400,
    **settings,
  }
  config = ConfigFile(
    {"max_position_embeddings": 1000, "rope_scaling": scaling}, "config.json"
  )
  rope = rope_of(rope_table(config, 1e4), config, 8)
  assert isinstance(rope.scaling, ropes.YarnScaling)
  assert rope.scaling.factor == factor
  assert rope.scaling.attention_factor == pytest.approx(attention_factor)
  assert rope.scaling.original_length == 400
