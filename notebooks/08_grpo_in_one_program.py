# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # GRPO in one program
#
# A round of GRPO draws several answers to each prompt, rewards them, and makes
# the better ones more likely. Usually sampler and trainer are two systems. Then
# weights are sent from one to the other, and the two compute slightly different
# probabilities of the same tokens.
#
# Here a round is one jitted function. Its rollout reads the weights, and its
# update changes them in place. With exact numerics, rollout and update compute
# the same probabilities, bit for bit.

# %%
import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxkv
from jaxkv import models
from jaxkv import rl
from jaxkv import rollout

# %% [markdown]
# ## A task, a model, and room for its answers
#
# The task is to repeat a prompt of four tokens. The reward of an answer is its
# share of right tokens. With 12 tokens in the vocabulary, an untrained model
# gets 0.08.

# %%
PROMPTS, SAMPLES, TOKENS, VOCABULARY, INNER_STEPS = 32, 8, 4, 12, 4
FAST = models.llama(
  vocab_size=VOCABULARY, num_layers=2, embed_dim=64, num_heads=4,
  num_kv_heads=4, head_dim=16, mlp_dim=128, tied_embeddings=False,
)  # fmt: skip
EXACT = dataclasses.replace(FAST, numerics="exact")
SIZES = jaxkv.CacheConfig(
  num_pages=1024, page_size=2, num_slots=PROMPTS * SAMPLES, pages_per_slot=4
)
OPTIONS = rollout.RolloutConfig(
  num_samples=SAMPLES,
  max_new_tokens=TOKENS,
  prefill_chunk=32,
  # All sequences enter at once.
  admissions=PROMPTS * SAMPLES,
  window=PROMPTS * SAMPLES,
  max_overtaken=PROMPTS * SAMPLES,
)
ADAM = optax.adam(2e-3)


# %% [markdown]
# ## A round
#
# `draw` is the rollout. The samples of a prompt share its pages, and `grouped`
# arranges results by prompt and sample. `train` is the update: a few steps of
# the optimizer, with a loss that computes each prompt once. `grpo_round` does
# both. All of its arguments but the key and the static model are donated.


# %%
def draw(params, cache, kv, key, model):
  """Draws prompts and answers; returns the final state and the answers."""
  ask, answer = jax.random.split(key)
  prompts = jax.random.randint(ask, (PROMPTS, TOKENS), 0, VOCABULARY, jnp.int32)
  requests = rollout.Requests(prompts, jnp.full((PROMPTS,), TOKENS, jnp.int32))
  state = rollout.init(cache, kv, requests, answer, OPTIONS)
  forward = functools.partial(models.forward, config=model)
  state = rollout.generate(params, state, model=forward)
  return state, rollout.grouped(rollout.generated(state))


def log_probs(params, drawn, model):
  """Computes log-probs of the answers as a trainer does, without a cache."""
  prompts = (drawn.prompts, drawn.prompt_lengths)
  answers = (drawn.completions, drawn.completion_lengths)
  return models.grouped_log_probs(params, *prompts, *answers, config=model)


def train(params, opt_state, drawn, old, model, weights=None):
  """Returns the weights and opt_state after some updates, and figures."""
  # Rewards are per token. They are normalized over the samples of a prompt, for
  # each position separately.
  right = jnp.swapaxes(drawn.completions == drawn.prompts[:, None], 1, 2)
  good = rl.group_normalized(right.ravel(), num_samples=SAMPLES)
  good = jnp.swapaxes(good.reshape(right.shape), 1, 2)
  common = {"clip": (0.2, 0.3), "mean": "token", "weights": weights}

  def loss(params):
    new = log_probs(params, drawn, model)
    value, metrics = rl.grpo_loss(new, old, good, drawn.mask, **common)
    away = jnp.where(drawn.mask, new - drawn.log_probs, 0)
    mismatch, off = jnp.abs(away).max(), jnp.abs(jnp.exp(away) - 1).max()
    return value, {"mismatch": mismatch, "off_ratio": off, "kl": metrics.kl}

  def update(carry, _):
    params, opt_state = carry
    gradient, figures = jax.grad(loss, has_aux=True)(params)
    updates, opt_state = ADAM.update(gradient, opt_state)
    return (optax.apply_updates(params, updates), opt_state), figures

  carry = (params, opt_state)
  (params, opt_state), figures = jax.lax.scan(update, carry, length=INNER_STEPS)
  return params, opt_state, {"reward": jnp.mean(right)} | figures


@functools.partial(jax.jit, static_argnums=5, donate_argnums=(0, 1, 2, 3))
def grpo_round(params, opt_state, cache, kv, key, model):
  state, drawn = draw(params, cache, kv, key, model)
  old = drawn.log_probs
  params, opt_state, figures = train(params, opt_state, drawn, old, model)
  state = rollout.update_weights(state)
  figures |= {"counters": state.counters}
  return (params, opt_state, state.memory.cache, state.memory.kv), figures


# %% [markdown]
# ## Training
#
# The first call compiles; the others run the same program.


# %%
def begin(model, key):
  """Random weights, and an empty cache."""
  first, secret = jax.random.split(key)
  params = models.init_params(first, model)
  cache = jaxkv.init(SIZES, secret)
  return params, ADAM.init(params), cache, models.init_kv(model, SIZES)


def run(model, rounds, seed=1):
  """Runs rounds, and returns an array of each figure."""
  first, rest = jax.random.split(jax.random.key(seed))
  carry, figures = begin(model, first), []
  for key in jax.random.split(rest, rounds):
    carry, one = grpo_round(*carry, key, model)
    figures.append(one)
  jaxkv.check(carry[2])
  return jax.tree.map(lambda *some: np.stack(some), *figures)


start = time.perf_counter()
exact = run(EXACT, rounds=80)
print(f"{time.perf_counter() - start:.0f} s with the compilation")
print("programs:", grpo_round._cache_size())
before, after = exact["reward"][0], exact["reward"][-10:].mean()
print(f"reward: {before:.2f} -> {after:.2f}")
assert grpo_round._cache_size() == 1
assert before < 0.1
assert after > 0.9

# %% [markdown]
# ## The same numbers
#
# When an update begins, the weights are those that drew the tokens. So the ratio
# of new to old probabilities should be 1, and the divergence 0. With exact
# numerics this holds bit for bit, and with fast numerics up to rounding. This
# model is in float32, where rounding errors are small. In bfloat16, fast ratios
# of this model are off by up to 0.17, which is almost as much as the 0.2 at which
# the loss clips.

# %%
fast = run(FAST, rounds=20)
for name, figures in (("exact", exact), ("fast", fast)):
  first = {one: figures[one][:, 0] for one in ("mismatch", "off_ratio", "kl")}
  print(name, {one: float(values.max()) for one, values in first.items()})
  if name == "exact":
    assert all((values == 0).all() for values in first.values())

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot(exact["reward"], label="exact")
left.plot(fast["reward"], label="fast")
left.set(xlabel="round", ylabel="reward", ylim=(0, 1))
left.legend()
right.plot(exact["mismatch"][:, 0], label="exact")
right.plot(fast["mismatch"][:, 0], label="fast")
right.set(xlabel="round", ylabel="largest mismatch of a log-prob")
right.legend()
plt.show()
for name, curves in (("exact", exact), ("fast", fast)):
  print(
    f"{name}: reward {curves['reward'][0]:.2f} to {curves['reward'][-1]:.2f}, "
    f"largest mismatch {curves['mismatch'][:, 0].max():.1e}"
  )

# %% [markdown]
# Within a round the policy moves away from the policy that drew the tokens. So in
# later steps ratios differ from 1, and the loss clips them.

# %%
print("largest |ratio - 1| by step:", exact["off_ratio"].max(axis=0).round(2))

# %% [markdown]
# ## What was computed
#
# All tokens of a prompt but the last are computed before the first draw, once for
# all samples. Prompts whose first page is equal share this page, too.

# %%
counters = exact["counters"]
num_prefilled = np.asarray(counters.prefilled).sum()
num_generated = np.asarray(counters.generated).sum()
rounds = len(exact["reward"])
print("prompt tokens computed:", num_prefilled)
print("each prompt once:", rounds * PROMPTS * (TOKENS - 1))
print("each sample its own:", rounds * PROMPTS * SAMPLES * (TOKENS - 1))
assert num_prefilled <= rounds * PROMPTS * (TOKENS - 1)
assert num_generated == rounds * PROMPTS * SAMPLES * TOKENS

# %% [markdown]
# ## One step behind
#
# Sampler and trainer can also work at the same time. Then an update trains on
# answers that were drawn with the weights of the round before. `versions` has the
# version of the weights that drew each token, and `cache.epoch` is the current
# version.
#
# Such tokens are off-policy. The loss uses ratios to the policy at the beginning
# of the update. Each token has an importance weight: its probability under that
# policy, divided by its probability under the policy that drew it, up to a bound.
# Tokens that are more than one version old get weight 0.


# %%
@functools.partial(jax.jit, donate_argnums=(0, 1, 2, 3, 4))
def late_round(params, opt_state, cache, kv, drawn, key):
  """Trains on the answers of the round before, and draws new ones."""
  state, new = draw(params, cache, kv, key, EXACT)
  now = log_probs(params, drawn, EXACT)
  lag = cache.epoch.astype(jnp.int32) - drawn.versions
  weights = rl.importance_weights(
    now, drawn.log_probs, mask=drawn.mask, most=2.0, lag=lag, max_lag=1
  )
  params, opt_state, figures = train(
    params, opt_state, drawn, now, EXACT, weights
  )
  state = rollout.update_weights(state)
  figures |= {"lag": jnp.where(drawn.mask, lag, 0).max(), "weights": weights}
  return (params, opt_state, state.memory.cache, state.memory.kv, new), figures


# %% [markdown]
# The first round has no answers of an earlier round. Its groups have no tokens
# and so no gradient, and the weights do not change.

# %%
first, rest = jax.random.split(jax.random.key(1))
carry = begin(EXACT, first)
shape = jax.eval_shape(
  functools.partial(draw, model=EXACT), carry[0], *carry[2:], jax.random.key(0)
)[1]
carry = (*carry, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape))
late = []
for key in jax.random.split(rest, 50):
  carry, one = late_round(*carry, key)
  late.append(one)
late = jax.tree.map(lambda *some: np.stack(some), *late)
print(f"reward: {late['reward'][1]:.2f} -> {late['reward'][-10:].mean():.2f}")
assert (late["lag"][1:] == 1).all()
assert late["reward"][-10:].mean() > 2 * late["reward"][1]

# %% [markdown]
# The importance weights show how much the policy changes in one round. With exact
# numerics they correct only this change. If the sampler had other numerics, they
# would also correct the difference in rounding.

# %%
weights = late["weights"][1:]
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
axis.hist(weights.ravel(), bins=40, log=True)
axis.set(xlabel="importance weight", ylabel="tokens")
plt.show()
print(f"at the bound: {np.mean(weights == 2):.2%}")
assert (weights <= 2).all()

# %% [markdown]
# `help(jaxkv.rl)` lists what a loss can be made of,
# `help(jaxkv.models.Decoder)` says what exact numerics are, and
# `help(jaxkv.sharding)` how such a program runs on many devices.
