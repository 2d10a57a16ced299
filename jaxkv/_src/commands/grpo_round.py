"""A round of GRPO as one program: draw, reward, and train the same weights.

The task is to repeat the prompt. A token of an answer is rewarded with 1 if it
is right, so an answer gets the share of those, and a model that knows nothing
gets 1 / `VOCABULARY`.
`notebooks/08_grpo_in_one_program` has the same program, and explains it.
"""

import dataclasses
import functools
from typing import Any
from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxkv
from jaxkv import models
from jaxkv import rl
from jaxkv import rollout

VOCABULARY = 12
PROMPTS = 32
SAMPLES = 8
TOKENS = 4
"""Of a prompt, and of an answer."""
INNER_STEPS = 4
"""Updates of the weights in a round."""

_OPTIMIZER = optax.adam(2e-3)

Numerics = Literal["exact", "fast"]


class Carry(NamedTuple):
  """What a round takes over from the one before; a program owns all of it.

  Attributes:
    params: the weights, for which answers are drawn, and which are trained.
    moments: of the optimizer.
    cache: who owns which pages.
    kv: their contents.
  """

  params: Any
  moments: Any
  cache: jaxkv.CacheState
  kv: Any


class RoundFigures(NamedTuple):
  """What a round says of itself; the last three are of its first update.

  Attributes:
    reward: the mean over all answers.  # float32[]
    counters: of the rollout.
    mismatch: the largest difference of a token's log-probability in the
      rollout and in the update.  # float32[]
    off_ratio: the largest difference of a ratio from 1.  # float32[]
    kl: the mean of k3, from the rollout's policy to the update's.  # float32[]
  """

  reward: jax.Array
  counters: rollout.Counters
  mismatch: jax.Array
  off_ratio: jax.Array
  kl: jax.Array


def decoder(numerics: Numerics, dtype: Any = jnp.float32) -> models.Decoder:
  """The model that learns: 2 layers, some 84,000 parameters."""
  plain = models.llama(
    vocab_size=VOCABULARY,
    num_layers=2,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    mlp_dim=128,
    tied_embeddings=False,
    dtype=dtype,
  )
  return dataclasses.replace(plain, numerics=numerics)


def begin(model: models.Decoder, key: jax.Array) -> Carry:
  """Random weights and an empty cache.

  Args:
    model: the decoder.
    key: key[]; not one of the rounds'.
  """
  first, secret = jax.random.split(key)
  sizes = jaxkv.CacheConfig(
    num_pages=1024,
    page_size=2,
    num_slots=PROMPTS * SAMPLES,
    pages_per_slot=-(-2 * TOKENS // 2),
  )
  params = models.init_params(first, model)
  cache = jaxkv.init(sizes, secret)
  return Carry(
    params, _OPTIMIZER.init(params), cache, models.init_kv(model, sizes)
  )


def grpo_round(
  carry: Carry, key: jax.Array, *, model: models.Decoder
) -> tuple[Carry, RoundFigures]:
  """Draws answers, rewards them, and updates the weights.

  Args:
    carry: of `begin`, or of the round before; to be donated.
    key: key[]; of the round.
    model: static.

  Returns:
    What the next round takes over, and figures.
  """
  params, moments, cache, kv = carry
  ask, draw = jax.random.split(key)
  prompts = jax.random.randint(ask, (PROMPTS, TOKENS), 0, VOCABULARY, jnp.int32)
  lengths = jnp.full((PROMPTS,), TOKENS, jnp.int32)
  config = rollout.RolloutConfig(
    num_samples=SAMPLES,
    max_new_tokens=TOKENS,
    prefill_chunk=32,
    # All sequences enter at once.
    admissions=PROMPTS * SAMPLES,
    window=PROMPTS * SAMPLES,
    max_overtaken=PROMPTS * SAMPLES,
    numerics=model.numerics,
  )
  state = rollout.init(cache, kv, prompts, lengths, draw, config)
  forward = functools.partial(models.forward, config=model)
  state = rollout.generate(params, state, model=forward)
  drawn = rollout.grouped(
    rollout.generated(state),
    num_samples=SAMPLES,
    prompt_columns=TOKENS,
    completion_columns=TOKENS,
  )
  # Of each token, relative to that of the other samples in its place.
  right = jnp.swapaxes(drawn.completions == drawn.prompts[:, None], 1, 2)
  good = rl.group_normalized(right.ravel(), num_samples=SAMPLES)
  good = jnp.swapaxes(good.reshape(right.shape), 1, 2)

  def loss(params: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    new = models.grouped_log_probs(
      params,
      drawn.prompts,
      drawn.prompt_lengths,
      drawn.completions,
      drawn.completion_lengths,
      config=model,
    )
    value, metrics = rl.grpo_loss(
      new, drawn.log_probs, good, drawn.mask, clip=(0.2, 0.3), mean="token"
    )
    away = jnp.where(drawn.mask, new - drawn.log_probs, 0)
    off_ratio = jnp.max(jnp.abs(jnp.exp(away) - 1))
    return value, (jnp.max(jnp.abs(away)), off_ratio, metrics.kl)

  def update(carry: tuple[Any, Any], _: None) -> tuple[Any, Any]:
    params, moments = carry
    gradient, figures = jax.grad(loss, has_aux=True)(params)
    # optax mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
      updates, moments = _OPTIMIZER.update(gradient, moments)
      params = optax.apply_updates(params, updates)
    return (params, moments), figures

  (params, moments), figures = jax.lax.scan(
    update, (params, moments), length=INNER_STEPS
  )
  state = rollout.update_weights(state)
  first = (one[0] for one in figures)
  return Carry(params, moments, state.cache, state.kv), RoundFigures(
    jnp.mean(right), state.counters, *first
  )
