"""Mistakes in a model's wiring raise, and name the argument.

The model is plain JAX: layers with sliding windows and grouped queries. It is
right without a mistake, see `test_tokens_equal_uncached_attention`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import jaxkv_kernels as kernels
from jaxkv import kv as kv_memory
from jaxkv import rollout

_VOCABULARY, _WIDTH = 13, 8
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 4
_WINDOWS = (3, None)
"""The window of each layer, and of its layer group."""
_LAYERS = len(_WINDOWS)
_PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 1, 0, 0, 0, 0]]
_LENGTHS = [7, 3]
_CONFIG = rollout.RolloutConfig(max_new_tokens=5, prefill_chunk=4)


@dataclasses.dataclass(frozen=True)
class _Wiring:
  """The mistakes of a model.

  Attributes:
    has_windows: whether layers pass their window to `attend`.
    group_of: the layer group whose view each layer takes.
    keeps_memory: whether the model returns the memory after `write`.
    selects_columns: whether it returns logits of `batch.columns` alone.
    swaps_results: whether it returns the memory before the logits.
  """

  has_windows: bool = True
  group_of: tuple[int, ...] = tuple(range(_LAYERS))
  keeps_memory: bool = True
  selects_columns: bool = True
  swaps_results: bool = False


def _params() -> dict[str, jax.Array]:
  rng = np.random.default_rng(2)
  shapes = {
    "tokens": (_VOCABULARY, _WIDTH),
    "positions": (20, _WIDTH),
    "query": (_LAYERS, _WIDTH, _HEADS, _HEAD_DIM),
    "key": (_LAYERS, _WIDTH, _KV_HEADS, _HEAD_DIM),
    "value": (_LAYERS, _WIDTH, _KV_HEADS, _HEAD_DIM),
    "output": (_LAYERS, _HEADS, _HEAD_DIM, _WIDTH),
  }
  return {
    name: jnp.asarray(rng.normal(size=shape), jnp.float32)
    for name, shape in shapes.items()
  }


def _embed(params, tokens, positions):
  return params["tokens"][tokens] + params["positions"][positions]


def _projections(params, layer, x):
  """Returns queries, keys and values of [B, T, W]."""
  return tuple(
    jnp.einsum("btw,whd->bthd", x, params[name][layer])
    for name in ("query", "key", "value")
  )


def _model(params, batch, kv, *, wiring) -> Any:
  received = kv
  x = _embed(params, batch.tokens, batch.positions)
  for layer, window in enumerate(_WINDOWS):
    q, k, v = _projections(params, layer, x)
    view = batch.views[wiring.group_of[layer]]
    kv = kv_memory.write(kv, view, layer, k, v)
    options = kernels.AttentionOptions(
      window=window if wiring.has_windows else None
    )
    out = kv_memory.attend(kv, view, layer, q, options=options)
    x = x + jnp.einsum("bthd,hdw->btw", out, params["output"][layer])
  x = x[0]
  if wiring.selects_columns:
    x = x[batch.columns]
  logits = x @ params["tokens"].T
  kv = kv if wiring.keeps_memory else received
  return (kv, logits) if wiring.swaps_results else (logits, kv)


def _uncached_logits(params, tokens: list[int]) -> jax.Array:
  """Returns the logits of the last token, by attention over all tokens."""
  count = len(tokens)
  position = jnp.arange(count, dtype=jnp.int32)
  x = _embed(params, jnp.asarray(tokens)[None], position[None])
  for layer, window in enumerate(_WINDOWS):
    q, k, v = _projections(params, layer, x)
    k, v = (jnp.repeat(y, _HEADS // _KV_HEADS, axis=2) for y in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / _HEAD_DIM**0.5
    distance = position[:, None] - position[None]
    is_visible = distance >= 0
    if window is not None:
      is_visible &= distance < window
    scores = jnp.where(is_visible[None, None], scores, -jnp.inf)
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)
    x = x + jnp.einsum("bthd,hdw->btw", out, params["output"][layer])
  return x[0, -1] @ params["tokens"].T


def _begun(dtype="float32") -> rollout.RolloutState:
  """Returns a rollout; None for `dtype` means the default dtype."""
  sizes = jaxkv.CacheConfig(
    num_pages=40,
    page_size=2,
    num_slots=2,
    pages_per_slot=8,
    groups=(jaxkv.SlidingWindow(_WINDOWS[0]), jaxkv.FullAttention()),
  )
  options = {} if dtype is None else {"dtype": dtype}
  kv = kv_memory.init(
    sizes,
    num_layers=_LAYERS,
    num_kv_heads=_KV_HEADS,
    head_dim=_HEAD_DIM,
    **options,
  )
  sampling = rollout.Sampling(temperature=0.0)
  requests = rollout.Requests(_PROMPTS, _LENGTHS, sampling=sampling)
  return rollout.init(
    jaxkv.init(sizes), kv, requests, jax.random.key(0), _CONFIG
  )


def _generate(state, wiring=None, model=None):
  model = model or functools.partial(_model, wiring=wiring or _Wiring())
  return rollout.generate(_params(), state, model=model)


def _trace(state, wiring=None, model=None):
  """Traces `generate`, which compiles nothing."""
  return jax.eval_shape(lambda state: _generate(state, wiring, model), state)


@pytest.mark.slow
def test_tokens_equal_uncached_attention():
  """Without a mistake, tokens are those of attention without a cache."""
  state = jax.jit(_generate)(_begun())
  assert bool(rollout.is_done(state))
  params = _params()
  for row, length in enumerate(_LENGTHS):
    tokens = _PROMPTS[row][:length]
    for _ in range(_CONFIG.max_new_tokens):
      tokens = [*tokens, int(jnp.argmax(_uncached_logits(params, tokens)))]
    assert state.queue.tokens[row, : len(tokens)].tolist() == tokens


def test_right_wiring_is_traced():
  _trace(_begun())


@pytest.mark.parametrize(
  ("wiring", "error", "message"),
  [
    (
      _Wiring(has_windows=False),
      ValueError,
      r"`options\.window` must be 3 for .* got None",
    ),
    (
      _Wiring(group_of=(1, 1)),
      ValueError,
      r"`options\.window` must be None for .* got 3",
    ),
    (
      _Wiring(group_of=(0, 0)),
      ValueError,
      r"`options\.window` must be 3 for .* got None",
    ),
    (
      _Wiring(keeps_memory=False),
      ValueError,
      r"`kv` that `model` returns must be the memory after `write`",
    ),
    (
      _Wiring(swaps_results=True),
      TypeError,
      r"`logits` must be an array, got KVPages; .* in this order",
    ),
    (
      _Wiring(selects_columns=False),
      ValueError,
      r"`logits` must have the shape \[2, V\], .*batch\.columns.* got \[",
    ),
  ],
  ids=[
    "no window",
    "the view of the full group",
    "the view of the windowed group",
    "the memory before write",
    "swapped results",
    "logits of all tokens",
  ],
)
def test_wrong_wiring_is_refused(wiring, error, message):
  with pytest.raises(error, match=message):
    _trace(_begun(), wiring)


def test_pages_of_the_default_dtype_are_refused():
  """A float32 model must not silently round to bfloat16, the default."""
  message = r"`k` must be bfloat16, the default dtype .*dtype=float32"
  with pytest.raises(TypeError, match=message):
    _trace(_begun(dtype=None))
  # An explicit dtype allows it.
  _trace(_begun(dtype="bfloat16"))


class TestMemory:
  def test_missing_memory_is_refused(self):
    def model(params, batch, kv):
      logits, _ = _model(params, batch, kv, wiring=_Wiring())
      return logits, 0.0

    with pytest.raises(TypeError, match=r"`kv` that `model` returns .* float"):
      _trace(_begun(), model=model)

  def test_other_pools_are_refused(self):
    def model(params, batch, kv):
      logits, kv = _model(params, batch, kv, wiring=_Wiring())
      return logits, (kv,)

    with pytest.raises(TypeError, match="`kv` that `model` returns must have"):
      _trace(_begun(), model=model)

  def test_none_for_a_model_that_writes_nothing(self):
    def model(params, batch, kv):
      del params, kv
      return jnp.zeros((batch.columns.shape[0], _VOCABULARY)), None

    _trace(_begun(), model=model)

  def test_all_logits_checks_its_model(self):
    """`all_logits` checks the function that it converts, and names itself."""

    def all_tokens(params, batch, kv):
      wiring = _Wiring(selects_columns=False, keeps_memory=False)
      logits, kv = _model(params, batch, kv, wiring=wiring)
      return logits[None], kv

    message = "`kv` that the model of all_logits returns must be the memory"
    with pytest.raises(ValueError, match=message):
      _trace(_begun(), model=rollout.all_logits(all_tokens))
