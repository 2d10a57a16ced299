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
# # A real model
#
# `models.load` loads a checkpoint in one line: parameters, a description of the
# decoder, a tokenizer, and the sizes of a cache for it. This notebook loads a
# model, asks it some questions, and looks at what the loop computed.
#
# Set the environment variable `JAXKV_MODEL` to a folder, a `.gguf` file or the id
# of a model on the hub, such as `HuggingFaceTB/SmolLM2-135M-Instruct`, and install
# `jaxkv[hf,gguf,hub,notebooks]`. Otherwise the notebook writes a tiny checkpoint,
# and trains it on the answers to four questions. Everything else is the same.

# %%
import dataclasses
import functools
import json
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import tokenizers
from safetensors import numpy as safetensors

import jaxkv
from jaxkv import models
from jaxkv import rollout

# %% [markdown]
# ## A checkpoint
#
# The function writes a folder as Hugging Face's libraries do: `config.json`,
# tensors, a tokenizer and its chat template. A token of this tokenizer is a byte.

# %%
CHAT = (
  "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] "
  "+ '<|im_end|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny(folder):
  """A Llama of two layers with random weights."""
  width, heads, inner, vocab = 64, 4, 128, 258
  config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": width,
    "intermediate_size": inner,
    "num_hidden_layers": 2,
    "num_attention_heads": heads,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "vocab_size": vocab,
    "eos_token_id": 257,
  }
  shapes = {"embed_tokens": (vocab, width), "norm": (width,)}
  for layer in range(2):
    shapes |= {
      f"layers.{layer}.{name}": shape
      for name, shape in {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width // 2, width),
        "self_attn.v_proj": (width // 2, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
      }.items()
    }
  rng = np.random.default_rng(0)
  tensors = {
    f"model.{name}.weight": np.float32(
      np.ones(shape) if len(shape) == 1 else rng.normal(0, 0.1, shape)
    )
    for name, shape in shapes.items()
  }
  bytes_ = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.BPE({byte: n for n, byte in enumerate(bytes_)}, [])
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
  tokenizer.save(str(folder / "tokenizer.json"))
  chat = {"chat_template": CHAT, "eos_token": "<|im_end|>"}
  for name, value in {"config": config, "tokenizer_config": chat}.items():
    (folder / f"{name}.json").write_text(json.dumps(value))
  safetensors.save_file(tensors, folder / "model.safetensors")


# %% [markdown]
# ## Load it
#
# `load` uses every tensor and interprets every key of the configuration. It
# raises an error that names an unknown tensor or key. `dtype` converts the
# weights to float32.

# %%
if source := os.environ.get("JAXKV_MODEL"):
  model = models.load(source, dtype=jnp.float32)
else:
  folder = tempfile.TemporaryDirectory()
  write_tiny(pathlib.Path(folder.name))
  model = models.load(folder.name)

config = model.config
count = sum(leaf.size for leaf in jax.tree.leaves(model.params))
print(f"{count / 1e6:,.1f} million parameters, {config.num_layers} layers:")
print(config.layers[0].attention)

# %% [markdown]
# ## Four questions
#
# The chat template turns messages into the text that the model expects. The four
# prompts have one instruction in common.

# %%
INSTRUCTION = (
  "You are a helpful assistant. Answer in one short sentence. Do not explain "
  "your answer, do not repeat the question, and do not ask anything back."
)
QUESTIONS = [
  "What is the capital of France?",
  "What is the capital of Italy?",
  "Which planet is the largest?",
  "What is two plus two?",
]
encoded = [
  model.tokenizer.encode_chat(
    [
      {"role": "system", "content": INSTRUCTION},
      {"role": "user", "content": question},
    ]
  )
  for question in QUESTIONS
]
lengths = np.array([len(tokens) for tokens in encoded])
prompts = np.zeros((len(encoded), lengths.max()), np.int32)
for row, tokens in zip(prompts, encoded, strict=True):
  row[: len(tokens)] = tokens
print("tokens of the prompts:", lengths)
print(model.tokenizer.decode(encoded[0]))

# %% [markdown]
# A checkpoint of your own is not trained. The tiny one learns two answers to each
# question by heart, with a loss on the tokens of the answers.

# %%
ANSWERS = [
  ("Paris.", "It is Paris."),
  ("Rome.", "It is Rome."),
  ("Jupiter.", "It is Jupiter."),
  ("Four.", "It is four."),
]


def taught(model, steps=100):
  """The model after some steps of Adam on the eight answers."""
  rows = [
    (tokens, [*model.tokenizer.encode(answer), *model.stop_tokens])
    for tokens, pair in zip(encoded, ANSWERS, strict=True)
    for answer in pair
  ]
  width = max(len(prompt) + len(answer) for prompt, answer in rows)
  tokens, mask = np.zeros((2, len(rows), width), np.int32)
  for row, (prompt, answer) in enumerate(rows):
    end = len(prompt) + len(answer)
    tokens[row, :end] = [*prompt, *answer]
    mask[row, len(prompt) : end] = 1
  positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
  optimizer = optax.adam(3e-3)

  def loss(params):
    logits = models.forward_uncached(
      params, jnp.asarray(tokens), positions, config=model.config
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits[:, :-1], tokens[:, 1:]
    )
    return jnp.sum(losses * mask[:, 1:]) / mask.sum()

  @jax.jit
  def train(params):
    def step(carry, _):
      params, moments = carry
      value, gradients = jax.value_and_grad(loss)(params)
      updates, moments = optimizer.update(gradients, moments)
      return (optax.apply_updates(params, updates), moments), value

    carry = (params, optimizer.init(params))
    (params, _), losses = jax.lax.scan(step, carry, length=steps)
    return params, losses

  params, losses = train(model.params)
  print(f"loss of a token: {losses[0]:.2f} before, {losses[-1]:.2f} after")
  return dataclasses.replace(model, params=params)


if not source:
  model = taught(model)

# %% [markdown]
# ## Ask
#
# Each question gets four answers. `Sampling` has settings for each sequence: the
# first answer to a question is greedy, the others have rising temperatures.
#
# A page of the cache holds 16 tokens. Layers that keep the same tokens form a
# group with its own pool of pages: SmolLM2 has one group, Gemma 3 has two, because
# five of six layers have a window.
#
# `raw_log_probs` records the model's own log-probabilities, and `timeline` records
# the work of each slot, for the picture below. `version` is the number of updates of
# the weights since the cache was made. A cache that already has pages requires it.

# %%
SAMPLES, NEW, PAGE = 4, 24, 16
sizes = model.cache_config(
  num_pages=256,
  num_slots=8,
  page_size=PAGE,
  max_length=int(lengths.max()) + NEW,
)
kv = model.init_kv(sizes)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(kv))
print(f"groups: {len(sizes.groups)}, bytes of memory: {size:,}")


def begin(cache, kv, temperatures):
  return rollout.init(
    cache,
    kv,
    rollout.Requests(
      prompts,
      lengths,
      sampling=rollout.Sampling(
        temperature=np.tile(temperatures, len(QUESTIONS)),
        stop_tokens=list(model.stop_tokens),
      ),
    ),
    jax.random.key(0),
    rollout.RolloutConfig(
      num_samples=SAMPLES, max_new_tokens=NEW, raw_log_probs=True, timeline=256
    ),
    version=0,
  )


generate = jax.jit(
  functools.partial(rollout.generate, model=model.forward), donate_argnums=1
)
TEMPERATURES = [0.0, 0.4, 0.8, 1.2]
state = begin(jaxkv.init(sizes), kv, TEMPERATURES)
state = generate(model.params, state)
out = jax.device_get(rollout.generated(state))


def answers(out):
  return [
    model.tokenizer.decode(row[mask])
    for row, mask in zip(out.tokens, out.mask, strict=True)
  ]


for number, text in enumerate(answers(out)):
  if number % SAMPLES == 0:
    print(QUESTIONS[number // SAMPLES])
  print("  ", repr(text))

# %% [markdown]
# ## What was computed
#
# There are sixteen sequences, but the model computed the instruction once, and each
# question once. The picture shows the work of each slot in each step.

# %%
counters = state.counters
have = int(SAMPLES * lengths.sum())
print(f"tokens of all prompts: {have}, computed: {int(counters.prefilled)}")
print(f"samples that shared a prompt: {int(counters.forked)}")

rollout.timeline(state)

# %% [markdown]
# ## Ask again
#
# The state still has the cache. The same questions at other temperatures find their
# pages, so less than a page of each prompt is computed. Temperatures are arrays, so
# nothing is compiled again.

# %%
again = begin(state.memory.cache, state.memory.kv, [0.0, 0.2, 0.7, 1.2])
again = generate(model.params, again)
print(f"computed this time: {int(again.counters.prefilled)}")
assert int(again.counters.prefilled) < len(QUESTIONS) * PAGE
assert answers(jax.device_get(rollout.generated(again)))[0] == answers(out)[0]

# %% [markdown]
# ## A trainer's log-probabilities
#
# A trainer runs whole sequences without a cache. Its log-probabilities equal those
# of the loop up to rounding. `raw_log_probs` are those of the model at temperature
# 1, before the settings of `Sampling`.

# %%
positions = jnp.broadcast_to(
  jnp.arange(out.tokens.shape[1], dtype=jnp.int32), out.tokens.shape
)
logits = models.forward_uncached(
  model.params, jnp.asarray(out.tokens), positions, config=config
)
scores = jax.nn.log_softmax(logits[:, :-1], axis=-1)
scores = np.take_along_axis(
  np.asarray(scores), out.tokens[:, 1:, None], axis=2
)[:, :, 0]
gap = np.abs(scores - out.records.raw_log_probs[:, 1:])[out.mask[:, 1:]]
print(f"{gap.size} tokens, largest difference {gap.max():.1e}")
assert gap.max() < 1e-3

# %% [markdown]
# ## The probability of each token
#
# The bars show the model's probability of each token of the four answers to the
# first question, by rising temperature. A bar is low if a high temperature made the
# token possible, or if the model knows two ways to go on.

# %%
figure, axes = plt.subplots(SAMPLES, 1, figsize=(9, 5), layout="constrained")
for row, axis in enumerate(axes):
  probabilities = np.exp(out.records.raw_log_probs[row][out.mask[row]])
  words = [model.tokenizer.decode([t]) for t in out.tokens[row][out.mask[row]]]
  axis.bar(range(len(words)), probabilities, color="#56b4e9")
  axis.set(ylim=(0, 1), xlim=(-0.6, NEW - 0.4))
  axis.set_title(f"temperature {TEMPERATURES[row]}", fontsize=8, loc="left")
  # A space, the stop token and a part of a character have no glyph of their own.
  names = [
    word.strip().replace("$", r"\$")
    if word.strip() and word.isprintable() and "\ufffd" not in word
    else "\u00b7"
    for word in words
  ]
  axis.set_xticks(range(len(words)), names, fontsize=8)
figure.supylabel("probability of the token")
plt.show()
for row, temperature in enumerate(TEMPERATURES):
  probabilities = np.exp(out.records.raw_log_probs[row][out.mask[row]])
  print(
    f"temperature {temperature}: mean probability {probabilities.mean():.2f}, "
    f"lowest {probabilities.min():.2f}"
  )
