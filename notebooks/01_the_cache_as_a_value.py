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
# of a few tokens, and knows which page belongs to whom. Usually that knowledge
# lives in an object which changes under your hands. In `jaxkv` it is a
# **value**: a pytree of arrays. A verb takes one and returns another, and the
# one you had is still there.
#
# This notebook shows what that buys: sharing, forking, undoing and comparing
# futures, with a picture of the pages at each step. It holds no keys and
# values, only the knowledge of where they would be.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch
from matplotlib.patches import Rectangle

import jaxkv

config = jaxkv.CacheConfig(
  num_pages=33, page_size=4, num_slots=4, pages_per_slot=8
)
empty = jaxkv.init(config)
print(len(jax.tree.leaves(empty)), "arrays,", config.num_pages, "pages")

# %% [markdown]
# ## A picture of the pages
#
# Each square is a page (page 0 is never handed out and not shown). A colour is
# a slot, that is a running sequence; a page that several sequences share shows
# all their colours. A dot marks a page that is *cached*: it is full, and can be
# found again by its tokens. Below stand the free pages in the order in which
# they will be taken, upper left first.

# %%
SLOTS = ("#4878d0", "#ee854a", "#6acc64", "#956cb4")
CACHED, FREE, INK = "#f7dc8b", "#eef0f3", "#2b2f36"


def owners(state):
  """The slots whose page table names each page."""
  found = {}
  for slot, row in enumerate(np.asarray(state.page_table[0])):
    for page in row[: int(state.num_pages[0, slot])].tolist():
      found.setdefault(page, []).append(slot)
  return found


def square(axes, x, y, size, colours, label, dot):
  for i, colour in enumerate(colours):
    width = size / len(colours)
    axes.add_patch(
      Rectangle((x + i * width, y), width, size, color=colour, lw=0)
    )
  ink = "white" if colours[0] in SLOTS else INK
  axes.add_patch(Rectangle((x, y), size, size, fill=False, ec="white", lw=1))
  axes.text(
    x + size / 2, y + size / 2, label, color=ink, size=4 + 5 * size,
    ha="center", va="center",
  )  # fmt: skip
  if dot:
    axes.plot(x + 0.86 * size, y + 0.16 * size, "o", ms=3.4 * size, color=ink)


def draw(state, title, axes):
  held, cached = owners(state), set(jaxkv.cached_pages(state))

  def colours(page):
    unused = [CACHED if page in cached else FREE]
    return [SLOTS[slot] for slot in held.get(page, [])] or unused

  for page in range(1, state.config.num_pages):
    row, column = divmod(page - 1, 8)
    square(axes, column, row, 0.92, colours(page), page, page in cached)
  axes.text(0, 4.55, "free, next one first", size=8, color=INK)
  for place, page in enumerate(jaxkv.free_pages(state)):
    row, column = divmod(place, 16)
    y = 4.7 + row / 2
    square(axes, column / 2, y, 0.44, colours(page), page, False)
  axes.set(xlim=(-0.1, 8.1), ylim=(5.8, -0.15), aspect="equal")
  axes.set_title(title, size=11, color=INK, loc="left")
  axes.axis("off")


def show(**states):
  """Draws caches side by side, titled by their names."""
  figure, row = plt.subplots(1, len(states), figsize=(4.6 * len(states), 4))
  for axes, (name, state) in zip(
    np.atleast_1d(row), states.items(), strict=True
  ):
    draw(state, name.replace("_", " "), axes)
  keys = [Patch(color=c, label=f"slot {i}") for i, c in enumerate(SLOTS)]
  keys += [Patch(color=CACHED, label="cached, unused")]
  keys += [Patch(color=FREE, label="free")]
  figure.legend(
    handles=keys, loc="lower center", ncols=6, frameon=False, fontsize=8,
    handlelength=1, handleheight=1,
  )  # fmt: skip
  figure.subplots_adjust(0.01, 0.1, 0.99, 0.93, wspace=0.06)
  plt.show()


# %% [markdown]
# ## Allocate and commit
#
# A sequence gets room with `allocate`. Once its tokens are final, `commit` says
# so, and every page they fill becomes findable. Alice's prompt is a preamble
# that everybody will use, and a question: 14 tokens, so three full pages and
# half of a fourth.

# %%
PREAMBLE = [100, 101, 102, 103, 104, 105, 106, 107]
alice = [*PREAMBLE, 1, 2, 3, 4, 5, 6]


def write(state, rows):
  """Appends tokens to slots, given as {slot: tokens}."""
  tokens = np.zeros((config.num_slots, 32), np.int32)
  counts = np.zeros(config.num_slots, np.int32)
  for slot, row in rows.items():
    tokens[slot, : len(row)], counts[slot] = row, len(row)
  state, allocated = jaxkv.allocate(state, jnp.asarray(counts))
  state, committed = jaxkv.commit(
    state, jnp.asarray(tokens), jnp.asarray(counts)
  )
  assert allocated.ok.all() and committed.ok.all()
  return state


with_alice = write(empty, {0: alice})
show(empty=empty, with_alice=with_alice)

# %% [markdown]
# `empty` is in the picture because it still exists. Nothing happened to it.

# %%
assert int(empty.length[0]) == 0 and int(with_alice.length[0]) == 14
assert len(jaxkv.free_pages(empty)) == 32
assert jaxkv.cached_pages(with_alice) == [1, 2, 3]

# %% [markdown]
# ## Share a prefix
#
# Bob's prompt has the same preamble. `admit` finds its two pages, attaches
# them and allocates the rest. They are the same pages: two colours. Of Bob's 15
# tokens only 7 are left to be computed.

# %%
bob = [*PREAMBLE, 11, 12, 13, 14, 15, 16, 17]


def enter(state, slot, prompt):
  """Puts a prompt into an empty slot; (state, tokens found)."""
  padded = jnp.asarray([prompt + [0] * (32 - len(prompt))], jnp.int32)
  place = jnp.asarray([slot], jnp.int32)
  length = jnp.asarray([len(prompt)], jnp.int32)
  state, admitted = jaxkv.admit(state, place, padded, length)
  assert admitted.ok.all()
  found = int(admitted.num_cached[0])
  return write(state, {slot: prompt[found:]}), found


with_bob, found = enter(with_alice, 1, bob)
assert found == len(PREAMBLE)
assert with_bob.page_table[0, 0, :2].tolist() == [1, 2]
assert with_bob.page_table[0, 1, :2].tolist() == [1, 2]
show(with_alice=with_alice, with_bob=with_bob)

# %% [markdown]
# ## Fork
#
# Two more answers to Bob's question: slots 2 and 3 go on from slot 1. Full
# pages are shared. The last page is only partly full and all three will write
# to it, so each fork gets a fresh one, and `copies` says which contents to
# copy (`jaxkv.kv.copy` does it where there are contents).

# %%
one_one, two_three = (
  jnp.asarray([1, 1], jnp.int32),
  jnp.asarray([2, 3], jnp.int32),
)
forked, out = jaxkv.fork(with_bob, one_one, two_three)
print("copy pages", out.copies.src.tolist(), "to", out.copies.dst.tolist())
assert forked.length.tolist() == [14, 15, 15, 15]
assert forked.pool.ref_count[1] == 4
show(with_bob=with_bob, forked=forked)

# %% [markdown]
# ## Roll back: keep the old value
#
# Let all four sequences run for nine tokens. Then suppose it was a mistake: the
# wrong temperature, a stop string, an exception. There is no undo to call and
# no log to replay. The old value is the undo.

# %%
later = forked
for t in range(9):
  later = write(later, {slot: [50 + 10 * slot + t] for slot in range(4)})
show(nine_tokens_later=later, rolled_back=forked)

# %%
assert later.length.tolist() == [23, 24, 24, 24]
assert forked.length.tolist() == [14, 15, 15, 15]
again = forked
for t in range(9):
  again = write(again, {slot: [50 + 10 * slot + t] for slot in range(4)})
same = jax.tree.map(lambda a, b: bool((a == b).all()), later, again)
assert all(jax.tree.leaves(same))

# %% [markdown]
# From the same value the same verbs lead to the same value, to the last page
# number. The keys and values themselves are in another pytree, which a loop
# overwrites: keep that of the same time too, or `truncate`.
#
# ## Truncate
#
# Rolling back *one* sequence while the others go on is a verb: `truncate`.
# Here slot 1 drafted six tokens and only two were accepted. The page past the
# end goes back, and the last page, full before, is open again. Nobody else
# moves.

# %%
drafted = write(forked, {1: [61, 62, 63, 64, 65, 66]})
lengths = drafted.length.at[1].set(17)
accepted, out = jaxkv.truncate(drafted, lengths)
assert out.ok.all() and accepted.length.tolist() == [14, 17, 15, 15]
assert drafted.num_pages[0].tolist() == [4, 6, 4, 4]
assert accepted.num_pages[0].tolist() == [4, 5, 4, 4]
show(drafted=drafted, accepted=accepted)

# %% [markdown]
# ## Free, and find again
#
# `free` gives references back. Pages that nobody holds go to the free queue,
# and those with a key stay cached (yellow) until they are taken from it. Pages
# without a key are useless, so they stand in front. The last page of a sequence
# comes before the first: a prefix outlives its tail.

# %%
done, out = jaxkv.free(forked, jnp.asarray([0, 1, 2, 3], jnp.int32))
assert out.ok.all() and len(jaxkv.free_pages(done)) == 32
back, found = enter(done, 2, alice)
assert found == 12  # Three full pages; the rest is computed again.
show(all_done=done, alice_is_back=back)

# %% [markdown]
# ## Eviction
#
# Strangers come. The first three take eight pages each from the front of the
# queue, where pages stand that hold nothing. Then these are used up: the fourth
# takes six pages, two of them cached, and two more as it goes on. Watch what is
# left of Alice.


# %%
def found_of(state, prompt):
  padded = jnp.asarray([prompt + [0] * (32 - len(prompt))], jnp.int32)
  length = jnp.asarray([len(prompt)], jnp.int32)
  return int(jaxkv.match(state, padded, length).num_cached[0])


crowded, left = done, [found_of(done, alice)]
for stranger, size in enumerate((32, 32, 32, 24)):
  prompt = [1000 * (stranger + 1) + i for i in range(size)]
  crowded, _ = enter(crowded, stranger, prompt)
  left.append(found_of(crowded, alice))
four_strangers = crowded
for t in range(2):
  crowded = write(crowded, {3: [9000 + 4 * t + i for i in range(4)]})
  left.append(found_of(crowded, alice))
print("tokens of Alice that are found:", left)
assert left == [12, 12, 12, 12, 8, 4, 0]  # Her tail was evicted first.
assert int(jaxkv.stats(crowded).evicted) == 4
assert found_of(done, alice) == 12  # `done` still knows.
show(all_done=done, four_strangers=four_strangers)

# %% [markdown]
# ## Many caches at once
#
# A value can be stacked, and what works on one works on a stack under `vmap`.
# Three futures of one present: which of these prompts should be admitted next?
# All three are tried at once; nothing is committed to.

# %%
candidates = [alice, [7] * 30, bob]
padded = jnp.asarray([[p + [0] * (32 - len(p))] for p in candidates], jnp.int32)
lengths = jnp.asarray([[len(p)] for p in candidates], jnp.int32)
slots = jnp.zeros((3, 1), jnp.int32)

present = jax.tree.map(lambda x: jnp.stack([x] * 3), done)
futures, out = jax.vmap(jaxkv.admit)(present, slots, padded, lengths)
usage = jax.vmap(jaxkv.usage)(futures)
print("found", out.num_cached[:, 0].tolist(), "usage", usage.tolist())
assert out.num_cached[:, 0].tolist() == [12, 0, 12]

chosen = jax.tree.map(lambda x: x[2], futures)
jaxkv.check(chosen)
show(future_0=jax.tree.map(lambda x: x[0], futures), future_2=chosen)

# %% [markdown]
# ## The whole past
#
# And because a state can be the carry of a `scan`, it can be its output too.
# This loop is one compiled program that decodes twelve tokens in four slots and
# hands back every moment, any of which can be gone on from.


# %%
@jax.jit
def decode(state):
  def step(state, t):
    ones = jnp.ones((config.num_slots,), jnp.int32)
    state, _ = jaxkv.allocate(state, ones)
    tokens = 200 + 20 * jnp.arange(config.num_slots, dtype=jnp.int32) + t
    state, _ = jaxkv.commit(state, tokens[:, None], ones)
    return state, state

  return jax.lax.scan(step, state, jnp.arange(12, dtype=jnp.int32))


last, moments = decode(forked)
third = jax.tree.map(lambda x: x[2], moments)
assert third.length.tolist() == [17, 18, 18, 18]
assert last.length.tolist() == [26, 27, 27, 27]
for state in (third, last):
  jaxkv.check(state)
show(third_moment=third, last_moment=last)

# %% [markdown]
# `jaxkv.check` raises when a state breaks one of its laws; all that we kept are
# sound. To make one of them current again, give it a name.
#
# In a real loop the state is donated, so that it is updated in place and no
# memory is spent on a past that nobody asked for. Whether to keep an old value
# is your choice, and it is made outside of the cache.
