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
# # Two memories
#
# A device holds the prefixes of a few conversations. The host has room for many
# more. With `CacheConfig.offload_pages`, a cached page that the device evicts moves
# to offload memory, and returns when a sequence hits it. Both memories together
# are one cache in LRU order. Nothing in this notebook leaves the compiled
# program: index, queues and decisions are on the device, and only the contents
# of pages are far away.

# %%
import dataclasses
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxkv

config = jaxkv.CacheConfig(
  num_pages=5,
  page_size=4,
  num_slots=1,
  pages_per_slot=4,
  offload_pages=6,
)
kv = jaxkv.kv.init(
  config, num_layers=2, num_kv_heads=2, head_dim=32, dtype="float32"
)
offload = jaxkv.kv.init_offload(kv, config)
print(offload.pages[0].shape, offload.pages[0].sharding.memory_kind)

# %% [markdown]
# ## Verbs return moves
#
# The verbs decide, and `jaxkv.kv.move` moves. It must run before anything is
# written to the pages that a verb has given out. Here the "K/V" of a token is
# its number, so that we can see what a page holds.

# %%
SLOT = jnp.zeros((1,), jnp.int32)


def serve(state, kv, offload, tokens):
  """Serves one sequence: admit, move, write, commit, free."""
  tokens = jnp.asarray(tokens)[None]
  length = jnp.full((1,), tokens.shape[1], jnp.int32)
  state, out = jaxkv.admit(state, SLOT, tokens, length)
  kv, offload = jaxkv.kv.move(kv, offload, out.moves)
  new = length - out.num_cached_tokens
  view = jaxkv.view(state, num_tokens=new)
  rest = jnp.roll(tokens, -out.num_cached_tokens[0], axis=1)
  x = jnp.broadcast_to(rest[..., None, None], (*rest.shape, 2, 32))
  for layer in range(2):
    kv = jaxkv.kv.write(kv, view, layer, x.astype(jnp.float32), -x * 1.0)
  state, _ = jaxkv.commit(state, rest, new)
  state, _ = jaxkv.free(state, slots=SLOT)
  return state, kv, offload, out


first, second = np.arange(1, 14), np.arange(101, 114)
state = jaxkv.init(config)
state, kv, offload, _ = serve(state, kv, offload, first)
state, kv, offload, out = serve(state, kv, offload, second)
print("the second prompt moved", int(out.moves.count), "pages out")
print(state)

# %% [markdown]
# The first prompt is now in offload memory. `match` gives its pages numbers above
# `num_pages`. When it returns, its pages exchange places with those of the
# second prompt, and hold the same bits as before.

# %%
found = jaxkv.match(state, first[None], [13])
print("pages of the first prompt:", found.pages[0, 0].tolist())
state, kv, offload, out = serve(state, kv, offload, first)
print("cached tokens:", int(out.num_cached_tokens[0]))
page = int(out.moves.page[0])
assert kv.k[page, 0, :, 0].tolist() == [1, 2, 3, 4]
print(state)

# %% [markdown]
# ## Conversations
#
# Forty clients talk in ten rounds. A prompt is the whole conversation so far
# and eight new tokens. All clients of a round come before one of them returns.
# So a small cache forgets every conversation before it goes on: LRU order at
# its worst. We count hits, so no K/V memory is needed.

# %%
CLIENTS, ROUNDS, FIRST, MORE = 40, 10, 64, 8
LONGEST = FIRST + 2 * MORE * ROUNDS
TEXTS = jnp.asarray(
  np.random.default_rng(0).integers(0, 1000, (CLIENTS, LONGEST)), jnp.int32
)


def turn(state, request):
  """One prompt and its answer; returns hits, and cached pages by memory."""
  client, length = request
  tokens, length = TEXTS[client][None], length[None]
  state, out = jaxkv.admit(state, SLOT, tokens, length)
  new = length + MORE - out.num_cached_tokens
  state, _ = jaxkv.allocate(state, new)
  rest = jnp.roll(tokens, -out.num_cached_tokens[0], axis=1)
  state, _ = jaxkv.commit(state, rest, new)
  state, _ = jaxkv.free(state, slots=SLOT)
  buckets = state.pool.index.buckets
  on_device = jnp.sum((buckets > 0) & (buckets < state.config.num_pages))
  num_offloaded = jnp.sum(buckets > state.config.num_pages)
  return state, (out.num_cached_tokens[0], on_device, num_offloaded)


@functools.partial(jax.jit, static_argnums=0)
def talk(config, clients, lengths):
  state = jaxkv.init(config, jnp.zeros(4, jnp.uint32))
  return jax.lax.scan(turn, state, (clients, lengths))


sizes = jaxkv.CacheConfig(
  num_pages=101, page_size=4, num_slots=1, pages_per_slot=LONGEST // 4
)
caches = {
  "one memory": sizes,
  "two memories": dataclasses.replace(sizes, offload_pages=2300),
  "unlimited": dataclasses.replace(sizes, num_pages=2501),
}
order = np.random.default_rng(1)
clients = np.concatenate([order.permutation(CLIENTS) for _ in range(ROUNDS)])
lengths = np.repeat(FIRST + 2 * MORE * np.arange(ROUNDS), CLIENTS)
hits, pages = {}, {}
for name, cache in caches.items():
  end, (cached, *held) = talk(
    cache, jnp.asarray(clients, jnp.int32), jnp.asarray(lengths, jnp.int32)
  )
  jaxkv.check(end)
  by_round = np.asarray(cached).reshape(ROUNDS, -1).sum(1)
  hits[name] = by_round / lengths.reshape(ROUNDS, -1).sum(1)
  pages[name] = np.stack(held)
  print(f"{name}: {hits[name][-1]:.1%} of the last round's prompts were cached")
assert (hits["two memories"] == hits["unlimited"]).all()

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
for name, style in zip(hits, ("o-", "s-", "k--"), strict=True):
  left.plot(np.arange(1, ROUNDS + 1), 100 * hits[name], style, label=name)
left.set(xlabel="round", ylabel="cached prompt tokens, %")
left.legend()
right.stackplot(
  np.arange(len(clients)),
  pages["two memories"],
  labels=["device", "offloaded"],
)
right.set(xlabel="request", ylabel="cached pages")
right.legend(loc="upper left")
figure.tight_layout()
plt.show()
for name, curve in hits.items():
  print(f"{name}: cached {', '.join(f'{share:.0%}' for share in curve)}")
on_device, offloaded = pages["two memories"][:, -1]
print(f"two memories: {on_device} pages on the device, {offloaded} offloaded")

# %% [markdown]
# ## When it pays
#
# A page must travel, and a short prompt of a small model can be computed faster
# than it returns. A `OffloadPolicy` compares both. `python -m jaxkv doctor`
# measures its two speeds on your machine. A page that would not return is not
# saved either.

# %%
kv_bytes = jaxkv.kv.page_bytes(kv)
for tokens_per_second in (1_000, 100_000_000):
  policy = jaxkv.OffloadPolicy(16e9, tokens_per_second)
  chosen = dataclasses.replace(
    config, offload_policy=policy, page_bytes=kv_bytes
  )
  state = jaxkv.init(chosen)
  for prompt in (first, second, first):
    state, _, _, _ = serve(state, kv, offload, prompt)
  stats = jaxkv.stats(state)
  print(
    f"a model of {tokens_per_second:,} tokens a second:",
    f"{int(stats.restored_pages)} pages returned,",
    f"{int(stats.dropped_pages)} were dropped",
  )
