"""Exact attention: its bits do not depend on the other rows of a call."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import jaxkv_kernels as kernels
from jaxkv import kv as paged
from tests import as_users
from tests.tools.tiers import slow_except

_TOKENS, _ROWS = 70, 3
_HEADS, _KV_HEADS, _DIM = 6, 2, 16


def _numbers(*shape):
  rng = np.random.default_rng(len(shape) + shape[1])
  return jnp.asarray(rng.normal(size=shape), jnp.float32)


def _pages(page_size=16):
  """Returns a memory with rows of tokens, and their page table."""
  columns = -(-_TOKENS // page_size)
  config = jaxkv.CacheConfig(
    num_pages=1 + _ROWS * columns,
    page_size=page_size,
    num_slots=_ROWS,
    pages_per_slot=columns,
  )
  kv = paged.init(
    config,
    num_layers=1,
    num_kv_heads=_KV_HEADS,
    head_dim=_DIM,
    dtype=jnp.bfloat16,
  )
  table = np.random.default_rng(0).permutation(_ROWS * columns) + 1
  table = jnp.asarray(table.reshape(_ROWS, columns), jnp.int32)
  zeros = jnp.zeros((_ROWS,), jnp.int32)
  whole = paged.View(page_table=table, starts=zeros, num_tokens=zeros + _TOKENS)
  k = _numbers(_ROWS, _TOKENS, _KV_HEADS, _DIM)
  return paged.write(kv, whole, 0, k, k[::-1]), table


def _queries():
  return _numbers(_ROWS, _TOKENS, _HEADS, _DIM)


@functools.cache
def _attend(**options):
  return as_users.jit(functools.partial(paged.attend, exact=True, **options))


def _read(kv, table, starts, num_tokens, q):
  view = paged.View(
    page_table=table,
    starts=jnp.asarray(starts, jnp.int32),
    num_tokens=jnp.asarray(num_tokens, jnp.int32),
  )
  return np.asarray(_attend()(kv, view, 0, q))


@pytest.fixture(scope="module")
def whole():
  kv, table = _pages()
  return _read(kv, table, [0] * 3, [_TOKENS] * 3, _queries())


def test_equals_fast_attention_up_to_rounding(whole):
  kv, table = _pages()
  zeros = jnp.zeros((_ROWS,), jnp.int32)
  view = paged.View(page_table=table, starts=zeros, num_tokens=zeros + _TOKENS)
  expected = paged.attend(kv, view, 0, _queries())
  np.testing.assert_allclose(whole, expected, atol=1e-5)


@slow_except("page_size", [4, 64], 4)
@pytest.mark.parametrize("page_size", [4, 64])
def test_chunks_and_page_sizes_change_no_bit(whole, page_size):
  kv, table = _pages(page_size)
  for start, count in ((0, 5), (63, 7), (69, 1)):
    q = _queries()[:, start : start + count]
    out = _read(kv, table, [start] * 3, [count] * 3, q)
    np.testing.assert_array_equal(out, whole[:, start : start + count])


def test_single_row_has_the_same_bits(whole):
  kv, table = _pages()
  q = _queries()[1:2, 40:41]
  out = _read(kv, table[1:2], [40], [1], q)
  np.testing.assert_array_equal(out, whole[1:2, 40:41])


@slow_except("columns", [0, 9], 9)
@pytest.mark.parametrize("columns", [0, 9])
def test_packed_call_has_the_same_bits(whole, columns):
  kv, table = _pages()
  starts = jnp.asarray([3, 69, 40], jnp.int32)
  num_tokens = jnp.asarray([1, 1, 0], jnp.int32)
  decode = paged.View(page_table=table, starts=starts, num_tokens=num_tokens)
  q = _queries()[jnp.arange(3), starts][None]
  expected = [whole[0, 3], whole[1, 69], np.zeros_like(whole[0, 0])]
  prefill = None
  if columns:
    prefill = paged.View(
      page_table=table[1:][::-1],
      starts=jnp.asarray([50, 0], jnp.int32),
      num_tokens=jnp.asarray([5, 3], jnp.int32),
    )
    chunks = jnp.concatenate([_queries()[2, 50:55], _queries()[1, :4]])
    q = jnp.concatenate([q, chunks[None]], axis=1)
    expected += [*whole[2, 50:55], *whole[1, :3], np.zeros_like(whole[0, 0])]
  view = paged.PackedView(decode=decode, prefill=prefill)
  out = np.asarray(_attend()(kv, view, 0, q))
  np.testing.assert_array_equal(out[0], np.stack(expected))


class TestArguments:
  """Arguments that exact attention refuses."""

  def _call(self, kv, table, **options):
    zeros = jnp.zeros((_ROWS,), jnp.int32)
    view = paged.View(page_table=table, starts=zeros, num_tokens=zeros + 1)
    q = _queries()[:, :1]
    return paged.attend(kv, view, 0, q, exact=True, **options)

  def test_page_sizes_that_do_not_divide_a_block_are_refused(self):
    with pytest.raises(ValueError, match="page size that divides 64"):
      self._call(*_pages(page_size=24))

  def test_tree_masks_are_refused(self):
    mask = jnp.ones((_ROWS, 1, 1), bool)
    with pytest.raises(ValueError, match="tree_mask"):
      self._call(*_pages(), options=kernels.AttentionOptions(tree_mask=mask))
