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
# # Groups: windows, chunks and states
#
# Layers that cache alike form a **group**. Layers with full attention need
# every earlier page. Layers with a sliding window need the last few. Recurrent
# layers need one state. A model with several kinds of layers has a group for
# each kind.
#
# Every group has a page table of its own. Groups whose pages have the same shape
# can draw from one pool, so a page that one group gives back can serve another
# one. Other groups have pools of their own. This notebook goes through the kinds,
# with a picture of the pages where it helps.

# %%
import dataclasses

import jax.numpy as jnp

import jaxkv

config = jaxkv.CacheConfig(
  num_pages=40,
  page_size=4,
  num_slots=2,
  pages_per_slot=8,
  groups=(jaxkv.FullAttention(), jaxkv.SlidingWindow(8)),
)
TOKENS = jnp.arange(64, dtype=jnp.int32).reshape(2, 32)


def grow(state, count):
  """Appends the next `count` of TOKENS to both slots."""
  state, out = jaxkv.allocate(state, [count, count])
  assert out.ok.all()
  columns = (state.length[:, None] + jnp.arange(32)) % 32
  tokens = jnp.take_along_axis(TOKENS, columns, axis=1)
  return jaxkv.commit(state, tokens, [count, count])[0]


twenty = grow(jaxkv.init(config), 20)
jaxkv.show(twenty, title="Full attention, and a window of 8 tokens")

# %% [markdown]
# ## Recycle
#
# In group 1 a token attends to the last 8 tokens, so only the last two of a
# sequence's five pages are needed. `recycle` gives the others back while the
# sequence runs. The null page takes their places in the page table, so that a
# column of the table still stands for the same tokens.

# %%
recycled, out = jaxkv.recycle(twenty)
assert out.num_recycled_pages.tolist() == [3, 3]
assert recycled.page_table[0, 1, :3].tolist() == [0, 0, 0]
jaxkv.show(recycled, title="After recycle")

# %% [markdown]
# In a loop, `recycle` comes before every `allocate`. Then a sequence never
# holds more pages than its window and its new tokens need, however long it gets.

# %%
state, pages = recycled, []
for _ in range(12):
  state, _ = jaxkv.recycle(state)
  state = grow(state, 1)
  held = state.num_pages - state.num_skipped_pages
  pages.append(held[0].tolist())
print("pages of slot 0 by group:", pages)
assert max(window for _, window in pages) == 3

# %% [markdown]
# ## A prefix is a hit if all groups can continue from it
#
# The pages that the window left behind stay cached until somebody takes them.
# To continue from a prefix, a new sequence needs all of the prefix's pages in
# group 0, but in group 1 only the pages of the last window. If one of these is
# evicted, the hit becomes the longest prefix that all groups can continue from.

# %%
last_of_window = int(state.page_table[0, 1, 6])
freed, _ = jaxkv.free(state)
lengths = [32, 32]
found = jaxkv.match(freed, TOKENS, lengths).num_cached_tokens
assert found.tolist() == [28, 28]
evicted, _ = jaxkv.evict(freed, [last_of_window])
found = jaxkv.match(evicted, TOKENS, lengths).num_cached_tokens
print("found after one page of slot 0's window is evicted:", found.tolist())
assert found.tolist() == [24, 28]

# %% [markdown]
# ## Layers and groups
#
# A layer reads and writes through a `View` of its group. No two groups hold the
# same page at a time, so in one pool a layer of each group can share one layer of
# the K/V memory. The memory needs as many layers as the largest group has.

# %%
kv = jaxkv.kv.init(config, num_layers=1, num_kv_heads=2, head_dim=8)
state, _ = jaxkv.allocate(jaxkv.init(config), [3, 3])
x = jnp.ones((2, 3, 2, 8), jnp.bfloat16)
for group, window in enumerate((None, 8)):
  view = jaxkv.view(state, group=group, num_tokens=[3, 3])
  kv = jaxkv.kv.write(kv, view, 0, x, x)
  options = jaxkv.kernels.AttentionOptions(window=window)
  assert jaxkv.kv.attend(kv, view, 0, x, options=options).shape == x.shape

# %% [markdown]
# A layer with a window passes its size in the options. `attend` refuses a window
# that is not the one of the view's group.
#
# ## Chunks
#
# `ChunkedLocal(chunk)` attends to earlier tokens of its own chunk. Where a
# chunk ends, all of its pages go back at once.

# %%
chunked = dataclasses.replace(
  config, groups=(jaxkv.FullAttention(), jaxkv.ChunkedLocal(16))
)
state = grow(jaxkv.init(chunked), 15)
_, out = jaxkv.recycle(state)
assert out.num_recycled_pages.tolist() == [0, 0]
state, out = jaxkv.recycle(grow(state, 1))
assert out.num_recycled_pages.tolist() == [4, 4]

# %% [markdown]
# ## Recurrent states
#
# `Recurrent` is for layers with a state instead of keys and values, such as
# Mamba's. A page is a snapshot of the state after the page's last token, and a
# sequence continues from the last snapshot that is cached. Prefill therefore
# goes in chunks that end where a page ends. `truncate` can go back only to the
# end of a page whose state is still there.

# %%
recurrent = dataclasses.replace(
  config,
  groups=(jaxkv.FullAttention(), jaxkv.Recurrent()),
)
state = jaxkv.init(recurrent)
for count in (4, 4, 2):
  state = grow(state, count)
kept, _ = jaxkv.recycle(state)
print("states kept by slot 0:", kept.page_table[0, 1, :4].tolist())

_, out = jaxkv.truncate(state, [8, 9])
statuses = [jaxkv.Status(code).name for code in out.code.tolist()]
print("truncate to 8 and to 9 tokens:", statuses)
assert out.ok.tolist() == [True, False]

# %% [markdown]
# ## Pools
#
# A state takes as many bytes as the keys and values of hundreds of tokens, so
# there should be fewer pages for states. `num_pages` can have a number for each
# of several pools, and `pool` is the pool of a group's pages. All pools share one
# numbering: here pool 0 has the pages 0 to 15, and pool 1 the pages 16 to 21. The
# first page of a pool is never used.
#
# A state for every page would also be too many. With a `StateRetention`, a
# sequence keeps the states from which later prompts probably continue: at the
# last page end of its prompt and at the one before it. Its running state moves
# from page to page with the sequence. So a chunk of the prompt can be as long as
# the distance to the next state that is kept: of 14 tokens, 8, then 4, then 2.

# %%
hybrid = dataclasses.replace(
  config,
  num_pages=(16, 6),
  groups=(jaxkv.FullAttention(), jaxkv.Recurrent(pool=1)),
  prefix_retention_interval=jaxkv.StateRetention(),
)
prompt = TOKENS[:1, :14]
state, _ = jaxkv.admit(jaxkv.init(hybrid), [0], prompt, [14], num_tokens=[8])
state, _ = jaxkv.commit(state, prompt[:, :8], [8], slots=[0])
for start, count in ((8, 4), (12, 2)):
  state, _ = jaxkv.recycle(state)
  state, _ = jaxkv.allocate(state, [count], slots=[0])
  chunk = prompt[:, start : start + count]
  state, _ = jaxkv.commit(state, chunk, [count], slots=[0])
state, _ = jaxkv.recycle(state)
print("pages of states:", state.page_table[0, 1, :4].tolist())
print("free pages of states:", jaxkv.free_pages(state, pool=1))
jaxkv.show(state, title="Two pools: keys and values, and states")

# %% [markdown]
# The sequence holds two states, after 12 tokens and the running one. `recycle`
# released the state after 8 tokens, which stays cached: it is in the free queue of
# pool 1. The same prompt continues after 12 tokens, and a prompt with another end
# after 8. If a state is evicted, the keys and values behind the state before it
# are of no use. `stats` counts such tokens, as a sign that pool 1 is too small.

# %%
other_end = prompt.at[0, 10].set(0)
prompts = jnp.concatenate([prompt, other_end])
found = jaxkv.match(state, prompts, [14, 14]).num_cached_tokens
assert found.tolist() == [12, 8]

freed, _ = jaxkv.free(state, slots=[0])
freed, _ = jaxkv.evict(freed, state.page_table[0, 1, 2][None])
again, out = jaxkv.admit(freed, [0], prompt, [14])
assert out.num_cached_tokens.tolist() == [8]
assert int(jaxkv.stats(again).unusable_tokens) == 4

# %% [markdown]
# `jaxkv.models.cache_config` sizes the pools of a model from bytes.
#
# ## Pages of several sizes
#
# A kind can name a `page_size` of its own, a multiple of the cache's. Hits then
# end where all groups have a whole page.

# %%
sizes = dataclasses.replace(
  config,
  groups=(jaxkv.FullAttention(), jaxkv.FullAttention(page_size=8)),
)
state, _ = jaxkv.free(grow(jaxkv.init(sizes), 12))
assert sizes.alignment == 8
found = jaxkv.match(state, TOKENS, [32, 32]).num_cached_tokens
assert found.tolist() == [8, 8]  # Three pages of 4, but one of 8.

# %% [markdown]
# ## Which prefixes of a window stay cached
#
# A window that moves on leaves a cached page behind at every step, and most of
# them only serve prefixes that nobody asks for. `prefix_retention_interval`
# says which prefixes are kept: all of them (None), only the latest (0), or the
# latest and one every k tokens. The latest prefixes end at the end of the prompt
# and where an earlier prompt diverged.
#
# Two more options follow vLLM. `use_eagle` leaves out the last page found,
# which a draft model such as EAGLE must compute again.
# `prefix_rules="classic"` handles prefixes as vLLM did before 0.25.

# %%
latest = dataclasses.replace(config, prefix_retention_interval=0)
state, _ = jaxkv.admit(jaxkv.init(latest), [0, 1], TOKENS[:, :28], [28, 28])
states = {"all": grow(jaxkv.init(config), 28)}
states["latest"], _ = jaxkv.commit(state, TOKENS, [28, 28])
cached = {}
for name, state in states.items():
  state, _ = jaxkv.free(state)
  cached[name] = len(jaxkv.cached_pages(state))
print("cached pages:", cached)
assert cached == {"all": 28, "latest": 18}

# %% [markdown]
# ## A kind of your own
#
# A subclass of `GroupKind` is a new kind. It overrides what differs: which
# tokens are skipped, what a hit is, which pages are worth caching. The layers
# of this kind attend to a block of `size` tokens and to the block before it.


# %%
@dataclasses.dataclass(frozen=True)
class TwoBlocks(jaxkv.GroupKind):
  """Layers that attend to their own block of tokens and the one before."""

  size: int

  def num_skipped_tokens(self, num_tokens):
    return jnp.maximum(num_tokens // self.size - 1, 0) * self.size


own = dataclasses.replace(config, groups=(jaxkv.FullAttention(), TwoBlocks(4)))
state, out = jaxkv.recycle(grow(jaxkv.init(own), 10))
assert out.num_recycled_pages.tolist() == [1, 1]
jaxkv.show(state, title="A kind of your own")
