"""Attention in trees of tokens, one token after another in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv._src.models.decoder import prompt_tree
from jaxkv._src.models.decoder import tree_attention

_HEADS, _KV_HEADS, _DIM = 4, 2, 8
# A prompt, two branches of it, and two completions of each branch.
_WIDTHS = (5, 3, 4)
_LENGTHS = ([[5], [3]], [[3, 1], [2, 0]], [[4, 2, 0, 3], [1, 4, 4, 2]])


def _inputs():
  rng = np.random.default_rng(0)
  tree = prompt_tree.of_lengths(
    _WIDTHS, [jnp.asarray(length, jnp.int32) for length in _LENGTHS]
  )
  columns = sum(np.multiply(tree.widths, tree.branches).tolist())
  q, k, v = (
    jnp.asarray(rng.normal(size=(2, columns, heads, _DIM)), jnp.float32)
    for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
  )
  return tree, q, k, v


def _paths() -> list[tuple[int, list[int]]]:
  """Returns the tree and the columns of the tokens of each completion."""
  starts = np.cumsum([0, *np.multiply(_WIDTHS, (1, 2, 4))])
  paths = []
  for tree in range(2):
    for leaf in range(4):
      path = []
      for level, branch in enumerate((0, leaf // 2, leaf)):
        first_column = starts[level] + branch * _WIDTHS[level]
        length = _LENGTHS[level][tree][branch]
        path += range(first_column, first_column + length)
      paths.append((tree, path))
  return paths


@pytest.mark.parametrize("window", [None, 1, 4, 6])
def test_tokens_attend_to_their_path(window):
  """A window counts the tokens of the path, not the columns of the row."""
  tree, q, k, v = _inputs()
  sinks = np.linspace(-1, 1, _HEADS).astype(np.float32)
  options = {"window": window, "scale": 0.5, "soft_cap": 3.0}
  out = jax.jit(
    lambda *arrays: tree_attention.attend(*arrays, sinks=sinks, **options)
  )(tree, q, k, v)
  q, k, v, out = map(np.asarray, (q, k, v, out))
  for row, path in _paths():
    for index, column in enumerate(path):
      oldest = 0 if window is None else max(index + 1 - window, 0)
      visible = path[oldest : index + 1]
      for head in range(_HEADS):
        keys = k[row, visible, head // 2].astype(np.float64)
        scores = 3 * np.tanh(0.5 * (keys @ q[row, column, head]) / 3)
        weights = np.exp(scores)
        weights /= weights.sum() + np.exp(sinks[head])
        expected = weights @ v[row, visible, head // 2]
        # Float32 sums of at most 13 terms of order 1.
        np.testing.assert_allclose(
          out[row, column, head], expected, rtol=1e-4, atol=1e-5
        )
