"""A model with sliding windows in all layers but the last, in the loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv import rollout
from tests.engine import by_hand
from tests.engine import uncached
from tests.models import tiny_decoders as tiny

_PATTERNS = ((5, 5, 7, 5, 5, None), (5, None))


def _model(windows: tuple[int | None, ...]) -> models.Decoder:
  bases = (*[1e4] * (len(windows) - 1), 1e6)
  layers = {"num_layers": len(windows), "windows": windows, "rope_base": bases}
  return tiny.llama(vocab_size=31, embed_dim=24, head_dim=8, **layers)


_PAGE, _CHUNK, _NEW, _WIDTH = 4, 6, 10, 30
_OPTIONS = rollout.RolloutConfig(
  num_samples=2, max_new_tokens=_NEW, stop_token=3, prefill_chunk=_CHUNK
)


def _begun(model: models.Decoder, prompts: list[np.ndarray]):
  sizes = tiny.cache_config(
    model,
    # Few pages: sequences are preempted and resume.
    num_pages=17,
    page_size=_PAGE,
    num_slots=3,
    pages_per_slot=10,
  )
  kv = models.init_kv(model, sizes)
  return by_hand.begun(sizes, _OPTIONS, prompts, kv=kv)


@pytest.mark.slow
@pytest.mark.parametrize("windows", _PATTERNS, ids=str)
def test_windows_equal_uncached_attention(windows):
  rng = np.random.default_rng(0)
  prompts = rng.integers(4, 31, (5, _WIDTH)).astype(np.int32)
  prompts[1:3, :17] = prompts[0, :17]
  # Larger logits: a wrong one leads to other tokens soon.
  model = _model(windows)
  params = models.init_params(jax.random.key(0), model)
  params |= {"embed": params["embed"] * 3}
  lengths = (25, 30, 20, 1, 9)
  state = _begun(
    model, [row[:n] for row, n in zip(prompts, lengths, strict=True)]
  )
  expected = jax.jit(
    functools.partial(uncached.generate, decoder=model, config=_OPTIONS)
  )(params, state.queue, jnp.float32(1))
  paged = functools.partial(models.forward, config=model)
  program = by_hand.Runner(paged, params)
  max_pages = [
    -(-(window - 1 + _CHUNK) // _PAGE) + 1
    for window in dict.fromkeys(windows)
    if window is not None
  ]
  while not bool(rollout.is_done(state)):
    state = program(state, 1.0, 1)
    num_held_pages = np.asarray(
      state.memory.cache.num_pages - state.memory.cache.num_skipped_pages
    )
    assert np.all(num_held_pages[:, :-1].max(axis=0) <= max_pages)
    jaxkv.check(state.memory.cache)
  hits = int(state.memory.cache.stats.hit_tokens)
  np.testing.assert_array_equal(state.queue.tokens, expected.tokens)
  np.testing.assert_allclose(
    state.queue.log_probs, expected.log_probs, atol=1e-5
  )
  assert hits > 0 and int(state.counters.forked) > 0
  assert int(state.counters.preempted) > 0
