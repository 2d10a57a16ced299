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
# `models.load` gives a checkpoint in one line: parameters, a description of the
# decoder, a tokenizer, and the sizes that its cache needs. This notebook loads a
# model, asks it some questions, and looks at what the loop computed.
#
# Set the environment variable `JAXKV_MODEL` to a folder, a `.gguf` file or the id
# of a model on the hub, such as `HuggingFaceTB/SmolLM2-135M-Instruct`, and install
# `jaxkv[hf,gguf,hub,notebooks]`. Otherwise the notebook writes a tiny checkpoint
# with random weights. That one talks nonsense, but everything else is the same.

# %%
import functools
import json
import os
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import tokenizers
from safetensors import numpy as safetensors

import jaxkv
from jaxkv import models
from jaxkv import rollout

# %% [markdown]
# ## A checkpoint
#
# A folder as Hugging Face's libraries write it: `config.json`, tensors, a
# tokenizer and its chat template. Each character of this tokenizer is a token or
# several, one for each of its bytes.

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
    f"model.{name}.weight": rng.normal(0, 0.3, shape).astype(np.float32)
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
# Every tensor is used exactly once and every key of the configuration is known,
# or `load` says what is wrong. Here weights become float32, whatever the file has.

# %%
if source := os.environ.get("JAXKV_MODEL"):
  model = models.load(source, dtype=jnp.float32)
else:
  with tempfile.TemporaryDirectory() as folder:
    write_tiny(pathlib.Path(folder))
    model = models.load(folder)
    _ = model.tokenizer  # Read while the folder is there.

config = model.config
count = sum(leaf.size for leaf in jax.tree.leaves(model.params))
print(f"{count / 1e6:,.1f} million parameters, {config.num_layers} layers:")
print(config.layers[0].attention)

# %% [markdown]
# ## Ask
#
# The chat template writes what a message looks like to the model. Four questions
# have one instruction in common, and each gets four answers. `Sampling` is per
# sequence: the first answer to each question is greedy, the others get warmer.

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
# A page of the cache holds 16 tokens. Layers that keep the same tokens are a
# group: SmolLM2 has one. Gemma 3 has six, since five of six layers have a window.
#
# `raw_log_probs` keeps the model's own log-probabilities, and `timeline` what each
# slot did, for the pictures below. `version` counts updates of the weights; a
# cache that is used again belongs to one of them.

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
    prompts,
    lengths,
    jax.random.key(0),
    rollout.RolloutConfig(
      num_samples=SAMPLES, max_new_tokens=NEW, raw_log_probs=True, timeline=256
    ),
    sampling=rollout.Sampling(
      temperature=np.tile(temperatures, len(QUESTIONS)),
      stop_tokens=list(model.stop_tokens),
    ),
    version=0,
  )


generate = jax.jit(
  functools.partial(rollout.generate, model=model.forward), donate_argnums=1
)
state = begin(jaxkv.init(sizes), kv, [0.0, 0.5, 1.0, 1.5])
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
# Sixteen sequences, but the instruction went through the model once, and each
# question once. The picture shows what each slot did in each step.

# %%
counters = state.counters
have = int(SAMPLES * lengths.sum())
print(f"tokens of all prompts: {have}, computed: {int(counters.prefilled)}")
print(f"samples that shared a prompt: {int(counters.forked)}")

rollout.timeline(state)

# %% [markdown]
# ## Ask again
#
# The cache lives on in the state. The same questions at other temperatures find
# their pages, so what is left of a prompt is less than a page. Temperatures are
# arrays, so nothing is compiled again.

# %%
again = begin(state.cache, state.kv, [0.0, 0.2, 0.7, 1.2])
again = generate(model.params, again)
print(f"computed this time: {int(again.counters.prefilled)}")
assert int(again.counters.prefilled) < len(QUESTIONS) * PAGE
assert answers(jax.device_get(rollout.generated(again)))[0] == answers(out)[0]

# %% [markdown]
# ## The numbers of a trainer
#
# A trainer runs whole sequences without a cache. Its log-probabilities are those
# of the loop up to rounding. `raw_log_probs` are those of the model itself,
# whatever the temperature.

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
# ## How sure it is
#
# The probability of each token of the four answers to the first question, from
# the greedy one to the warmest. Tokens that only a high temperature makes
# possible stand out. Random weights are sure of nothing, or of one token.

# %%
figure, axes = plt.subplots(SAMPLES, 1, figsize=(9, 5), layout="constrained")
for row, axis in enumerate(axes):
  chances = np.exp(out.records.raw_log_probs[row][out.mask[row]])
  words = [model.tokenizer.decode([t]) for t in out.tokens[row][out.mask[row]]]
  axis.bar(range(len(words)), chances, color="#56b4e9")
  axis.set(ylim=(0, 1), xlim=(-0.6, NEW - 0.4))
  names = [ascii(word)[1:-1].replace("$", r"\$") for word in words]
  axis.set_xticks(range(len(words)), names, rotation=60, fontsize=7, ha="right")
plt.close(figure)
figure
