"""Logits that are split by vocabulary: equal samples, and no gather."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv import models
from jaxkv import rollout
from jaxkv import sharding
from jaxkv._src.sampling import sample
from tests.sharding import recipes
from tests.tools.collectives import largest_dimension

pytestmark = pytest.mark.skipif(
  jax.device_count() < 8, reason="needs eight devices"
)
_OPTIONS = {"raw_log_probs": True, "entropy": True, "top_log_probs": 3}


@pytest.mark.parametrize(
  "parts", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]
)
@pytest.mark.parametrize(
  "vocab_size",
  [40, *(pytest.param(n, marks=pytest.mark.slow) for n in (4000, 4096))],
)
@pytest.mark.parametrize(
  "has_filters", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_samples_equal_those_of_whole_rows(vocab_size, parts, has_filters):
  """Parts can begin within a block, or be smaller than one."""
  logits = np.random.default_rng(vocab_size).normal(size=(12, vocab_size)) * 2
  # Some logits are equal. The last row has no distribution.
  logits = np.round(logits, 1).astype(np.float32)
  logits[-1, -1] = -np.nan
  row = jnp.arange(12, dtype=jnp.int32)
  sampling = rollout.Sampling()
  if has_filters:
    sampling = rollout.Sampling(
      temperature=jnp.where(row == 1, 0.0, 0.8),
      top_k=jnp.where((row == 2) | (row > 5), 9, 0),
      top_p=jnp.where((row == 3) | (row > 5), 0.7, 1.0),
      min_p=jnp.where((row == 4) | (row > 5), 0.1, 0.0),
    )
  keys = jax.random.split(jax.random.key(1), 12)
  draw = functools.partial(sample.sample_tokens, keys, row, **_OPTIONS)
  by_vocab = NamedSharding(recipes.axes_of(model=parts).mesh, P(None, "model"))
  expected = jax.jit(draw)(logits, sampling)
  draw = jax.jit(functools.partial(draw, parts=parts))
  split = draw(jax.device_put(logits, by_vocab), sampling)
  leaves = zip(jax.tree.leaves(split), jax.tree.leaves(expected), strict=True)
  for actual, whole in leaves:
    if actual.dtype == jnp.int32:
      np.testing.assert_array_equal(actual[:-1], whole[:-1])
    else:
      # Devices add float32 partial sums.
      np.testing.assert_allclose(actual, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.deep
@pytest.mark.parametrize(("data", "parts"), [(0, 8), (2, 4)])
def test_rollouts_gather_no_logits(data, parts):
  """Without shards `unembed` is split, and with them tied embeddings."""
  names, axes = recipes.llama(), recipes.axes_of(data=data, model=parts)
  decoder = dataclasses.replace(
    recipes.LLAMA, vocab_size=4096, tied_embeddings=data > 0
  )
  options = _OPTIONS | {"unfiltered_log_probs": True}
  sampling = rollout.Sampling(
    **{"temperature": [0.0, 0.7] * 16, "top_k": 60, "top_p": 0.9},
    **{"presence_penalty": 0.1, "frequency_penalty": 0.2, "min_tokens": 2},
    **{"logit_bias": {5: 3.0, 7: -np.inf}, "bad_words": [[9], [4, 5]]},
  )
  requests = names["requests"]
  requests = dataclasses.replace(
    requests, sampling=sampling, log_probs_from=np.ones_like(requests.lengths)
  )
  names |= {
    "model": functools.partial(models.forward, config=decoder),
    "params": models.init_params(jax.random.key(0), decoder),
    "config": dataclasses.replace(names["config"], draft_tokens=2, **options),
    "requests": requests,
  }
  state = recipes.done(names, recipes.begun(names))
  expected = jax.device_get(rollout.generated(state))
  state = recipes.begun_on(names, axes)
  run = functools.partial(sharding.generate, axes=axes, model=names["model"])
  compiled = jax.jit(run).lower(names["params"], state).compile()
  text = compiled.as_text() or ""
  # A call has 75 columns at most, and a row 64 blocks of 64 tokens.
  assert largest_dimension(text) <= 75
  assert f" = f32[3,{4096 // parts}]{{1,0}} dot(" in text
  assert "f32[3,4096]" not in text
  results = sharding.generated(compiled(names["params"], state), axes=axes)
  recipes.assert_equal_results(results, expected)
  for name in options:
    actual = getattr(results.records, name)[: len(expected.lengths)]
    whole = getattr(expected.records, name)
    np.testing.assert_allclose(actual, whole, rtol=1e-5, atol=1e-5)
