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
# # GRPO with tunix
#
# GRPO draws several answers to each prompt, scores them, and makes the better
# ones more likely. Most of its time goes into drawing. tunix is a trainer of the
# JAX world; its own engine computes a prompt once for each answer, keeps a dense
# cache for each, and is compiled again when a limit changes.
#
# Here the trainer stays as it is, and one argument changes: the engine. Samples
# of a prompt share its pages, later turns go on from earlier ones, and new
# weights make old pages unreachable.
#
# This needs `pip install "jaxkv[clients]"`.

# %%
import contextlib
import io
import logging
import time
import warnings

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")

from tunix.models.llama3 import model as llama3
from tunix.rl import reshard
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout
from tunix.tests import test_common

from jaxkv.integrations.tunix import JaxkvRollout

# %% [markdown]
# ## A model and its words
#
# A Llama 3 of tunix with two layers and random weights. It knows 29 words, `w3`
# to `w31`, beside those for padding, the beginning and the end.

# %%
NUM_WORDS = 32
names = {"<pad>": 0, "<s>": 1, "</s>": 2}
names |= {f"w{number}": number for number in range(3, NUM_WORDS)}
tokenizer = test_common.MockVocab(names)

model = llama3.Llama3(
  llama3.ModelConfig(
    num_layers=2,
    vocab_size=NUM_WORDS,
    embed_dim=32,
    hidden_dim=64,
    num_heads=4,
    head_dim=16,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-6,
  ),
  rngs=nnx.Rngs(0),
)
mesh = jax.sharding.Mesh(
  np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp")
)
actor = reshard.reshard_model_to_mesh(model, mesh)
random = np.random.default_rng(0)


def words(count):
  return " ".join(f"w{number}" for number in random.integers(3, 32, count))


# %% [markdown]
# ## A trainer
#
# The reward is the share of even words. `rollout_engine` was `"vanilla"`. This
# engine notes what each call took, and is otherwise `JaxkvRollout`.

# %%
EVEN = {f"w{number}" for number in range(4, NUM_WORDS, 2)}
steps, rewards = [], []


class Noted(JaxkvRollout):
  def generate(self, prompts, rollout_config, **kwargs):
    have, begin = self.counters().get("prefilled", 0), time.perf_counter()
    out = super().generate(prompts, rollout_config, **kwargs)
    took = time.perf_counter() - begin
    steps.append((took, self.counters()["prefilled"] - have))
    return out


def reward(prompts, completions, **_):
  shares = [
    float(np.mean([word in EVEN for word in text.split()] or [0]))
    for text in completions
  ]
  rewards.append(np.mean(shares))
  return shares


settings = base_rollout.RolloutConfig(
  max_tokens_to_generate=16,
  temperature=1.0,
  top_p=1.0,
  max_prompt_length=48,
  kv_cache_size=96,
  return_logprobs=True,
)
STEPS = 40
roles = (
  rl_cluster.Role.ACTOR,
  rl_cluster.Role.REFERENCE,
  rl_cluster.Role.ROLLOUT,
)
cluster = rl_cluster.RLCluster(
  actor=actor,
  reference=nnx.clone(actor),
  tokenizer=tokenizer,
  cluster_config=rl_cluster.ClusterConfig(
    role_to_mesh=dict.fromkeys(roles, mesh),
    rollout_engine=Noted,
    training_config=rl_cluster.RLTrainingConfig(
      actor_optimizer=optax.adam(3e-3),
      eval_every_n_steps=1000,
      max_steps=STEPS,
    ),
    rollout_config=settings,
  ),
)
learner = grpo_learner.GRPOLearner(
  rl_cluster=cluster,
  reward_fns=reward,
  algo_config=grpo_learner.GRPOConfig(num_generations=4, beta=0.0),
)

# %% [markdown]
# ## The engine alone
#
# Before it trains, four prompts of 40 words, and four answers to each. Equal
# prompts that stand next to each other are samples of one prompt.

# %%
engine = cluster.rollout
prompts = [text for text in [words(40) for _ in range(4)] for _ in range(4)]
answers = engine.generate(prompts, settings)
for text in answers.text[:4]:
  print(text)

# %% [markdown]
# With the word for the beginning a prompt has 41 tokens. The last one of each is
# computed when the first token is drawn from it, and counts there.

# %%
counters = engine.counters()
print("tokens of prompts that were computed:", counters["prefilled"])
print("by an engine that computes each sample:", 16 * 40)
print("samples that shared a prompt:", counters["forked"])

# %% [markdown]
# The same prompts again: their pages are still there. What is computed is the
# end of each prompt, which fills no page of 16 tokens.

# %%
before = counters["prefilled"]
engine.generate(prompts, settings)
print("computed this time:", engine.counters()["prefilled"] - before)

# %% [markdown]
# Then the log-probabilities. The trainer computes them in another way, for whole
# sequences without a cache. The difference is rounding.

# %%
padded = np.zeros((16, 16), np.int32)
for row, tokens in enumerate(answers.tokens):
  padded[row, : len(tokens)] = tokens
scores = engine.get_per_token_logps(answers.left_padded_prompt_tokens, padded)
print(
  max(
    float(np.abs(own - scores[row, : len(own)]).max(initial=0))
    for row, own in enumerate(answers.logprobs)
  )
)

# %% [markdown]
# ## Training

# %%
first = steps[0][0]
steps.clear()
with contextlib.redirect_stderr(io.StringIO()):  # Its progress bars.
  learner.train(
    [{"prompts": np.array([words(40) for _ in range(4)])} for _ in range(STEPS)]
  )

# %% [markdown]
# The answers get better. Sixteen sequences of 41 tokens begin in each step, and
# what is computed of them is four prompts.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
left.plot(rewards)
left.set(xlabel="step", ylabel="share of even words")
right.bar(range(STEPS), [computed for _, computed in steps])
right.axhline(16 * 40, color="gray", linestyle="--")
right.set(xlabel="step", ylabel="tokens of prompts computed")
plt.show()

# %% [markdown]
# All of the compiling was in the first call of this notebook. A later one takes
# milliseconds, whatever limits and lengths come.

# %%
print(f"first call: {first:.1f} s")
print(f"step: {1e3 * np.median([took for took, _ in steps]):.0f} ms")
print("reward:", f"{np.mean(rewards[:5]):.2f} -> {np.mean(rewards[-5:]):.2f}")

# %%
assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1
assert all(computed <= 4 * 40 for _, computed in steps)

# %% [markdown]
# ## New weights
#
# The trainer has changed the weights since the last call, in place. The engine
# sees that the arrays are others, and finds no page of before: a prompt of an
# earlier step is computed again, and a second time it is found.

# %%
text = [words(40)]
for _ in range(2):
  before = engine.counters()["prefilled"]
  engine.generate(text, settings)
  print("computed:", engine.counters()["prefilled"] - before)
old = nnx.state(model)
engine.update_params(jax.tree.map(lambda leaf: leaf * 1.01, old))
before = engine.counters()["prefilled"]
engine.generate(text, settings)
print("computed with new weights:", engine.counters()["prefilled"] - before)

# %% [markdown]
# ## Turns
#
# An agent's next turn is the whole history, and some words more. What was said
# before is in pages, its own answers included.

# %%
history = words(20)
for turn in range(3):
  before = engine.counters()["prefilled"]
  out = engine.generate(history, settings)
  computed = engine.counters()["prefilled"] - before
  print(f"turn {turn}: {len(history.split()) + 1} tokens, {computed} computed")
  history = f"{history} {out.text[0]} {words(4)}".replace("  ", " ")

# %% [markdown]
# `help(jaxkv.integrations.tunix)` has a table of what the engine does and does
# not do. Models of other trainers take some ten lines:
# `help(jaxkv.integrations.nnx)`. SkyRL-tx's server samples on the same engine:
# `help(jaxkv.integrations.skyrl_tx)`.
