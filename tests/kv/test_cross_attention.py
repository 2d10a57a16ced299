"""Attention to an encoder's tokens, of which each query sees all."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import kv as memory
from jaxkv.kernels import AttentionOptions
from tests.kv.memory import DIM
from tests.kv.memory import HEADS
from tests.kv.memory import KV_HEADS
from tests.kv.memory import draw
from tests.kv.memory import make
from tests.kv.memory import poisoned
from tests.kv.memory import view

_TABLE = [[5, 9, 2], [7, 24, 24], [24] * 3, [1, 3, 24]]
_LENGTHS = [11, 3, 0, 8]
_COUNTS = [3, 0, 2, 5]
_OPTIONS = AttentionOptions(
  sinks=jnp.arange(HEADS, dtype=jnp.float32) / 4, soft_cap=2.0, scale=0.3
)


def _filled(kv):
  """Keys and values of `_LENGTHS` tokens in layer 1, and the memory."""
  k, v = (draw(seed, 4, 12, KV_HEADS, DIM) for seed in (0, 1))
  rows = view(_TABLE, [0] * 4, _LENGTHS)
  return k, v, memory.write(kv, rows, 1, k, v)


def _expected(q, k, v, length, options):
  """What queries [T, H, D] of a row read, and their log-sum-exps, float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k[:length], v[:length]))
  k, v = (np.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
  logits = np.einsum("thd,nhd->thn", q, k) * options.scale
  logits = options.soft_cap * np.tanh(logits / options.soft_cap)
  sinks = np.asarray(options.sinks, np.float64)
  total = np.exp(logits).sum(-1) + np.exp(sinks)
  out = np.einsum("thn,nhd->thd", np.exp(logits), v) / total[..., None]
  return out, np.log(total)


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, 5, 23])
def test_queries_of_a_row_see_all(columns):
  """23 queries of 4 heads for each K/V head are cut into two pieces."""
  k, v, kv = _filled(poisoned())
  q = draw(2, 4, columns, HEADS, DIM)
  num_tokens = np.array([3, 0, 2, 23]).clip(max=columns)
  out, lse = memory.attend_with_lse(
    kv,
    view(_TABLE, _LENGTHS, num_tokens),
    1,
    q,
    options=_OPTIONS,
    causal=False,
  )
  for row, (length, count) in enumerate(zip(_LENGTHS, num_tokens, strict=True)):
    wanted = _expected(q[row, :count], k[row], v[row], length, _OPTIONS)
    # Float32 sums of at most 32 terms of order 1.
    np.testing.assert_allclose(out[row, :count], wanted[0], atol=1e-5)
    np.testing.assert_allclose(lse[row, :count], wanted[1], atol=1e-5)
    assert not np.any(out[row, count:])
    assert np.all(lse[row, count:] == -np.inf)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
def test_packed(alone):
  k, v, kv = _filled(poisoned())
  columns = [0, None, 1]  # the row of each one
  table = [_TABLE[0], _TABLE[2], _TABLE[1]]
  decode = view(table, [11, 0, 3], [1, 0, 1])
  prefill = None
  if not alone:
    prefill = view(_TABLE, _LENGTHS, [40, 0, 2, 5])
    columns += [0] * 40 + [2] * 2 + [3] * 5 + [None] * 2
  q = draw(3, 1, len(columns), HEADS, DIM)
  out, lse = memory.attend_with_lse(
    kv,
    memory.PackedView(decode=decode, prefill=prefill),
    1,
    q,
    options=_OPTIONS,
    causal=False,
  )
  for column, row in enumerate(columns):
    if row is None:
      assert not np.any(out[0, column])
      assert np.all(lse[0, column] == -np.inf)
      continue
    one = q[0, column][None]
    wanted = _expected(one, k[row], v[row], _LENGTHS[row], _OPTIONS)
    np.testing.assert_allclose(out[0, column], wanted[0][0], atol=1e-5)
    np.testing.assert_allclose(lse[0, column], wanted[1][0], atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_formats(dtype):
  """What is read is what `gather` gives of the pages."""
  _, _, kv = _filled(make(dtype))
  rows = view(_TABLE, _LENGTHS, _COUNTS)
  q = draw(2, 4, 5, HEADS, DIM)
  out = memory.attend(kv, rows, 1, q, options=_OPTIONS, causal=False)
  k, v = memory.gather(kv, 1, rows.page_table)
  wanted, _ = _expected(q[3], k[3], v[3], 8, _OPTIONS)
  np.testing.assert_allclose(out[3], wanted, atol=1e-5)


def test_what_makes_no_sense():
  _, _, kv = _filled(make())
  rows, q = view(_TABLE, _LENGTHS, _COUNTS), draw(2, 4, 5, HEADS, DIM)
  slopes = jnp.zeros((HEADS,))
  for name, value in {"window": 3, "alibi_slopes": slopes}.items():
    options = AttentionOptions(**{name: value})
    with pytest.raises(ValueError, match=f"`options.{name}` must be None"):
      memory.attend(kv, rows, 1, q, options=options, causal=False)
  config = jaxkv.CacheConfig(
    num_pages=24, page_size=4, num_slots=1, pages_per_slot=1
  )
  latents = memory.init(
    config, num_layers=2, num_kv_heads=1, head_dim=DIM, value_dim=16
  )
  with pytest.raises(ValueError, match="`kv` must be pages of keys and values"):
    memory.attend(latents, rows, 1, q, causal=False)


def test_shared_pages_are_ignored():
  _, _, kv = _filled(poisoned())
  rows = view(_TABLE, _LENGTHS, [1, 1, 0, 1])
  q = draw(2, 4, 1, HEADS, DIM)
  shared = memory.share(kv, rows, num_clusters=1, cluster_size=2)
  wanted = memory.attend(kv, rows, 1, q, causal=False)
  for other in (shared, memory.refresh_shared(kv, shared)):
    found = memory.attend(kv, other, 1, q, causal=False)
    np.testing.assert_array_equal(found, wanted)


def _by_hand(tokens, seen):
  """What the last token [2, D] becomes: it reads all tokens, then `seen`."""
  x = np.asarray(tokens[-1], np.float64)
  for keys in (tokens, seen):
    keys = np.asarray(keys, np.float64)
    logits = np.einsum("hd,nhd->hn", x, keys) / DIM**0.5
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    x = x + np.einsum("hn,nhd->hd", weights, keys)
  return x


@pytest.mark.slow
def test_a_decode_loop():
  """An encoder-decoder of one layer, which also forks a sequence.

  The encoder's tokens are written once; the fork reads the same pages.
  """
  config = jaxkv.CacheConfig(
    num_pages=24,
    page_size=4,
    num_slots=3,
    pages_per_slot=4,
    groups=(jaxkv.FullAttention(), jaxkv.CrossAttention()),
    prefix_caching=False,
  )
  kv = memory.init(
    config, num_layers=1, num_kv_heads=2, head_dim=DIM, dtype="float32"
  )
  kv = dataclasses.replace(kv, k=kv.k * jnp.nan, v=kv.v * jnp.nan)
  embed, seen = draw(5, 11, 2, DIM), draw(6, 3, 10, 2, DIM)
  lengths = jnp.array([10, 10, 6], jnp.int32)

  def view_of(state, group, num_tokens):
    encoder = lengths if group else None
    return jaxkv.view(
      state, group=group, num_tokens=num_tokens, num_encoder_tokens=encoder
    )

  def step(carry, token, num_tokens):
    state, kv = carry
    state, _ = jaxkv.allocate(state, num_tokens)
    own, x = view_of(state, 0, num_tokens), embed[token][:, None]
    kv = memory.write(kv, own, 0, x, x)
    x = x + memory.attend(kv, own, 0, x)
    x = x + memory.attend(kv, view_of(state, 1, num_tokens), 0, x, causal=False)
    state, _ = jaxkv.commit(state, token[:, None], num_tokens)
    return (state, kv), x[:, 0]

  @jax.jit
  def decode(state, kv, tokens, num_tokens):
    carry = (state, kv)
    one = functools.partial(step, num_tokens=num_tokens)
    return jax.lax.scan(one, carry, tokens)

  num_tokens = jnp.array([1, 0, 1], jnp.int32)
  state, out = jaxkv.allocate(
    jaxkv.init(config), num_tokens, num_encoder_tokens=lengths * num_tokens
  )
  assert out.ok.all()
  whole = memory.View(
    page_table=state.page_table[:, 1],
    starts=jnp.zeros_like(lengths),
    num_tokens=lengths * num_tokens,
  )
  kv = memory.write(kv, whole, 0, seen, seen)
  tokens = jax.random.randint(jax.random.key(0), (9, 3), 0, 11)
  (state, kv), first = decode(state, kv, tokens[:3], num_tokens)
  state, out = jaxkv.fork(state, [0], [1])
  kv = memory.copy(kv, *out.copies)
  assert state.page_table[1, 1].tolist() == state.page_table[0, 1].tolist()
  (state, kv), rest = decode(state, kv, tokens[3:], jnp.ones_like(num_tokens))
  jaxkv.check(state)
  found = np.concatenate([first, rest])
  for slot, source in enumerate((0, 0, 2)):
    said = jnp.concatenate([tokens[:3, source], tokens[3:, slot]])
    read = seen[source, : lengths[slot]]
    for place in range(0 if slot == source else 3, 9):
      wanted = _by_hand(embed[said[: place + 1]], read)
      # Float32 sums of at most 10 terms of order 10.
      np.testing.assert_allclose(found[place, slot], wanted, atol=1e-4)
  state, _ = jaxkv.free(state)
  assert len(jaxkv.free_pages(state)) == 23
