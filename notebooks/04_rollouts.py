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
# # Rollouts
#
# `jaxkv.rollout` generates answers for a queue of prompts on the device. One
# `while_loop` admits sequences, computes prompts, decodes, samples, preempts and
# refills slots. The host does not take part until the loop ends.
#
# This notebook runs one queue in several ways and looks at what each slot did.
# The pictures come from the state itself: `RolloutConfig.timeline` keeps the
# last steps.

# %%
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import rollout

# %% [markdown]
# ## A model
#
# A model is a function of a batch of packed tokens: one call has the tokens of
# all decoding sequences and of some prompts. It stores their keys and values
# through `batch.views`, attends, and returns the logits of `batch.columns` and
# the new memory. `functools.partial(jaxkv.models.forward, config=...)` is such a
# model, and `help(jaxkv.kv.LayerMemory)` shows one in plain JAX.
#
# Here a table of next tokens is enough. A token is a number and the model counts
# down from it: 20 is followed by 20, 19 or 17, on average by 19. The stop token
# is 0. So the last token of a prompt is the expected length of its answer, and
# the samples of a prompt differ in length.

# %%
number = np.arange(64)
chances = np.full((64, 64), 1e-9)
for step, chance in ((0, 0.4), (1, 0.4), (3, 0.2)):
  chances[number, np.maximum(number - step, 0)] += chance
table = jnp.asarray(np.log(chances), jnp.float32)


def model(table, batch, kv):
  del kv  # A table needs no keys and values, so it returns no memory.
  return table[batch.tokens[0].at[batch.columns].get(mode="clip")], None


# %% [markdown]
# ## A queue of prompts
#
# There are 12 prompts with 4 samples each, 48 sequences in all. Sequence
# `4 * p + g` is sample `g` of prompt `p`. Each prompt begins with one of three
# preambles of 48 tokens, in turn. The prompt with the longest answers is the
# last one.

# %%
rng = np.random.default_rng(0)
preambles = rng.integers(1, 64, (3, 48))
expected = np.array([8, 16, 44, 6, 32, 24, 10, 20, 4, 14, 12, 60])
rows = [
  [*preambles[p % 3], *rng.integers(1, 64, 4 + p % 5), length]
  for p, length in enumerate(expected)
]
lengths = np.array([len(row) for row in rows])
prompts = np.array([row + [0] * (lengths.max() - len(row)) for row in rows])
print("tokens of the prompts:", lengths)

# %% [markdown]
# ## Run it
#
# A cache of 8 slots serves the queue. `rollout.Requests` holds the prompts and
# their settings, `rollout.init` makes the state and `rollout.generate` runs it. It
# returns when all sequences have ended.

# %%
config = rollout.RolloutConfig(
  num_samples=4,
  max_new_tokens=96,
  stop_token=0,
  prefill_chunk=32,
  timeline=512,
)


def begin(num_pages, priority=0):
  """The rollout before its first step."""
  sizes = jaxkv.CacheConfig(
    num_pages=num_pages, page_size=8, num_slots=8, pages_per_slot=20
  )
  return rollout.init(
    jaxkv.init(sizes),
    jaxkv.kv.init(sizes, num_layers=1, num_kv_heads=1, head_dim=1),
    rollout.Requests(
      prompts,
      lengths,
      sampling=rollout.Sampling(temperature=1.0),
      priority=np.broadcast_to(priority, (48,)),
    ),
    jax.random.key(1),
    config,
  )


# A training loop would also donate the state: donate_argnums=1.
generate = jax.jit(functools.partial(rollout.generate, model=model))
good = generate(table, begin(128))
assert rollout.is_done(good)
answers = good.queue.length - good.queue.prompt_length
print(answers.reshape(12, 4))

# %% [markdown]
# ## Read the picture
#
# Each row is a slot, and steps go from left to right. A number is a sequence.
#
# - **Prefill**, orange. Sequence 0 computes its prompt in two steps.
# - **Wait**, grey. Sequences 1 to 3 are samples of the same prompt. They wait for
#   sequence 0 and then fork from it: they share its pages. Sequences 4 to 7 begin
#   with another preamble.
# - **Decode**, blue. A slot that decodes draws a token in every step, also while
#   another slot computes a prompt.
# - **Idle**, white. Here only the end is white: no sequence waits any more.
#
# Most later prompts take one orange step. Their preamble is cached, and only the
# last tokens are computed.

# %%
rollout.timeline(good)

# %% [markdown]
# ## Count
#
# `state.counters` says the same in numbers.
#
# | counter | what it counts | what it tells |
# |---|---|---|
# | `generated` | tokens drawn | the work that was asked for |
# | `prefilled` | prompt tokens computed | how much of the prompts was shared |
# | `recomputed` | tokens computed again | the price of preemption |
# | `forked` | samples that shared a prefill | samples that entered together |
# | `preempted` | times a sequence lost its slot | a pool that is too small |
# | `rows` | columns the model was called with | what the model costs |
# | `calls` | steps without and with a chunk of prompts | how often prompts ride |
#
# The last token of a prompt is not counted as prompt work, because its logits
# give the first token of the answer. Of the other 2,580 prompt tokens, 306 are
# computed. A step has 8 columns, and 32 more if it computes a chunk of prompts.


# %%
def show(**states):
  """A line for each rollout."""
  names = ("steps", "generated", "prefilled", "recomputed", "forked")
  names += ("preempted", "rows", "calls", "peak_pages")
  print(f"{'':14}" + "".join(f"{name:>11}" for name in names))
  for title, state in states.items():
    counts = (np.asarray(getattr(state.counters, name)) for name in names)
    print(f"{title:14}" + "".join(f"{count!s:>11}" for count in counts))


show(good=good)
counters = good.counters
assert int(counters.generated) == int(answers.sum())
assert 4 * int((lengths - 1).sum()) == 2580
assert int(counters.prefilled) == 306
assert int(counters.rows) == np.asarray(counters.calls) @ np.array([8, 40])

# %% [markdown]
# The timeline has the same facts as data. A span is a number of steps in which a
# slot does the same work for one sequence.

# %%
spans = list(rollout.timeline(good).spans())
for span in spans[:3]:
  print(span)
assert sum(span.tokens for span in spans) == sum(
  int(count)
  for count in (counters.generated, counters.prefilled, counters.recomputed)
)
waited = sum(s.stop - s.start for s in spans if s.kind == "wait")
print(
  f"{waited} of {8 * int(counters.steps)} steps of slots were spent waiting"
)

# %% [markdown]
# ## Too few pages
#
# The first rollout used 40 pages at most. This one has 25, without the null
# page. When no page is free, the sequence with the fewest tokens is preempted
# (red). It waits in the queue, resumes when there is room, and computes again
# what was evicted in the meantime.
#
# The white gaps are slots without a sequence. A sequence enters only if enough
# pages stay free for the running ones, so it can wait although a slot is empty.
# The answers are the same, token by token. A schedule never changes an answer.

# %%
small = generate(table, begin(26))
assert (small.queue.tokens == good.queue.tokens).all()
assert int(small.counters.preempted) > 0 == int(good.counters.preempted)
show(good=good, small_pool=small)
rollout.timeline(small)

# %% [markdown]
# ## In the order of arrival
#
# Preambles alternate in the queue. By default sequences with a cached prefix
# enter first (`RolloutConfig.window`, `max_overtaken`), so a preamble is used
# while it is cached. Here each sequence has a priority of its own, and sequences
# enter in the order of priority. Only if pages are scarce, a sequence that needs
# fewer pages may overtake, up to `max_overtaken` times. In the small pool,
# preambles are now evicted before they are needed again: there is more orange,
# more prompt tokens are computed, and fewer tokens are hit.

# %%
arrival = generate(table, begin(26, priority=np.arange(48)))
assert (arrival.queue.tokens == good.queue.tokens).all()
assert int(arrival.counters.prefilled) > 1.3 * int(small.counters.prefilled)
show(small_pool=small, by_arrival=arrival)
for title, state in (("cached first", small), ("by arrival", arrival)):
  stats = jaxkv.stats(state.memory.cache)
  print(f"{title}: {stats.hit_tokens / stats.queried_tokens:.0%} hit")
rollout.timeline(arrival)

# %% [markdown]
# ## The longest first
#
# In the first picture four long sequences run alone at the end, and half of the
# slots are empty. If lengths can be guessed, the longest should begin first.
# Lower priorities enter earlier, so the priority is the negated expected length.
# All slots are busy almost to the end, and there are fewer steps.

# %%
longest = generate(table, begin(128, priority=-np.repeat(expected, 4)))
assert (longest.queue.tokens == good.queue.tokens).all()
assert int(longest.counters.steps) < 0.9 * int(good.counters.steps)
show(good=good, longest_first=longest)
rollout.timeline(longest)

# %% [markdown]
# ## Pause
#
# With `until` the loop stops early: after some steps, or when some sequences
# have ended. The state is a value of three parts: `queue` has the sequences and
# their answers so far, `slots` says which of them run where, and `memory` is the
# cache and its K/V pages. It can be kept, looked at and resumed, and the end is
# the same as without a pause.

# %%
paused = generate(table, begin(128), rollout.Until(steps=60))
status = paused.queue.status
for kind in rollout.SequenceStatus:
  print(kind.name, int((status == kind).sum()))
jaxkv.check(paused.memory.cache)
rollout.timeline(paused)

# %%
end = generate(table, paused)
chex.assert_trees_all_equal(end.queue.tokens, good.queue.tokens)
chex.assert_trees_all_equal(end.counters, good.counters)

# %% [markdown]
# The paused state is still valid. The rollout can continue from it in another
# way, here with greedy sampling. Sequences that had ended keep their tokens.

# %%
sampling = rollout.Sampling(temperature=jnp.zeros(48))
queue = dataclasses.replace(paused.queue, sampling=sampling)
greedy = generate(table, dataclasses.replace(paused, queue=queue))
done = status == rollout.SequenceStatus.DONE
same = (greedy.queue.tokens == good.queue.tokens).all(axis=1)
assert same[done].all() and not same.all()
show(good=good, greedy=greedy)

# %% [markdown]
# ## An engine
#
# An `Engine` holds the weights, a state and the compiled programs. It takes lists
# of prompts of any length, and any number of them: they enter as rows of the
# queue become free. The loop compiles in the first call. Pages stay cached
# between calls, so the second call finds most of each prompt.

# %%
engine = rollout.Engine(
  table,
  model,
  jaxkv.CacheConfig(num_pages=256, page_size=8, num_slots=8, pages_per_slot=20),
  config,
  init_kv=functools.partial(
    jaxkv.kv.init, num_layers=1, num_kv_heads=1, head_dim=1
  ),
)
sampling = rollout.Sampling(temperature=1.0)
computed = [0]
for _ in range(2):
  out = engine.generate(rows, sampling=sampling)
  computed.append(int(engine.counters.prefilled))
  print(
    f"{out.results.mask.sum()} tokens drawn, "
    f"{computed[-1] - computed[-2]} prompt tokens computed"
  )
assert computed[2] - computed[1] < computed[1]

# %% [markdown]
# `stream` yields the samples of each prompt when they end, and with `tokens=True`
# also the new tokens of running sequences. Short answers come first.

# %%
for ended in engine.stream(rows[:4], sampling=sampling):
  print(ended.id, ended.results.lengths - ended.results.prompt_lengths)
engine.close()

# %% [markdown]
# `help(rollout.RolloutConfig)` explains all options, `help(rollout.Counters)` all
# counters. `python -m jaxkv rollout` runs the loop with a small language model
# and compares log-probabilities with those of a forward pass without a cache.
