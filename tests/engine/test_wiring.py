"""Mistakes in a model's wiring raise, and name the argument.

The model is plain JAX: layers with sliding windows and grouped queries.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxkv
import jaxkv_kernels as kernels
from jaxkv import kv as kv_memory
from jaxkv import rollout
from tests.engine import by_hand

_VOCABULARY, _WIDTH = 13, 4
_WINDOWS = (3, None)
"""The window of each layer, and of its layer group."""
_LAYERS = len(_WINDOWS)
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


def _model(params, batch, kv, *, wiring) -> Any:
  del params
  received = kv
  x = jax.nn.one_hot(batch.tokens, _WIDTH)[:, :, None]
  for layer, window in enumerate(_WINDOWS):
    view = batch.views[wiring.group_of[layer]]
    kv = kv_memory.write(kv, view, layer, x, x)
    options = kernels.AttentionOptions(
      window=window if wiring.has_windows else None
    )
    x = x + kv_memory.attend(kv, view, layer, x, options=options)
  x = x[0, :, 0]
  if wiring.selects_columns:
    x = x[batch.columns]
  logits = x @ jnp.ones((_WIDTH, _VOCABULARY))
  kv = kv if wiring.keeps_memory else received
  return (kv, logits) if wiring.swaps_results else (logits, kv)


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
    num_kv_heads=1,
    head_dim=_WIDTH,
    **options,
  )
  return by_hand.begun(sizes, _CONFIG, [[1, 2, 3, 4, 5, 6, 7], [8] * 3], kv=kv)


def _trace(state, wiring=None, model=None):
  """Traces `generate`, which compiles nothing."""
  model = model or functools.partial(_model, wiring=wiring or _Wiring())
  run = functools.partial(rollout.generate, None, model=model)
  return jax.eval_shape(run, state)


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
