"""States of recurrent layers, read and written around a recurrence."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import kv as memory
from jaxkv._src.models.decoder import recurrent_pages
from tests.kv.memory import view

_LAYERS, _LAYER, _PAGES, _SIZE, _COLUMNS = 2, 1, 24, 4, 6
# Tokens before the call, tokens of the call.
_ROWS = (
  (2, 5),  # Ends a page in the call: two tokens before its end, three after it.
  (3, 3),
  (1, 4),
  (2, 2),  # Ends with a page.
  (1, 2),  # Ends inside of a page.
  (0, 6),  # Begins with a page, so only its last state is stored.
  (4, 4),
  (3, 0),
  (3, 5),
)
_TABLE = np.arange(1, 1 + 2 * len(_ROWS)).reshape(-1, 2)


def _sums(inputs, states, num_tokens):
  """A recurrence whose state is the sum of all tokens so far."""
  (x,) = inputs
  inside = jnp.arange(x.shape[1], dtype=jnp.int32)[None] < num_tokens[:, None]
  sums = jnp.cumsum(jnp.where(inside[..., None, None], x, 0), axis=1)
  sums = sums + states["sum"][:, None, None]
  return sums, {"sum": sums[:, -1, 0]}


def _pool():
  config = jaxkv.CacheConfig(
    num_pages=_PAGES,
    page_size=_SIZE,
    num_slots=1,
    pages_per_slot=2,
    groups=(jaxkv.Recurrent(),),
  )
  return memory.init_states(
    config, num_layers=_LAYERS, shapes={"sum": ((1,), "float32")}
  )


def _stored(pool) -> dict[int, float]:
  """Returns the states of the layer that are not 0, by their pages."""
  states = np.asarray(pool.states["sum"]).reshape(_LAYERS, _PAGES)
  assert not states[1 - _LAYER].any()
  return {int(p): float(states[_LAYER, p]) for p in states[_LAYER].nonzero()[0]}


def _tokens():
  """Returns a distinct power of two for each token of a sequence."""
  return np.exp2(np.arange(_SIZE + _COLUMNS))


def test_states_at_page_ends_are_stored():
  """Also where a chunk begins inside of a page and goes past its end."""
  starts, counts = np.asarray(_ROWS).T
  rows = len(_ROWS)
  tokens = _tokens()
  pool = _pool()
  before = {"sum": np.asarray([[tokens[:s].sum()] for s in starts])}
  pool = memory.write_state(
    pool,
    view(_TABLE, [0] * rows, starts),
    _LAYER,
    jax.tree.map(jnp.float32, before),
  )
  x = np.full((rows, _COLUMNS, 1, 1), np.nan)
  expected = {}
  for row, (start, count) in enumerate(_ROWS):
    x[row, :count, 0, 0] = tokens[start : start + count]
    if start:
      expected[_TABLE[row, (start - 1) // _SIZE]] = tokens[:start].sum()
    end = start + count
    if start % _SIZE and end > _SIZE:
      expected[_TABLE[row, 0]] = tokens[:_SIZE].sum()
    expected[_TABLE[row, (end - 1) // _SIZE]] = tokens[:end].sum()
  run = jax.jit(
    lambda x, pool, view: recurrent_pages.run_rows(
      _sums, (x,), pool, view, _LAYER
    )
  )
  out, pool = run(jnp.float32(x), pool, view(_TABLE, starts, counts))
  assert _stored(pool) == expected
  for row, (start, count) in enumerate(_ROWS):
    sums = np.cumsum(tokens)[start : start + count]
    np.testing.assert_array_equal(out[row, :count, 0, 0], sums)


def test_a_call_of_decode_tokens_and_prompts():
  """Decode tokens come first, then the tokens of all prompts."""
  tokens = _tokens()
  pool = _pool()
  pool = memory.write_state(
    pool,
    view([[1, 2], [3, 4]], [0, 0], [4, 1]),
    _LAYER,
    {"sum": jnp.asarray([[tokens[:4].sum()], [tokens[0]]], jnp.float32)},
  )
  packed = memory.PackedView(
    decode=view([[1, 2], [3, 4], [5, 6]], [4, 1, 0], [1, 1, 0]),
    prefill=view([[1, 2], [3, 4], [5, 6]], [4, 1, 0], [0, 0, 3]),
  )
  x = np.asarray([tokens[4], tokens[1], 0, *tokens[:3], 0])
  out, pool = jax.jit(
    lambda x, pool, view: recurrent_pages.run_packed(
      _sums, (x,), pool, view, _LAYER
    )
  )(jnp.float32(x[None, :, None, None]), pool, packed)
  sums = np.cumsum(tokens)
  out = np.ravel(out)
  assert out[[0, 1, 3, 4, 5]].tolist() == [sums[4], sums[1], *sums[:3]]
  assert _stored(pool) == {1: sums[3], 2: sums[4], 3: sums[1], 5: sums[2]}
