"""A packed call equals one call for each of its sequences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import kv as kv_memory
from jaxkv.kernels import AttentionOptions

SIZES = jaxkv.CacheConfig(
  num_pages=24, page_size=4, num_slots=4, pages_per_slot=5
)
HEADS, KV_HEADS, DIM = 4, 2, 8
# Tokens before the call, and in it; the fourth sequence is not in the call.
STARTS = (6, 0, 3, 4)
COUNTS = (1, 7, 5, 0)


def filled():
  """Pages of NaN, with random keys and values before `STARTS`."""
  kv = kv_memory.init(
    SIZES, num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=jnp.float32
  )
  kv = dataclasses.replace(kv, k=kv.k * jnp.nan, v=kv.v * jnp.nan)
  prefix = rows(starts=[0] * 4, num_tokens=STARTS)
  for layer in range(2):
    k, v = (normal(layer * 2 + i, 4, 6, KV_HEADS, DIM) for i in range(2))
    kv = kv_memory.write(kv, prefix, layer, k, v)
  return kv


def rows(starts, num_tokens, of=(0, 1, 2, 3)):
  """Returns a view of some of the four sequences."""
  table = jnp.arange(1, 21, dtype=jnp.int32).reshape(4, 5)
  return kv_memory.View(
    page_table=table[jnp.asarray(of)],
    starts=jnp.asarray(starts, jnp.int32),
    num_tokens=jnp.asarray(num_tokens, jnp.int32),
  )


def normal(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape)


def packed(decode_only: bool):
  """Returns a packed view, and the sequence and column of each token.

  The last two tokens of the third sequence are decode rows, before the tokens
  that they attend to.
  """
  tokens = [(2, 4), (0, 0), (-1, 0), (2, 3)]
  decode = rows([7, 6, 0, 6], [1, 1, 0, 1], of=(2, 0, 1, 2))
  if decode_only:
    return kv_memory.PackedView(decode=decode), tokens
  prefill = rows([3, 0, 4], [3, 7, 0], of=(2, 1, 3))
  tokens += [(2, column) for column in range(3)]
  tokens += [(1, column) for column in range(7)] + [(-1, 0)] * 3
  return kv_memory.PackedView(decode=decode, prefill=prefill), tokens


def call(kv, view, layer, k, v, q, **options):
  """Writes and attends; returns memory, outputs and log-sum-exps."""
  kv = kv_memory.write(kv, view, layer, k, v)
  options = AttentionOptions(**options)
  out, lse = kv_memory.attend_with_lse(kv, view, layer, q, options=options)
  return kv, out, lse


def one_row(array, tokens):
  """[1, columns, ...]: an array by sequence and column, as it is packed."""
  sequence, column = np.asarray(tokens).T
  return array[jnp.asarray(sequence), jnp.asarray(column)][None]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
  "fresh", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_equals_a_call_for_each_sequence(window, fresh):
  k, v = (normal(i, 4, 7, KV_HEADS, DIM) for i in (7, 8))
  q = normal(9, 4, 7, HEADS, DIM)
  kv, expected, lse = call(
    filled(), rows(STARTS, COUNTS), 1, k, v, q, window=window
  )
  view, tokens = packed(decode_only=False)
  if fresh:
    view = kv_memory.refresh_shared(kv, view)
  packed_kv, out, same_lse = call(
    filled(), view, 1, *(one_row(a, tokens) for a in (k, v, q)), window=window
  )
  np.testing.assert_array_equal(packed_kv.k, kv.k)
  np.testing.assert_array_equal(packed_kv.v, kv.v)
  for index, (sequence, column) in enumerate(tokens):
    if sequence < 0:
      np.testing.assert_array_equal(out[0, index], 0)
      np.testing.assert_array_equal(same_lse[0, index], -np.inf)
      continue
    np.testing.assert_allclose(
      out[0, index], expected[sequence, column], atol=2e-6
    )
    np.testing.assert_allclose(
      same_lse[0, index], lse[sequence, column], atol=2e-6
    )


def test_decode_rows_equal_a_decode_step():
  """Decode rows without chunks equal a decode step, bit for bit."""
  view, _ = packed(decode_only=True)
  k, v = (normal(i, 4, 1, KV_HEADS, DIM) for i in (7, 8))
  q = normal(9, 4, 1, HEADS, DIM)
  kv, expected, lse = call(filled(), view.decode, 0, k, v, q)
  packed_kv, *out = call(filled(), view, 0, *(a[:, 0][None] for a in (k, v, q)))
  np.testing.assert_array_equal(packed_kv.k, kv.k)
  np.testing.assert_array_equal(out[0][0], expected[:, 0])
  np.testing.assert_array_equal(out[1][0], lse[:, 0])


@pytest.mark.parametrize(
  ("shape", "message"),
  [
    ((2, 17), r"\[1, more than 4, ...\], with a column for each row of"),
    ((1, 4), r"\[1, more than 4, ...\], with a column for each row of"),
  ],
)
def test_bad_numbers_of_columns_are_refused(shape, message):
  view, _ = packed(decode_only=False)
  k = normal(0, *shape, KV_HEADS, DIM)
  with pytest.raises(ValueError, match=message):
    kv_memory.write(filled(), view, 0, k, k)


def test_bad_columns_of_decode_rows_are_refused():
  view, _ = packed(decode_only=True)
  q = normal(0, 1, 5, HEADS, DIM)
  with pytest.raises(ValueError, match=r"`q` must be \[1, 4, ...\]"):
    kv_memory.attend(filled(), view, 0, q)


def test_tree_masks_are_refused():
  view, tokens = packed(decode_only=False)
  q = one_row(normal(9, 4, 7, HEADS, DIM), tokens)
  mask = jnp.ones((1, len(tokens), 2), bool)
  with pytest.raises(ValueError, match="a PackedView has no drafts"):
    kv_memory.attend(
      filled(), view, 0, q, options=AttentionOptions(tree_mask=mask)
    )
