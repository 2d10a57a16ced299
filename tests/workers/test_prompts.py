"""Prompts are taken out of requests, and joined again in any order."""

import jax
import numpy as np

from jaxkv import rollout
from jaxkv._src.engine.requests import as_requests
from jaxkv._src.engine.requests import map_rows
from jaxkv._src.workers import prompts

_PROMPTS, _SAMPLES = 5, 2
_ROWS = _PROMPTS * _SAMPLES
_CONFIG = rollout.RolloutConfig(num_samples=_SAMPLES, max_new_tokens=4)


def _requests():
  """Requests whose rows differ in all fields."""
  row = np.arange(_ROWS, dtype=np.int32)
  tokens = rollout.token_bytes([b"a", b"b", b"c"])
  lists = [["abc"[number % 3]] * (number % 2) for number in range(_ROWS)]
  return rollout.Requests(
    np.arange(_PROMPTS * 20, dtype=np.int32).reshape(_PROMPTS, 20),
    [20, 3, 17, 16, 1],
    sampling=rollout.Sampling(
      temperature=row / 8,
      seed=row,
      stop_strings=rollout.stop_strings(lists, tokens),
    ),
    num_samples=[2, 1, 2, 2, 1],
    priority=row,
    salts=np.stack([row.astype(np.uint32)] * 4, axis=1),
    extra={"row": row},
  )


def test_any_order():
  requests = as_requests(_requests(), _CONFIG)
  parts = prompts.split(_requests(), _CONFIG)
  order = np.asarray([3, 0, 4])
  joined = prompts.join([parts[number] for number in order])
  samples = (order[:, None] * _SAMPLES + np.arange(_SAMPLES)).reshape(-1)
  expected = map_rows(
    lambda array: np.asarray(array)[order],
    lambda array: np.asarray(array)[samples],
    requests,
  )
  np.testing.assert_array_equal(joined.extra["row"], samples)
  found, leaves = jax.tree.leaves(joined), jax.tree.leaves(expected)
  for array, other in zip(found, leaves, strict=True):
    np.testing.assert_array_equal(array, other)


def test_shorter_tables_are_padded():
  parts = prompts.split(_requests(), _CONFIG)
  joined = prompts.join(parts[:1], 32)
  assert joined.tokens.shape == (1, 32)
  np.testing.assert_array_equal(joined.tokens[0, 20:], 0)


def test_prefixes_of_whole_blocks():
  parts = prompts.split(_requests(), _CONFIG)
  # The last token of a prompt is never cached, so 16 tokens have no block.
  counts = [len(prompts.prefixes_of(part)) for part in parts]
  assert counts == [1, 0, 1, 0, 0]
