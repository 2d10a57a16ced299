"""Encoder-decoders: pages for an encoder's tokens, taken once, never cached."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.cache.by_hand import ints

CROSS = jaxkv.CrossAttention(page_size=4)
FULL = jaxkv.FullAttention(page_size=4)
CONFIG = jaxkv.CacheConfig(
  num_pages=16,
  page_size=4,
  num_slots=2,
  pages_per_slot=4,
  groups=(FULL, CROSS),
  prefix_caching=False,
)
TOKENS = jnp.arange(6, dtype=jnp.int32)[None]


def admitted(encoder=10, config=CONFIG):
  """Slot 0 with 6 tokens, and so many of an encoder."""
  state, out = jaxkv.admit(
    jaxkv.init(config),
    ints(0),
    TOKENS,
    ints(6),
    num_encoder_tokens=ints(encoder),
  )
  assert out.ok.all()
  state, out = jaxkv.commit(state, TOKENS, ints(6), slots=ints(0))
  assert out.ok.all()
  return state


def tables(state, slot):
  """Pages of a slot by group."""
  return [
    row[:count].tolist()
    for row, count in zip(
      state.page_table[slot], state.num_pages[slot].tolist(), strict=True
    )
  ]


class TestVerbs:
  def test_pages_are_taken_once(self):
    state = admitted()
    assert tables(state, 0) == [[1, 2], [3, 4, 5]]
    for _ in range(5):
      state, out = jaxkv.allocate(state, ints(1, 0))
      assert out.ok.all()
      state, _ = jaxkv.commit(state, ints(7, 0)[:, None], ints(1, 0))
    assert tables(state, 0) == [[1, 2, 6], [3, 4, 5]]

  def test_a_longer_input_gets_more(self):
    state, out = jaxkv.allocate(
      admitted(), ints(1), slots=ints(0), num_encoder_tokens=ints(13)
    )
    assert tables(state, 0) == [[1, 2], [3, 4, 5, 6]]
    assert out.num_new_pages.tolist() == [1]

  def test_a_shorter_one_keeps_what_there_is(self):
    state, _ = jaxkv.allocate(
      admitted(), ints(1), slots=ints(0), num_encoder_tokens=ints(1)
    )
    assert tables(state, 0) == [[1, 2], [3, 4, 5]]

  def test_a_sequence_may_have_none(self):
    groups = (CROSS, FULL)
    state = admitted(0, dataclasses.replace(CONFIG, groups=groups))
    assert tables(state, 0) == [[], [1, 2]]
    _, out = jaxkv.admit(state, ints(0), TOKENS, ints(6))
    assert out.code.tolist() == [jaxkv.Status.SLOT_IN_USE]
    assert jaxkv.num_common_prefix_pages(state).tolist() == [0, 2]

  def test_forks_share_them(self):
    state, out = jaxkv.fork(admitted(), ints(0), ints(1))
    assert tables(state, 1) == [[1, 6], [3, 4, 5]]
    assert out.copies.src.tolist() == [2, 16]  # nothing of the encoder
    assert state.pool.ref_count[3:6].tolist() == [2, 2, 2]
    jaxkv.check(state)

  def test_they_stay_until_nothing_is_left(self):
    state, _ = jaxkv.truncate(
      admitted(), ints(1, 0), mask=jnp.asarray([True, False])
    )
    assert tables(state, 0) == [[1], [3, 4, 5]]
    state, _ = jaxkv.truncate(state, [0, 0], mask=[True, False])
    assert tables(state, 0) == [[], []]
    assert int(state.pool.queue.num_free) == 15

  @pytest.mark.parametrize(
    ("encoder", "code"),
    [(-1, "BAD_LENGTH"), (17, "SLOT_FULL"), (2**31 - 1, "SLOT_FULL")],
  )
  def test_bad_numbers(self, encoder, code):
    state = jaxkv.init(CONFIG)
    after, out = jaxkv.admit(
      state, ints(0), TOKENS, ints(6), num_encoder_tokens=ints(encoder)
    )
    assert out.code.tolist() == [jaxkv.Status[code]]
    _, out = jaxkv.allocate(
      state, ints(1, 1), num_encoder_tokens=ints(encoder, 4)
    )
    assert out.code.tolist() == [jaxkv.Status[code], jaxkv.Status.OK]
    np.testing.assert_array_equal(after.page_table, state.page_table)

  def test_a_cache_without_such_a_group(self):
    config = dataclasses.replace(CONFIG, groups=(FULL,))
    with pytest.raises(ValueError, match="`num_encoder_tokens` must be None"):
      jaxkv.allocate(
        jaxkv.init(config), ints(1, 1), num_encoder_tokens=ints(1, 1)
      )


def test_a_decoder_sees_all_of_the_encoder():
  """One query at the encoder's last position; other pages hold NaN."""
  state, draws = admitted(10), np.random.default_rng(0)
  k, v, q = (draws.normal(size=(10, 2, 8)).astype(np.float32) for _ in range(3))
  kv = jaxkv.kv.init(
    state.config, num_layers=1, num_kv_heads=2, head_dim=8, dtype=jnp.float32
  )
  kv = dataclasses.replace(kv, k=kv.k * jnp.nan, v=kv.v * jnp.nan)
  table = state.page_table[:1, 1]
  ten = ints(10)
  view = jaxkv.kv.View(page_table=table, starts=ten * 0, num_tokens=ten)
  kv = jaxkv.kv.write(kv, view, 0, jnp.asarray(k)[None], jnp.asarray(v)[None])
  view = jaxkv.kv.View(page_table=table, starts=ten - 1, num_tokens=ten * 0 + 1)
  out = jaxkv.kv.attend(kv, view, 0, jnp.asarray(q)[None, :1])
  logits = np.einsum("hd,thd->ht", q[0], k) / np.sqrt(8)
  weights = np.exp(logits - logits.max(axis=1, keepdims=True))
  weights /= weights.sum(axis=1, keepdims=True)
  wanted = np.einsum("ht,thd->hd", weights, v)
  # Sums of ten products in float32.
  np.testing.assert_allclose(out[0, 0], wanted, rtol=1e-5, atol=1e-6)
