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
# # The cache is a value
#
# A paged key-value cache keeps the keys and values of every sequence in pages
# of a few tokens, and it knows which page belongs to which sequence. In most
# engines that knowledge lives in an object that changes in place. In `jaxkv` it
# is a **value**: a pytree of arrays. A verb takes a state and returns another
# one. The old state stays as it was.
#
# This notebook shows what follows from that: sharing, forking, rolling back and
# comparing futures, with a picture of the pages at each step. Until its last
# section it computes no keys and values, only in which pages they would be.

# %%
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

import jaxkv

config = jaxkv.CacheConfig(
  num_pages=24, page_size=4, num_slots=4, pages_per_slot=8
)
empty = jaxkv.init(config)
print(len(jax.tree.leaves(empty)), "arrays,", config.num_pages, "pages")
empty

# %% [markdown]
# ## Allocate and commit
#
# `allocate` takes pages for new tokens. `commit` declares tokens final, and
# every page that they fill can be found from then on. Alice's prompt is a
# preamble that everybody will use, and a question: 14 tokens, so three full
# pages and half of a fourth.

# %%
PREAMBLE = [100, 101, 102, 103, 104, 105, 106, 107]
alice = [*PREAMBLE, 1, 2, 3, 4, 5, 6]


def padded(rows):
  """Tokens of some slots, given as {slot: tokens}, as (tokens, num_tokens)."""
  tokens, num_tokens = np.zeros((4, 32), np.int32), np.zeros(4, np.int32)
  for slot, row in rows.items():
    tokens[slot, : len(row)], num_tokens[slot] = row, len(row)
  return tokens, num_tokens


def write(state, rows):
  """Appends tokens to slots, given as {slot: tokens}."""
  tokens, num_tokens = padded(rows)
  state, allocated = jaxkv.allocate(state, num_tokens)
  state, committed = jaxkv.commit(state, tokens, num_tokens)
  assert allocated.ok.all() and committed.ok.all()
  return state


with_alice = write(empty, {0: alice})
jaxkv.show(with_alice, title="Alice")

# %% [markdown]
# Each cell is a page. The slots show the pages of each sequence in order; a bar
# shows how full the last page is. The pool shows the same pages by number, and
# the free queue shows the order in which free pages will be taken. A white dot
# marks a page that is cached: it is full, and a prompt with its tokens hits it.
#
# `empty` still exists. Nothing happened to it.

# %%
assert int(empty.length[0]) == 0 and int(with_alice.length[0]) == 14
assert len(jaxkv.free_pages(empty)) == 23
assert jaxkv.cached_pages(with_alice) == [1, 2, 3]
print(with_alice)

# %% [markdown]
# ## Share a prefix
#
# Bob's prompt has the same preamble. `admit` finds its two pages, attaches
# them and allocates the rest. The two slots now name the same pages, which are
# drawn as shared. Only 7 of Bob's 15 tokens are left to compute.

# %%
bob = [*PREAMBLE, 11, 12, 13, 14, 15, 16, 17]


def enter(state, slot, prompt):
  """Puts a prompt into an empty slot; (state, tokens found)."""
  tokens, num_tokens = padded({0: prompt})
  state, admitted = jaxkv.admit(state, [slot], tokens[:1], num_tokens[:1])
  assert admitted.ok.all()
  found = int(admitted.num_cached_tokens[0])
  return write(state, {slot: prompt[found:]}), found


with_bob, found = enter(with_alice, 1, bob)
assert found == len(PREAMBLE)
assert with_bob.page_table[0, 0, :2].tolist() == [1, 2]
assert with_bob.page_table[1, 0, :2].tolist() == [1, 2]
jaxkv.show(with_bob, title="Alice and Bob")

# %% [markdown]
# ## Fork
#
# Slots 2 and 3 continue Bob's sequence in two more ways. Full pages are shared.
# The last page is only partly full, and all three sequences will write to it.
# So each fork gets a fresh page, and `copies` says which page to copy to it.
# (In a model, `jaxkv.kv.copy` then copies the keys and values.)

# %%
forked, out = jaxkv.fork(with_bob, [1, 1], [2, 3])
print("copy pages", out.copies.src.tolist(), "to", out.copies.dst.tolist())
assert forked.length.tolist() == [14, 15, 15, 15]
assert forked.pool.ref_count[1] == 4
jaxkv.show(forked, title="Two forks of Bob's sequence")

# %% [markdown]
# ## Roll back: keep the old value
#
# All four sequences run for nine tokens. Then suppose that this was a mistake:
# the wrong temperature, a stop string, an exception. There is no undo to call
# and no log to replay. The old value is the undo.

# %%
later = forked
for t in range(9):
  later = write(later, {slot: [50 + 10 * slot + t] for slot in range(4)})
jaxkv.show(later, title="Nine tokens later")

# %%
assert later.length.tolist() == [23, 24, 24, 24]
assert forked.length.tolist() == [14, 15, 15, 15]
again = forked
for t in range(9):
  again = write(again, {slot: [50 + 10 * slot + t] for slot in range(4)})
chex.assert_trees_all_equal(later, again)

# %% [markdown]
# The same verbs on the same value give the same value, down to the last page
# number. The keys and values themselves are in another pytree, which a loop
# overwrites. To roll back both, keep both, or use `truncate`.
#
# ## Truncate
#
# `truncate` rolls back single sequences while the others go on. Here slot 1
# drafted six tokens, and two of them were accepted. The page past the end goes
# back to the pool. The last page, which was full, takes tokens again. The other
# slots do not change.

# %%
drafted = write(forked, {1: [61, 62, 63, 64, 65, 66]})
accepted, out = jaxkv.truncate(drafted, drafted.length.at[1].set(17))
assert out.ok.all() and accepted.length.tolist() == [14, 17, 15, 15]
assert drafted.num_pages[:, 0].tolist() == [4, 6, 4, 4]
assert accepted.num_pages[:, 0].tolist() == [4, 5, 4, 4]
jaxkv.show(accepted, title="Two of six drafted tokens accepted")

# %% [markdown]
# ## Free, and find again
#
# `free` gives references back. Pages that nobody holds go to the free queue.
# Pages with a key stay cached (yellow) until they are taken. Pages without a
# key cannot be found, so they go to the front of the queue and are taken first.
# The last page of a sequence comes before the first one: a prefix outlives its
# tail.

# %%
done, out = jaxkv.free(forked)
assert out.ok.all() and len(jaxkv.free_pages(done)) == 23
jaxkv.show(done, title="All sequences freed")

# %%
back, found = enter(done, 2, alice)
assert found == 12  # Three full pages; the rest is computed again.
jaxkv.show(back, title="Alice is back")

# %% [markdown]
# ## Eviction
#
# New prompts come in, with nothing in common. The first two take 15 pages from
# the front of the queue, where pages without a key stand. The third takes six
# pages, two of them cached, and two more as it goes on. Alice's prefix shrinks
# from its end.


# %%
def found_of(state, prompt):
  tokens, num_tokens = padded({0: prompt})
  return int(
    jaxkv.match(state, tokens[:1], num_tokens[:1]).num_cached_tokens[0]
  )


crowded, left = done, [found_of(done, alice)]
for slot, size in enumerate((32, 28, 24)):
  crowded, _ = enter(
    crowded, slot, [1000 * (slot + 1) + i for i in range(size)]
  )
  left.append(found_of(crowded, alice))
three_prompts = crowded
for t in range(2):
  crowded = write(crowded, {2: [9000 + 4 * t + i for i in range(4)]})
  left.append(found_of(crowded, alice))
print("tokens of Alice that are found:", left)
assert left == [12, 12, 12, 8, 4, 0]
assert int(jaxkv.stats(crowded).evicted_pages) == 4
assert found_of(done, alice) == 12  # `done` still finds all of them.
jaxkv.show(three_prompts, title="Three other prompts")

# %% [markdown]
# ## Many caches at once
#
# Values can be stacked, and what works on one cache works on a stack under
# `vmap`. Here are three futures of one present: which of these prompts should
# be admitted next? All three are tried at once, and none is committed to.

# %%
tokens, lengths = padded({0: alice, 1: [7] * 30, 2: bob})
present = jax.tree.map(lambda x: jnp.stack([x] * 3), done)
slots = np.zeros((3, 1), np.int32)
futures, out = jax.vmap(jaxkv.admit)(
  present, slots, tokens[:3, None], lengths[:3, None]
)
usage = jax.vmap(jaxkv.usage)(futures)
found = out.num_cached_tokens[:, 0].tolist()
print("found", found, "usage", usage.tolist())
assert found == [12, 0, 12]

chosen = jax.tree.map(lambda x: x[2], futures)
jaxkv.check(chosen)
jaxkv.show(chosen, title="The third future")

# %% [markdown]
# ## The whole past
#
# A state can be the carry of a `scan`, so it can be an output of the `scan`
# too. This loop is one compiled program. It decodes twelve tokens in four slots
# and returns the state after each step. Each of these states can be continued.
#
# `chex.assert_max_traces` raises if the function is compiled a second time.
# Other lengths, prompts and pages are only other values in arrays of the same
# shapes, so one program serves them all.


# %%
@jax.jit
@chex.assert_max_traces(n=1)
def decode(state):
  def step(state, t):
    ones = jnp.ones((config.num_slots,), jnp.int32)
    state, _ = jaxkv.allocate(state, ones)
    tokens = 200 + 20 * jnp.arange(config.num_slots, dtype=jnp.int32) + t
    state, _ = jaxkv.commit(state, tokens[:, None], ones)
    return state, state

  return jax.lax.scan(step, state, jnp.arange(12, dtype=jnp.int32))


last, moments = decode(forked)
other_last, _ = decode(with_alice)
third = jax.tree.map(lambda x: x[2], moments)
assert third.length.tolist() == [17, 18, 18, 18]
assert last.length.tolist() == [26, 27, 27, 27]
assert other_last.length.tolist() == [26, 12, 12, 12]
for state in (third, last, other_last):
  jaxkv.check(state)
jaxkv.show(third, title="The third moment")

# %% [markdown]
# `jaxkv.check` raises if a state breaks an invariant. It accepts all states
# above, so each of them can be passed to the next verb.
#
# A real loop donates its state, so that the arrays are updated in place and no
# memory is spent on the past. Whether to keep an old value is the caller's
# choice.
#
# ## A picture for the README
#
# The picture in the README is the one below, written with
# `pathlib.Path("pages.svg").write_text(picture.svg)`. Slots 0 and 1 are forks of one sequence and
# share its two full pages. A sequence that has ended left three cached pages at
# the end of the free queue.

# %%
state = write(empty, {0: [*PREAMBLE, 1], 1: list(range(13))})
state, _ = jaxkv.free(state, slots=[1])
state, _ = jaxkv.fork(state, [0], [1])
state = write(state, {0: [2, 3], 1: [4, 5, 6, 7, 8], 2: list(range(50, 57))})
assert jaxkv.cached_pages(state) == [1, 2, 4, 5, 6, 7, 9]
picture = jaxkv.show(state)
picture
#
# ## Several tokens at once
#
# A loop need not allocate and commit for every token. Here one `allocate` makes
# room for four tokens, four steps of a model write and attend, and one `commit`
# takes the four tokens. Only the positions of the view change between the four
# steps. The cache's work per token falls to about a quarter, and the tokens stay
# the same. (`RolloutConfig.decode_steps` does this in `jaxkv.rollout`.)

# %%
kv = jaxkv.kv.init(config, num_layers=1, num_kv_heads=2, head_dim=8)
embed = jax.random.normal(jax.random.key(0), (50, 2, 8), kv.dtype)
slots = config.num_slots


@functools.partial(jax.jit, static_argnums=3)
def generate(state, kv, token, steps):
  def once(carry, _):
    state, kv, token = carry
    state, _ = jaxkv.allocate(state, [steps] * slots)
    view = jaxkv.view(state, num_tokens=[1] * slots)

    def step(carry, i):
      kv, token = carry
      here = dataclasses.replace(view, starts=view.starts + i)
      x = embed[token][:, None]
      kv = jaxkv.kv.write(kv, here, 0, x, x)
      x = jaxkv.kv.attend(kv, here, 0, x)
      return (kv, jnp.einsum("bthd,vhd->bv", x, embed).argmax(-1)), token

    offsets = jnp.arange(steps, dtype=jnp.int32)
    (kv, token), tokens = jax.lax.scan(step, (kv, token), offsets)
    state, _ = jaxkv.commit(state, tokens.T, [steps] * slots)
    return (state, kv, token), tokens

  carry, tokens = jax.lax.scan(once, (state, kv, token), length=12 // steps)
  return carry[0], tokens.reshape(12, slots)


begin = jnp.arange(slots, dtype=jnp.int32)
one, tokens = generate(jaxkv.init(config), kv, begin, 1)
four, same_tokens = generate(jaxkv.init(config), kv, begin, 4)
chex.assert_trees_all_equal(tokens, same_tokens)
assert one.length.tolist() == four.length.tolist() == [12] * slots
jaxkv.check(four)
print(tokens.T)
