"""A model over latents (MLA) in the loop: one pool, values inside of keys."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import kv as memory
from jaxkv import rollout
from jaxkv.kernels import AttentionOptions
from tests.rollout import by_hand

pytestmark = pytest.mark.slow

_CONFIG = rollout.RolloutConfig(
  num_samples=2,
  max_new_tokens=6,
  prefill_chunk=4,
  draft_tokens=2,
  draft_match=1,
  draft_columns=3,
)


def _model(params, tokens, positions, kv, views):
  """That of `by_hand`: keys and values are equal there."""
  del params
  x = jnp.asarray(by_hand._TOKENS)[tokens]
  x = (x + jnp.asarray(by_hand._POSITIONS)[positions])[:, :, None]
  kv = memory.write(kv, views[0], 0, x)
  options = AttentionOptions(scale=by_hand.WIDTH**-0.5)
  out = memory.attend(kv, views[0], 0, x, options=options)
  return jnp.einsum("bthd,vd->btv", out, jnp.asarray(by_hand._TOKENS)), kv


@pytest.mark.parametrize("pools", [1, 2])
def test_samples_drafts_and_prompts(pools):
  """Equal to attention without any cache; in a tuple of pools, too."""
  sizes, key = by_hand.sizes(40, 3), jax.random.key(2)
  latents = memory.init(
    sizes,
    num_layers=1,
    num_kv_heads=1,
    head_dim=by_hand.WIDTH,
    value_dim=by_hand.WIDTH,
    dtype=jnp.float32,
  )
  latents = dataclasses.replace(latents, k=latents.k * jnp.nan)
  kv: Any = latents
  model: Any = _model
  if pools == 2:
    # A pool that nobody uses.
    other = memory.init(sizes, num_layers=2, num_kv_heads=2, head_dim=8)
    kv = (latents, other)

    def in_tuple(params, tokens, positions, kv, views):
      logits, first = _model(params, tokens, positions, kv[0], views)
      return logits, (first, kv[1])

    model = in_tuple

  width = max(map(len, by_hand.PROMPTS))
  rows = [
    [*prompt, *[10] * (width - len(prompt))] for prompt in by_hand.PROMPTS
  ]
  state = rollout.init(
    jaxkv.init(sizes), kv, rows, list(map(len, by_hand.PROMPTS)), key, _CONFIG
  )
  state = by_hand.Runner(rollout.all_logits(model))(state, 1.0)
  for number in range(len(by_hand.PROMPTS) * 2):
    prompt = by_hand.PROMPTS[number // 2]
    wanted = by_hand.expected(number, prompt, key, 1.0, _CONFIG)
    length = int(state.sequences.length[number])
    assert state.sequences.tokens[number, :length].tolist() == wanted.tokens
  assert int(state.counters.forked) > 0
  assert int(state.counters.drafted) > 0
