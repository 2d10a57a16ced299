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
# # Several devices
#
# `jaxkv.sharding` runs a rollout on a mesh. Here a CPU acts as eight devices.
# Each of them is a shard with its own cache, memory and queue. Shards do not
# communicate while they generate.

# %%
import functools
import os
import tempfile

flags = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"

import jax
import matplotlib.pyplot as plt
import numpy as np

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv import sharding

mesh = jax.make_mesh((8,), ("data",))
axes = sharding.MeshAxes(mesh, data="data")
decoder = models.llama(
  vocab_size=64,
  num_layers=2,
  embed_dim=16,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  mlp_dim=32,
)
model = functools.partial(models.forward, config=decoder)
params = models.init_params(jax.random.key(0), decoder)

# %% [markdown]
# ## A job
#
# 128 prompts, each with one sample. Lengths are lognormal, as those of answers
# often are. A priority starts the longest samples first, where their lengths
# can be estimated.

# %%
random = np.random.default_rng(0)
lengths = random.lognormal(2.5, 0.7, 128).clip(2, 60).astype(np.int32)
requests = rollout.Requests(
  random.integers(0, 64, (128, 4)).astype(np.int32),
  np.full(128, 4, np.int32),
  sampling=rollout.Sampling(max_tokens=lengths),
  priority=-lengths,
)
config = rollout.RolloutConfig(max_new_tokens=60, prefill_chunk=8)
sizes = jaxkv.CacheConfig(
  num_pages=200, page_size=4, num_slots=2, pages_per_slot=16
)


def memory():
  """Returns the cache and the pages of one shard."""
  cache = jaxkv.init(sizes, jax.random.key(1))
  return cache, models.init_kv(decoder, sizes)


def begin(axes, num_shards=None):
  """Returns a rollout of the job."""
  cache, kv = sharding.init_memory(memory, axes=axes, num_shards=num_shards)
  key = jax.random.key(2)
  return sharding.init(cache, kv, requests, key, config, axes=axes)


placed = jax.device_put(params, sharding.param_shardings(params, axes=axes))
state = begin(axes)
print("queue:", state.queue.tokens.shape, state.queue.tokens.sharding.spec)
print("keys: ", state.memory.kv.k.shape, state.memory.kv.k.sharding.spec)

# %% [markdown]
# All arrays have a leading axis of shards. `jaxkv` functions for one state work
# on an entry, here to draw the pages of each shard.

# %%
until = rollout.Until(steps=8)


def pages_in_use(state):
  """Returns the number of pages in use of each shard."""
  refs = np.asarray(state.memory.cache.pool.ref_count)
  return (refs[:, 1:] > 0).sum(axis=1)


def work(state):
  """Returns the number of unfinished sequences of each shard."""
  status = np.asarray(state.queue.status)
  return (status < rollout.SequenceStatus.DONE).sum(axis=1)


def run(state, balance):
  """Runs the job; returns its end, and the work and pages of each span."""
  history = []
  while not rollout.is_done(state):
    state = sharding.generate(placed, state, until, axes=axes, model=model)
    if balance:
      state = sharding.rebalance(state, axes=axes, max_pages=32)
    history.append((work(state), pages_in_use(state)))
  return state, np.asarray(history)


plain, plain_history = run(begin(axes), balance=False)
even, history = run(begin(axes), balance=True)
for name, end in (("fixed", plain), ("rebalanced", even)):
  steps = np.asarray(end.counters.steps).astype(int)
  print(f"{name}: {steps}, longest / mean {steps.max() / steps.mean():.2f}")

# %% [markdown]
# Sequences that moved have sampled the same tokens.

# %%
results = sharding.generated(even, axes=axes)
same = sharding.generated(plain, axes=axes)
assert (results.tokens == same.tokens).all()
print(results.tokens.shape, results.ids[:4].tolist())

# %%
figure, grid = plt.subplots(
  2, 2, figsize=(10, 5), sharex=True, sharey="row", layout="constrained"
)
for column, title, values in (
  (0, "fixed shards", plain_history),
  (1, "rebalanced", history),
):
  spans = 8 * (1 + np.arange(len(values)))
  for row, name in enumerate(("unfinished sequences", "pages in use")):
    lines = grid[row, column].plot(spans, values[:, row])
    grid[row, 0].set_ylabel(name)
  grid[0, column].set_title(title)
  grid[1, column].set_xlabel("steps")
labels = [f"shard {shard}" for shard in range(len(lines))]
figure.legend(lines, labels, loc="outside right center", frameon=False)
plt.show()
for title, values in (("fixed", plain_history), ("rebalanced", history)):
  num_steps = 8 * (values[:, 0] > 0).sum(axis=0) + 8
  print(
    f"{title}: the first shard has no work after {num_steps.min()} steps, the "
    f"last after {num_steps.max()}"
  )

# %% [markdown]
# ## A snapshot, restored on fewer devices
#
# In the middle of generation, the eight shards are saved. Two devices go on,
# with four shards each, which run one after another, and sample the same tokens.
# This needs `pip install "jaxkv[checkpoints]"`.

# %%
state = sharding.generate(placed, begin(axes), until, axes=axes, model=model)
folder = os.path.join(tempfile.mkdtemp(), "snapshot")
jaxkv.checkpoint.save(folder, state)

fewer = sharding.MeshAxes(jax.make_mesh((2,), ("data",)), data="data")
state = jaxkv.checkpoint.restore(folder, begin(fewer, num_shards=8))
print("shards of each device:", state.key.sharding.shard_shape((8,))[0])

placed = jax.device_put(params, sharding.param_shardings(params, axes=fewer))
state = sharding.generate(placed, state, axes=fewer, model=model)
found = sharding.generated(state, axes=fewer)
assert (np.asarray(found.tokens) == np.asarray(results.tokens)).all()

# %% [markdown]
# ## Tensor parallel
#
# With an axis `model`, two devices share one cache. Its pages are split by K/V
# heads, and the parameters by heads and by the inner dimension of MLPs. The
# devices add partial sums, so logits differ by rounding.

# %%
heads = sharding.MeshAxes(jax.make_mesh((2,), ("model",)), model="model")
placed = jax.device_put(params, sharding.param_shardings(params, axes=heads))
state = sharding.generate(placed, begin(heads), axes=heads, model=model)
print("keys:", state.memory.kv.k.shape, state.memory.kv.k.sharding.spec)
found = sharding.generated(state, axes=heads)
equal = (np.asarray(found.tokens) == np.asarray(results.tokens)).all(axis=1)
print(f"{equal.sum()} of {equal.size} sequences are equal")
