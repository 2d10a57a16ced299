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
# ones more likely. Most of its time goes into drawing. tunix is a trainer for
# JAX. Its own engine computes a prompt once for each answer, keeps a dense cache
# for each answer, and is compiled again when a limit changes.
#
# Here the trainer stays as it is, and one argument changes: the engine. Samples
# of a prompt share its pages, later turns continue from the pages of earlier
# ones, and no page of old weights is used after an update.
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
# The model is tunix's Llama 3 with two layers and random weights. The vocabulary
# has 29 words, `w3` to `w31`, and tokens for padding, the beginning and the end.

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
# The reward is the share of even words. `rollout_engine` is the argument that
# changes; tunix's own engine is `"vanilla"`. `Noted` is a `JaxkvRollout` that
# records the seconds and the computed prompt tokens of each call.

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
# Before the training, we ask the engine for four answers to each of four prompts
# of 40 words. Adjacent equal prompts are treated as samples of one prompt.

# %%
engine = cluster.rollout
prompts = [text for text in [words(40) for _ in range(4)] for _ in range(4)]
answers = engine.generate(prompts, settings)
for text in answers.text[:4]:
  print(text)

# %% [markdown]
# With the token for the beginning a prompt has 41 tokens. The counter leaves out
# the last one, which is computed in the step that draws the first token.

# %%
counters = engine.counters()
print("tokens of prompts that were computed:", counters["prefilled"])
print("by an engine that computes each sample:", 16 * 40)
print("samples that shared a prompt:", counters["forked"])

# %% [markdown]
# If the same prompts come again, their pages are still cached. Only the end of
# each prompt, which does not fill a page of 16 tokens, is computed.

# %%
before = counters["prefilled"]
engine.generate(prompts, settings)
print("computed this time:", engine.counters()["prefilled"] - before)

# %% [markdown]
# The trainer computes log-probabilities in another way, for whole sequences
# without a cache. They differ from the engine's only by rounding.

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
# The answers get better. Each step begins with sixteen prompts of 41 tokens, of
# which only the four distinct ones are computed. The dashed line is the number
# of tokens without sharing.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
left.plot(rewards, label="reward")
left.set(xlabel="step", ylabel="share of even words")
left.legend()
prompt_tokens = [num_computed for _, num_computed in steps]
right.bar(range(STEPS), prompt_tokens, label="computed")
right.axhline(16 * 40, color="gray", linestyle="--", label="without sharing")
right.set(xlabel="step", ylabel="tokens of prompts", ylim=(0, 16 * 40 * 1.4))
right.legend()
plt.show()
print(
  f"share of even words: {rewards[0]:.2f} in the first step, {rewards[-1]:.2f} "
  f"in the last; {sum(prompt_tokens)} of {STEPS * 16 * 40} tokens computed"
)

# %% [markdown]
# All of the compilation was in the first call of this notebook. A later call
# takes milliseconds, whatever its limits and lengths are.

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
# The trainer has updated the weights after the last call. The engine notices the
# new arrays, and no longer uses the pages of the old weights. So the first call
# below computes its prompt, and the second call finds the prompt's pages. Then
# `update_params` replaces the weights, and the prompt is computed again.

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
# The prompt of an agent's next turn is the whole history and some more words. The
# pages of the history are cached, those of the agent's own answers included.

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
# not do. A model of another trainer is adapted in about ten lines, see
# `help(jaxkv.integrations.nnx)`.
