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
# # Agents and tools
#
# An agent writes a call of a tool and stops. The tool answers, and the agent
# goes on. In between nothing should be lost: the keys and values of the
# conversation are in pages, and `rollout.extend` continues a sequence from them.
#
# Here the tool is a pocket calculator, in the process that runs the loop. An
# agent presses keys and `=`, reads the result, and presses again, four times.
# This notebook runs sixteen such conversations in four slots. It shows which
# tokens are computed, and which are part of a loss.

# %%
import dataclasses
import functools
import itertools
import json
import operator
import re

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML
from matplotlib.colors import ListedColormap

import jaxkv
from jaxkv import guides
from jaxkv import models
from jaxkv import rollout

# %% [markdown]
# ## A model
#
# A token is a character. The model is a small decoder with random weights: it
# has learned nothing, so it presses any key. The rest of the notebook holds for
# every model, because the loop does not depend on what tokens mean.

# %%
CHARACTERS = "0123456789+-*= :.abcdefghijklmnopqrstuvwxyz" + '{}",'
EQUALS = CHARACTERS.index("=")
decoder = models.llama(
  vocab_size=len(CHARACTERS),
  num_layers=2,
  embed_dim=32,
  num_heads=2,
  num_kv_heads=1,
  head_dim=16,
  mlp_dim=64,
)
params = models.init_params(jax.random.key(0), decoder)
model = functools.partial(models.forward, config=decoder)


def encode(texts, width=24):
  """Tokens int32[R, X], padded at the end, and lengths int32[R]."""
  lengths = np.array([len(text) for text in texts])
  tokens = np.zeros((len(texts), width), np.int32)
  for row, text in zip(tokens, texts, strict=True):
    row[: len(text)] = [CHARACTERS.index(character) for character in text]
  return tokens, lengths


def decode(tokens):
  return "".join(CHARACTERS[token] for token in tokens)


# %% [markdown]
# ## A call is always well formed
#
# A guide masks logits, so that every drawn text matches a grammar. A call is a
# sign and a number: `+` or `-` with one or two digits, or `*` with one. The stop
# token `=` ends a call, and the guide allows it where the text may end. A text
# always ends within `max_tokens`, so no call is cut off.

# %%
tokens = guides.token_bytes([character.encode() for character in CHARACTERS])
keys = guides.guide(r"[-+][1-9]\d?|\*[2-9]", tokens, stop_token=EQUALS)
print(
  f"{keys.next.shape[0]} states, at most {keys.max_bytes} bytes and the stop"
)

# %% [markdown]
# ## Sixteen conversations in four slots
#
# A prompt names a target and the number to begin with. `max_new_tokens` is for
# one turn, `max_length` for all turns together. `extra` is data that the loop
# carries for each sequence. Here it is the guide's state.

# %%
TURNS, PAGE, LIMIT = 4, 4, 6
rng = np.random.default_rng(0)
pairs = zip(rng.integers(10, 1000, 24), rng.integers(1, 100, 24), strict=True)
prompts = [f"make {target} from: {start}" for target, start in pairs]
config = rollout.RolloutConfig(
  max_new_tokens=LIMIT,
  max_length=80,
  stop_token=EQUALS,
  prefill_chunk=32,
  raw_log_probs=True,
  timeline=512,
)
sizes = jaxkv.CacheConfig(
  num_pages=256, page_size=PAGE, num_slots=4, pages_per_slot=20
)


def begin():
  """The first sixteen conversations, before their first step."""
  return rollout.init(
    jaxkv.init(sizes),
    models.init_kv(decoder, sizes),
    rollout.Requests(
      *encode(prompts[:16]), extra=keys.init(16, max_tokens=LIMIT)
    ),
    jax.random.key(1),
    config,
  )


# A training loop would also donate the state.
@jax.jit
def generate(params, keys, state, until):
  return rollout.generate(
    params, state, until, model=model, process=keys.process
  )


def run(params, state, sequences=16, steps=1000):
  """Runs until this number of sequences has ended, or for this many steps."""
  until = rollout.Until(sequences=sequences, steps=steps)
  return generate(params, keys, state, until)


def texts_of(out):
  rows = zip(out.tokens, out.lengths.tolist(), strict=True)
  return [decode(row[:length]) for row, length in rows]


def read(state):
  """Returns the results of all sequences on the host, and their texts."""
  out = jax.device_get(rollout.generated(state))
  return out, texts_of(out)


# %% [markdown]
# ## The first turn
#
# The guide is an argument of the jitted function, so that its tables are not
# constants of the program. `until` is an argument, too, so that other numbers
# need no compilation. With `sequences=16`, `generate` returns when all sixteen
# agents have stopped.

# %%
first = run(params, begin())
out, texts = read(first)
print(*texts[:4], sep="\n")
assert rollout.is_done(first)
assert (out.finish == rollout.Finish.STOP_TOKEN).all()
assert all(re.search(r"\d([-+][1-9]\d?|\*[2-9])=$", text) for text in texts)

# %% [markdown]
# ## The tool
#
# The tool is a function of a text. `extend` appends its answers, and the
# sequences wait for a slot again. Sequences outside of the mask do not change.
# The answers are padded to one width, so that `extend` is compiled once.

# %%
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculator(text):
  """The result of the call that ends a text."""
  left, sign, right = re.search(r"(-?\d+)([-+*])(\d+)=$", text).groups()
  return str(SIGNS[sign](int(left), int(right)))


def answer(state, mask):
  """Appends the calculator's answers to the sequences of a mask, bool[Q]."""
  out, texts = read(state)
  said = [
    calculator(text) if called else ""
    for text, called in zip(texts, mask, strict=True)
  ]
  state, outcome = rollout.extend(
    state, out.ids, *encode(said, width=8), mask=mask
  )
  assert (outcome.ok == mask).all()
  return state


everyone = np.ones(16, bool)
second = run(params, answer(first, everyone))
print(*read(second)[1][:4], sep="\n")

# %% [markdown]
# ## Four turns
#
# The state is a value, so we keep the states after all turns. At the end the
# last call is answered, too, but no agent goes on.

# %%
after = [begin(), first, second]
while len(after) <= TURNS:
  after.append(run(params, answer(after[-1], everyone)))
end = answer(after[-1], everyone)
out, texts = read(end)
for text in texts:
  print(text)
assert all(text.count("=") == TURNS for text in texts)

# %% [markdown]
# ## What is part of a loss
#
# `generated` gives arrays that are aligned for a loss: each of them has a value
# for each token, in the token's column. `mask` is True for the tokens that the
# model drew (blue). Prompts are grey and the tool's answers are orange. The model
# must learn neither of these two.


# %%
def coloured(out, row):
  """A conversation as HTML."""
  spans = []
  for column in range(out.lengths[row]):
    said = column >= out.prompt_lengths[row]
    colour = "#ffd27f" if said else "#dddddd"
    colour = "#9fd3f5" if out.mask[row, column] else colour
    character = decode(out.tokens[row, column : column + 1])
    spans.append(f'<span style="background:{colour}">{character}</span>')
  return "".join(spans)


drawn = [
  "".join(np.array([*text])[out.mask[row, : len(text)]])
  for row, text in enumerate(texts)
]
print(drawn[:4])
assert all(re.fullmatch(r"([-+*]\d{1,2}=){4}", text) for text in drawn)
lines = "<br>".join(coloured(out, row) for row in range(8))
HTML(f'<pre style="background:#fff;color:#222">{lines}</pre>')

# %% [markdown]
# ## What was computed
#
# The timeline says how many tokens were computed for each conversation. In the
# picture a row is a conversation, a column is a token, and each turn has a panel.
# The last token of a turn, `=`, gets its keys and values in the next turn.
#
# - **Found**, grey: the pages were in the cache. In the first turn these are the
#   tokens that prompts have in common.
# - **Again**, red: only full pages are found, so the tokens in the last page
#   are computed again, fewer than a page.
# - **New**: orange ("said") for prompts and the tool's answers, blue for drawn
#   tokens.


# %%
def computed(before, state):
  """For each token of a turn: 0 nothing, 1 found, 2 again, 3 said, 4 drawn."""
  out, old = read(state)[0], read(before)[0]
  counts = np.zeros(16, int)
  for span in rollout.timeline(state).spans():
    if span.start >= int(before.counters.steps):
      counts[span.sequence] += span.tokens
  column, last = np.arange(80), (out.lengths - 1)[:, None]
  known = np.where(old.finish == 0, 0, old.lengths - 1)[:, None]
  begins = last - counts[:, None]
  kinds = np.where(out.mask, 4, 3)
  kinds = np.where(column < known, 2, kinds)
  kinds = np.where(column < begins, 1, kinds)
  return np.where(column < last, kinds, 0)


def draw(turns):
  colours = ["white", "#cccccc", "#d55e00", "#e69f00", "#56b4e9"]
  figure, panels = plt.subplots(
    1, len(turns), figsize=(11, 2.6), sharey=True, layout="constrained"
  )
  for number, (panel, kinds) in enumerate(zip(panels, turns, strict=True)):
    panel.imshow(
      kinds[:, :44], ListedColormap(colours), vmin=0, vmax=4, aspect="auto"
    )
    panel.set(title=f"turn {number + 1}", xlabel="token")
  panels[0].set_ylabel("conversation")
  names = ["found", "again", "said", "drawn"]
  boxes = [plt.Rectangle((0, 0), 1, 1, color=c) for c in colours[1:]]
  figure.legend(boxes, names, loc="outside right center", frameon=False)
  plt.close(figure)
  return figure


kinds = [computed(*pair) for pair in itertools.pairwise(after)]
draw(kinds)

# %%
print("turn  found  again  said  drawn")
for turn, one in enumerate(kinds):
  counts = np.bincount(one.ravel(), minlength=5)[1:]
  print(f"{turn + 1:4}", *(f"{count:6}" for count in counts))
assert all(((one == 2).sum(axis=1) < PAGE).all() for one in kinds)
counters = after[-1].counters
total = sum(int((one > 1).sum()) for one in kinds)
assert total == sum(
  int(getattr(counters, name))
  for name in ("generated", "prefilled", "recomputed")
)
without = sum(int((one > 0).sum()) for one in kinds)
print(f"{total} tokens computed; without a cache {without}")

# %% [markdown]
# ## The same numbers as without a cache
#
# The model reads pages that were written in other slots and earlier turns. So
# let us compute the whole conversations without any cache, and compare the
# log-probabilities of the drawn tokens. `raw_log_probs` belong to the model's
# own distribution. `log_probs` belong to the distribution after the guide, from
# which tokens are drawn.


# %%
def scores(params, out):
  """The log-probability of each token but the first, float32[Q, W - 1]."""
  logits = models.forward_uncached(
    params, out.tokens, out.positions, config=decoder
  )
  chances = jax.nn.log_softmax(logits[:, :-1])
  return jnp.take_along_axis(chances, out.tokens[:, 1:, None], 2)[..., 0]


mask = out.mask[:, 1:]
np.testing.assert_allclose(
  out.records.raw_log_probs[:, 1:][mask], scores(params, out)[mask], atol=1e-4
)
assert (out.log_probs >= out.records.raw_log_probs)[out.mask].all()

# %% [markdown]
# ## Nobody waits for the others
#
# So far a turn began when all agents had stopped, and slots were empty at the
# end of each turn. A server answers an agent as soon as it stops, while others
# are in the middle of a call. With `sequences=1` the loop returns whenever an
# agent has stopped. `harvest` takes finished conversations out of the queue, and
# `submit` puts eight new ones into the free places. A prompt that finds no free
# place is refused, and is submitted again later.


# %%
def serve(state, waiting):
  """Runs the conversations of a state, then the waiting ones, to their ends."""
  results = {}
  while waiting or not rollout.is_done(state):
    state = run(params, state, sequences=1)
    out, _ = read(state)
    stopped = out.finish == rollout.Finish.STOP_TOKEN
    last = (out.tokens == EQUALS).sum(axis=1) == TURNS
    state = answer(state, stopped & ~last)
    state, taken = rollout.harvest(state, mask=stopped & last)
    done = jax.device_get(taken.results)
    ids = np.where(done.valid, done.ids, -1).tolist()
    results |= dict(zip(ids, texts_of(done), strict=True))
    # Two at a time, in one shape, so that `submit` is compiled once.
    requests = rollout.Requests(
      *encode([*waiting, "-", "-"][:2]), extra=keys.init(2, max_tokens=LIMIT)
    )
    state, put = rollout.submit(
      state, requests, mask=np.arange(2) < len(waiting)
    )
    waiting = waiting[int(put.ok.sum()) :]
  del results[-1]
  return state, results


served, results = serve(begin(), prompts[16:])
assert sorted(results) == [*range(24)]
# The order, and the other conversations, change no token.
assert [results[number] for number in range(16)] == read(after[-1])[1]
together, apart = (
  (rollout.timeline(state).sequences >= 0).mean()
  for state in (after[-1], served)
)
print(f"slots in use: {together:.0%} in turns, {apart:.0%} as they come")
assert apart > together
rollout.timeline(served)

# %% [markdown]
# Numbers in the picture are sequences. A turn is orange while the prompt or the
# tool's answer is computed, and then blue. Slots are busy until no conversation
# waits any more.
#
# ## New weights
#
# In training the weights change while conversations go on. `update_weights`
# tells the rollout: the version grows by one, and pages of the old weights are
# no longer found. With `"recompute"` a conversation keeps its tokens, and their
# keys and values are computed with the new weights. So turn 3 is red. Only the
# page that the prompts share is computed once for all conversations. Turn 4 finds
# the new pages. `versions` says which weights drew each token.

# %%
new_params = models.init_params(jax.random.key(2), decoder)
state = rollout.update_weights(after[2], "recompute")
updated = [*after[:3], run(new_params, answer(state, everyone))]
updated.append(run(new_params, answer(updated[-1], everyone)))
out, texts = read(updated[-1])
for row in range(4):
  versions = out.versions[row, : out.lengths[row]]
  print(texts[row])
  print("".join("." if v < 0 else str(v) for v in versions))
early, _ = read(second)
np.testing.assert_array_equal(out.versions == 0, early.mask)
np.testing.assert_array_equal(out.versions == 1, out.mask & ~early.mask)
kinds = [computed(*pair) for pair in itertools.pairwise(updated)]
assert ((kinds[2] == 1).sum(axis=1) <= PAGE).all()
assert ((kinds[3] == 2).sum(axis=1) < PAGE).all()
draw(kinds)

# %% [markdown]
# The log-probability of each token comes from the weights that drew it, given
# the whole conversation before it.

# %%
raw = out.records.raw_log_probs[:, 1:]
for version, weights in enumerate((params, new_params)):
  mask = out.versions[:, 1:] == version
  np.testing.assert_allclose(raw[mask], scores(weights, out)[mask], atol=1e-4)

# %% [markdown]
# ## The best of four
#
# An agent can also try four calls in each turn, and go on from the one whose
# result is nearest to the target. `branch` copies a conversation that has
# stopped. The copies keep its tokens and log-probabilities, share its full pages,
# and have random keys of their own. They take the rows of one prompt, so the
# queue gets the rows of four prompts without samples.

# %%
state = rollout.init(
  jaxkv.init(sizes),
  models.init_kv(decoder, sizes),
  rollout.Requests(
    *encode(prompts[:1] * TURNS),
    num_samples=[4] + [0] * (TURNS - 1),
    extra=keys.init(4 * TURNS, max_tokens=LIMIT),
  ),
  jax.random.key(5),
  dataclasses.replace(config, num_samples=4),
)
target = int(re.search(r"\d+", prompts[0]).group())
ids = np.arange(4)
for turn in range(TURNS):
  state = run(params, state, sequences=4 * (turn + 1))
  out, texts = read(state)
  rows = np.flatnonzero(np.isin(out.ids, ids))
  misses = [abs(target - int(calculator(texts[row]))) for row in rows]
  best = rows[np.argmin(misses)]
  print(f"{texts[best]}{calculator(texts[best])}  misses", *sorted(misses))
  if turn + 1 < TURNS:
    state, copied = rollout.branch(state, out.ids[[best]], 4)
    ids = int(copied.ids[0]) + np.arange(4)
    state = answer(state, np.isin(read(state)[0].ids, ids))
lengths, recomputed = out.lengths[best], int(state.counters.recomputed)
print(f"{lengths} tokens in the end; {recomputed} of all computed twice")
assert recomputed <= 4 * (TURNS - 1) * PAGE

# %% [markdown]
# ## Somebody hangs up
#
# `abort` ends sequences, even running ones. Their tokens are kept, and their
# pages and slots go to other sequences, whose tokens do not change. Here the
# loop stops after five steps, and the running sequences are aborted.

# %%
paused = run(params, begin(), steps=5)
running = np.flatnonzero(paused.queue.status == rollout.SequenceStatus.RUNNING)
left, outcome = rollout.abort(paused, paused.queue.ids[running])
assert outcome.ok.all()
out, texts = read(run(params, left))
undisturbed = read(first)[1]
for number, text in enumerate(texts):
  finish = rollout.Finish(out.finish[number])
  assert (finish == rollout.Finish.ABORTED) == (number in running)
  assert undisturbed[number].startswith(text)
  if number in running:
    print(f"{number:2} {finish.name}: {text}")

# %% [markdown]
# ## Calls as JSON
#
# The arguments of most tools are JSON, and a schema describes them.
# `guides.json_schema` converts a schema to a grammar, so that every call can be
# parsed and has the arguments that the tool needs. A keyword that a grammar
# cannot express, such as `minimum`, raises an error that names the keyword.

# %%
schema = {
  "type": "object",
  "properties": {
    "sign": {"enum": ["+", "-", "*"]},
    "number": {"type": "integer"},
  },
  "required": ["sign", "number"],
}
grammar = guides.json_schema(schema, whitespace="")
calls = guides.guide(grammar, tokens, stop_token=EQUALS)
state = rollout.init(
  jaxkv.init(sizes),
  models.init_kv(decoder, sizes),
  rollout.Requests(*encode(prompts[:4]), extra=calls.init(4, max_tokens=40)),
  jax.random.key(2),
  rollout.RolloutConfig(
    max_new_tokens=40, max_length=80, stop_token=EQUALS, prefill_chunk=32
  ),
)
out, texts = read(generate(params, calls, state, rollout.Until()))
for row, text in enumerate(texts):
  arguments = json.loads(text[out.prompt_lengths[row] : -1])
  start = int(text[: out.prompt_lengths[row]].split()[-1])
  result = SIGNS[arguments["sign"]](start, arguments["number"])
  print(f"{text} -> {result}")

# %% [markdown]
# A real agent has a trained model, and a tokenizer instead of characters.
# `Sampling.stop_strings` ends turns at strings. `help(rollout.extend)` and the
# help of the other verbs explain the codes that they return.
