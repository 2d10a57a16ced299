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
# # A fleet of workers
#
# `jaxkv.workers.Pool` feeds a stream of prompts to workers that run elsewhere,
# and returns the answers as they end. A worker may fail at any time. Its prompts
# then run again on others, with the same ids, and so with the same samples.
#
# Here four workers in this process answer for a GRPO trainer. With
# `jaxkv.integrations.ray.RayWorkers(make)` in place of `make`, each of them is
# an actor on some machine.

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxkv
from jaxkv import models
from jaxkv import rl
from jaxkv import rollout
from jaxkv import workers

# %% [markdown]
# ## A worker
#
# The task is to repeat a prompt of four tokens. A worker is an engine. The keys
# and secrets are the same on all workers, so a prompt has the same samples on
# each, and sequences can move with their pages.

# %%
PROMPTS, SAMPLES, TOKENS, VOCABULARY = 32, 8, 4, 12
MODEL = models.llama(
  vocab_size=VOCABULARY, num_layers=2, embed_dim=64, num_heads=4,
  num_kv_heads=4, head_dim=16, mlp_dim=128, tied_embeddings=False,
)  # fmt: skip
OPTIONS = rollout.RolloutConfig(
  num_samples=SAMPLES, max_new_tokens=TOKENS, prefill_chunk=32
)
SIZES = jaxkv.CacheConfig(
  num_pages=256, page_size=2, num_slots=16, pages_per_slot=4
)
FORWARD = functools.partial(models.forward, config=MODEL)


def make(place):
  """Returns a new worker."""
  del place
  return rollout.Engine(
    params, FORWARD, SIZES, OPTIONS, num_prompts=8, secret=jax.random.key(1)
  )


# %% [markdown]
# ## A trainer
#
# Each step waits for the answers to its prompts, and gives new weights to the
# pool. Workers take them before their next call of the model.

# %%
ADAM = optax.adam(4e-3)


def loss_of(params, drawn):
  """Returns the loss, and the mean reward: the share of right tokens."""
  right = jnp.mean(drawn.completions == drawn.prompts[:, None], axis=2)
  advantages = rl.group_normalized(right)
  new = models.grouped_log_probs(
    params,
    drawn.prompts,
    drawn.prompt_lengths,
    drawn.completions,
    drawn.completion_lengths,
    config=MODEL,
  )
  loss, _ = rl.grpo_loss(new, drawn.log_probs, advantages, drawn.mask)
  return loss, jnp.mean(right)


@jax.jit
def update(params, opt_state, drawn):
  """Returns new weights, new opt_state and the mean reward."""
  gradient, reward = jax.grad(loss_of, has_aux=True)(params, drawn)
  updates, opt_state = ADAM.update(gradient, opt_state)
  return optax.apply_updates(params, updates), opt_state, reward


def train(pool, params, num_steps):
  """Trains with the answers of a pool; returns the reward of each step."""
  random, opt_state, rewards = np.random.default_rng(0), ADAM.init(params), []
  for _ in range(num_steps):
    prompts = random.integers(0, VOCABULARY, (PROMPTS, TOKENS))
    lengths = np.full(PROMPTS, TOKENS, np.int32)
    pool.submit(rollout.Requests(prompts.astype(np.int32), lengths))
    answers = [group.results for group in pool.results()]
    answers = jax.tree.map(lambda *rows: np.concatenate(rows), *answers)
    drawn = rollout.grouped(
      answers, prompt_columns=TOKENS, completion_columns=TOKENS
    )
    params, opt_state, reward = update(params, opt_state, drawn)
    pool.update_weights(params)
    rewards.append(float(reward))
  return rewards


# %% [markdown]
# ## A worker dies
#
# To see what runs where, a worker records the prompts that end on it. One of
# them fails in the middle.


# %%
class Recorded:
  """A worker that records the ends of prompts, and may fail."""

  def __init__(self, place):
    self._worker, self._place = make(place), place
    print(f"worker {place} starts")

  def __getattr__(self, name):
    return getattr(self._worker, name)

  def step(self, steps):
    """Generates, unless it is time to die."""
    if self._place == 2 and len(ends) > 200 and not deaths:
      deaths.append(len(ends) // PROMPTS)
      raise OSError("the machine was taken away")
    return self._worker.step(steps)

  def harvest(self):
    """Returns the prompts that have ended, and records them."""
    groups = self._worker.harvest()
    ends.extend((self._place, group.id) for group in groups)
    return groups


ends, deaths = [], []
params = models.init_params(jax.random.key(0), MODEL)
with workers.Pool(Recorded, 4, config=OPTIONS, max_age=1, steps=2) as pool:
  rewards = train(pool, params, 24)
print(f"reward {rewards[0]:.2f} to {rewards[-1]:.2f}")
numbers = [number for _, number in ends]
print(len(numbers), "prompts ended,", len({*numbers}), "of them different")

# %%
# Ids count samples, so a step has PROMPTS * SAMPLES ids.
served = np.zeros((4, 24), int)
for place, number in ends:
  served[place, number // (PROMPTS * SAMPLES)] += 1
figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
bottom = np.zeros(24, int)
for place, counts in enumerate(served):
  axis.bar(range(24), counts, bottom=bottom, label=f"worker {place}")
  bottom += counts
axis.axvline(deaths[0], color="black", lw=0.8, label="worker 2 dies")
axis.set(xlabel="training step", ylabel="prompts that ended")
figure.legend(loc="outside right center", frameon=False)
plt.show()
print("prompts of each worker:", served.sum(axis=1).tolist())
print("of worker 2 in each step:", served[2].tolist())
