"""Prompts are taken out of requests, and joined again in any order."""

import jax
import numpy as np

from jaxkv import guides
from jaxkv import rollout
from jaxkv._src.engine.queue.requests import as_requests
from jaxkv._src.engine.queue.requests import map_rows
from jaxkv._src.workers import prompts

_PROMPTS, _SAMPLES = 5, 2
_ROWS = _PROMPTS * _SAMPLES
_CONFIG = rollout.RolloutConfig(num_samples=_SAMPLES, max_new_tokens=4)


def _requests():
  """Requests whose rows differ in all fields."""
  row = np.arange(_ROWS, dtype=np.int32)
  tokens = guides.token_bytes([b"a", b"b", b"c"])
  lists = [["abc"[i % 3]] * (i % 2) for i in range(_ROWS)]
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


def test_parts_are_joined_in_any_order():
  requests = as_requests(_requests(), _CONFIG)
  parts = prompts.split(_requests(), _CONFIG)
  order = np.asarray([3, 0, 4])
  joined = prompts.join([parts[index] for index in order])
  samples = (order[:, None] * _SAMPLES + np.arange(_SAMPLES)).reshape(-1)
  expected = map_rows(
    lambda array: np.asarray(array)[order],
    lambda array: np.asarray(array)[samples],
    requests,
  )
  np.testing.assert_array_equal(joined.extra["row"], samples)
  arrays, leaves = jax.tree.leaves(joined), jax.tree.leaves(expected)
  for array, expected_array in zip(arrays, leaves, strict=True):
    np.testing.assert_array_equal(array, expected_array)


def test_shorter_prompts_are_padded():
  rows = [[1, 2, 3]], [[4]]
  parts = [
    prompts.split(rollout.Requests(row, [len(row[0])]), _CONFIG)[0]
    for row in rows
  ]
  joined = prompts.join(parts)
  assert joined.lengths.tolist() == [3, 1]
  assert joined.tokens.shape == (2, 3)
  assert joined.tokens.tolist() == [[1, 2, 3], [4, 0, 0]]


def test_shorter_lists_are_padded():
  def part(**fields):
    sampling = rollout.Sampling(**fields)
    requests = rollout.Requests([[1, 2]], [2], sampling=sampling)
    return prompts.split(requests, _CONFIG)[0]

  joined = prompts.join(
    [
      part(stop_tokens=[7], bad_words=[[9]], logit_bias={9: 1.0}),
      part(
        stop_tokens=[7, 8],
        bad_words=[[1], [2, 3]],
        logit_bias={5: 2.0, 6: 3.0},
      ),
    ]
  )
  sampling = jax.tree.map(lambda rows: rows[::_SAMPLES], joined.sampling)
  assert sampling.stop_tokens.tolist() == [[7, -1], [7, 8]]
  assert sampling.bad_words.tolist() == [
    [[-1, 9], [-1, -1]],
    [[-1, 1], [2, 3]],
  ]
  assert sampling.logit_bias.tokens.tolist() == [[9, -1], [5, 6]]
  assert sampling.logit_bias.values.tolist() == [[1, 0], [2, 3]]


def test_prefixes_of_whole_blocks():
  parts = prompts.split(_requests(), _CONFIG)
  # The last token of a prompt is never cached, so 16 tokens have no block.
  counts = [len(prompts.prefixes_of(part)) for part in parts]
  assert counts == [1, 0, 1, 0, 0]
