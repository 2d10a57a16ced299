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
# # A scheduler in Python
#
# Many engines decide in Python which requests run next. `jaxkv.host` has a
# cache manager for them: `CacheManager` has the methods of vLLM's
# `KVCacheManager` and of eSurge's `CacheManager`, and it gives the same page
# ids, hits and eviction order. It is plain Python, so nothing is compiled.
# Between any two calls, a jitted loop can take over: `manager.state` is the
# cache as a value on the device, and `manager.take` takes back the state that
# the loop returns.
#
# This notebook admits requests, decodes, hands the cache to a jitted loop,
# preempts a request and resumes it.

# %%
import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.host import CacheManager
from jaxkv.host import Request

manager = CacheManager(
  40,
  [
    jaxkv.FullAttention(page_size=4),
    jaxkv.SlidingWindow(8, page_size=4),
  ],
  max_model_len=64,
  max_requests=4,
)
manager.state

# %% [markdown]
# ## Admit a request
#
# Any object with `request_id`, `token_ids` and `num_computed_tokens` is a
# request; `jaxkv.host.Request` is one. `get_computed_pages` looks its prefix
# up, and `allocate_slots` takes pages for the rest. It returns the new pages of
# each group, or None if the pool has too few.

# %%
first = Request("first", list(range(20)))
pages, found = manager.get_computed_pages(first)
assert found == 0  # Nothing is cached yet.
new = manager.allocate_slots(first, 20 - found, found, pages)
assert new.get_page_ids() == ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
first.num_computed_tokens = 20  # The scheduler counts what it computed.
jaxkv.show(manager.state, title="The first request")

# %% [markdown]
# ## Decode
#
# `step` makes room for one more token of every running request, in one call. It
# also caches pages that became full, and gives back pages that fell behind a
# window. For each request it returns the new pages, or None where there was no
# room.


# %%
def decode(running, count):
  """Decodes tokens; the model's answer is always token 7 here."""
  for _ in range(count):
    for request in running:
      request.token_ids.append(7)
    answers = manager.step(running)
    assert None not in answers
    for request in running:
      request.num_computed_tokens += 1


decode([first], 6)
full, window = manager.get_page_ids("first")
print("full attention:", full)
print("window:", window)
assert len(full) == len(window) == 7  # 26 tokens
assert window[:4] == [0] * 4  # The null page stands for what was given back.

# %% [markdown]
# ## A jitted loop decodes
#
# A step in Python costs a round trip to the device. The scheduler can hand the
# cache over instead: `manager.state` is a value, and a `scan` decodes 16 tokens
# with the verbs of `jaxkv`. Then the scheduler appends the tokens to its
# request and takes the cache back. Pages that the loop filled are cached, and
# those that fell behind the window were given back.


# %%
@jax.jit
def decode_16(state):
  def step(state, token):
    running = state.num_pages[:, 0] > 0
    state, _ = jaxkv.recycle(state)
    state, _ = jaxkv.allocate(state, running.astype(jnp.int32))
    tokens = jnp.full((state.config.num_slots, 1), token, jnp.int32)
    state, _ = jaxkv.commit(state, tokens, running.astype(jnp.int32))
    return state, token  # A model would sample the next token here.

  return jax.lax.scan(step, state, jnp.arange(300, 316))


state, tokens = decode_16(manager.state)
first.token_ids += tokens.tolist()
first.num_computed_tokens += 16
assert manager.take(state) == []  # No request ended in the loop.
decode([first], 2)  # The scheduler goes on.
print("full attention:", manager.get_page_ids("first")[0])

# %% [markdown]
# ## Share a prefix
#
# A second request continues the first one's text. Its first eleven pages are
# found, also those that the loop filled. The window needs only the last two.

# %%
manager.free(first)
second = Request("second", [*first.token_ids, 8])
pages, found = manager.get_computed_pages(second)
assert found == 44
assert pages.get_page_ids()[1][:9] == [0] * 9
new = manager.allocate_slots(second, second.num_tokens - found, found, pages)
assert new is not None
jaxkv.show(manager.state, title="The second request")

# %% [markdown]
# ## Read and write pages
#
# The model reads and writes a request's pages through one `View` for each
# group. The null page stands where a window gave pages back. It also pads the
# page tables of a batch to one width.

# %%
full, window = manager.get_page_ids("second")
view = jaxkv.kv.View(
  page_table=jnp.asarray([full], jnp.int32),
  starts=jnp.asarray([found], jnp.int32),
  num_tokens=jnp.asarray([3], jnp.int32),
)
kv = jaxkv.kv.init(manager.config, num_layers=1, num_kv_heads=2, head_dim=8)
x = jnp.ones((1, 3, 2, 8), jnp.bfloat16)
kv = jaxkv.kv.write(kv, view, 0, x, x)
assert jaxkv.kv.attend(kv, view, 0, x).shape == x.shape
second.num_computed_tokens = second.num_tokens
second.status = "running"

# %% [markdown]
# ## Chunked prefill
#
# A long prompt can be computed in chunks, with one call of `allocate_slots` for
# each chunk. `full_sequence_must_fit=True` refuses a request whose whole prompt
# has no room, even if its first chunk has.

# %%
third = Request("third", list(range(100, 130)))
for begin in range(0, 30, 12):
  count = min(12, 30 - begin)
  new = manager.allocate_slots(third, count, full_sequence_must_fit=begin == 0)
  assert new is not None
  third.num_computed_tokens += count
third.status = "running"
large = Request("large", list(range(200, 260)))
assert manager.allocate_slots(large, 4, full_sequence_must_fit=True) is None

# %% [markdown]
# ## Preempt and resume
#
# When there is no room, a scheduler preempts a request: it frees the pages and
# computes them again later. The pages stay cached until somebody takes them, so
# a request that resumes soon finds most of them.

# %%
decode([second, third], 2)
manager.free(third)
third.status, third.num_computed_tokens = "preempted", 0
decode([second], 4)
pages, found = manager.get_computed_pages(third)
print(f"{found} of {third.num_tokens} tokens are found again")
assert found == 28
assert manager.allocate_slots(third, third.num_tokens - found, found, pages)
third.num_computed_tokens, third.status = third.num_tokens, "running"

# %% [markdown]
# ## Statistics and invariants
#
# `make_prefix_cache_stats` gives hits and queries since the last call. The
# state is a `CacheState`, so everything in `jaxkv` works on it.

# %%
print(manager.make_prefix_cache_stats())
print("usage", round(manager.usage, 2))
jaxkv.check(manager.state)
for request in (second, third):
  manager.free(request)
assert manager.num_free_pages == 39
assert manager.reset_prefix_cache()  # After new weights: nothing can hit.
assert manager.get_computed_pages(third)[1] == 0
manager.state

# %% [markdown]
# `help(jaxkv.host)` lists the few places where the manager differs from the
# reference systems. `tests/host/test_conformance.py` runs the manager beside a
# model of these systems. A loop that runs on the device alone does not need a
# manager: see the first notebook, and `jaxkv.rollout`.
