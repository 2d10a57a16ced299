"""GRPO, complete: a task, a reward, a loss, an update, and the rollout."""

import functools

import jax
import jax.numpy as jnp
import optax

import jaxkv
from jaxkv import models
from jaxkv import rl
from jaxkv import rollout

MODEL = models.llama(
  vocab_size=16, num_layers=2, embed_dim=32, num_heads=2, num_kv_heads=1,
  head_dim=16, mlp_dim=64,
)  # fmt: skip
SIZES = jaxkv.CacheConfig(
  num_pages=256, page_size=4, num_slots=16, pages_per_slot=4
)
OPTIONS = rollout.RolloutConfig(
  num_samples=8, max_new_tokens=8, prefill_chunk=16
)
OPTIMIZER = optax.adam(3e-3)
forward = functools.partial(models.forward, config=MODEL)


@functools.partial(jax.jit, donate_argnums=(0, 1, 2, 3))
def grpo_round(params, moments, cache, kv, key):
  """Prompts, their answers, and one update of the weights."""
  prompts = jax.random.randint(key, (8, 6), 1, 16)
  lengths = jnp.full((8,), 6, jnp.int32)
  state = rollout.init(cache, kv, prompts, lengths, key, OPTIONS)
  state = rollout.generate(params, state, model=forward)
  out = rollout.generated(state)
  mask, tokens = out.mask[:, 1:], out.tokens[:, 1:]
  # The task: repeat the first token of the prompt.
  right = (tokens == out.tokens[:, :1]).astype(jnp.float32)
  reward = jnp.mean(right, axis=1, where=mask)
  good = rl.group_normalized(reward, num_samples=OPTIONS.num_samples)

  def loss(params):
    logits = models.forward_uncached(
      params, out.tokens, out.positions, config=MODEL
    )
    new = -optax.softmax_cross_entropy_with_integer_labels(
      logits[:, :-1], tokens
    )
    return rl.grpo_loss(new, out.log_probs[:, 1:], good, mask, mean="token")[0]

  updates, moments = OPTIMIZER.update(jax.grad(loss)(params), moments)
  params = optax.apply_updates(params, updates)
  state = rollout.update_weights(state)
  return params, moments, state.cache, state.kv, jnp.mean(reward)
