"""Tiny checkpoints, requests and adapters of SkyRL-tx."""

import importlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

VOCABULARY = 64
_ADAPTERS = 4


def module(name: str) -> Any:
  """A module of SkyRL-tx; skips the test without it."""
  for package in ("tx", "flax", "transformers"):
    pytest.importorskip(
      package, reason=f"needs {package}: pip install skyrl-tx jax flax"
    )
  return importlib.import_module(f"tx.{name}")


def write_checkpoint(folder: Any, name: str, **more: Any) -> None:
  """A folder as Hugging Face writes it, of random weights and of words."""
  safetensors = importlib.import_module("safetensors.numpy")
  tokenizers = importlib.import_module("tokenizers")
  config = {
    "architectures": [name],
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "torch_dtype": "float32",
  } | more
  (folder / "config.json").write_text(json.dumps(config))
  rng = np.random.default_rng(0)

  def random(*shape: int) -> np.ndarray:
    return (0.2 * rng.standard_normal(shape)).astype(np.float32)

  tensors = {
    "model.embed_tokens.weight": random(VOCABULARY, 32),
    "model.norm.weight": 1 + random(32),
    "lm_head.weight": random(VOCABULARY, 32),
  }
  for layer in range(config["num_hidden_layers"]):
    own = f"model.layers.{layer}"
    for norm in ("input_layernorm", "post_attention_layernorm"):
      tensors[f"{own}.{norm}.weight"] = 1 + random(32)
    for part, rows in (("q", 64), ("k", 32), ("v", 32)):
      tensors[f"{own}.self_attn.{part}_proj.weight"] = random(rows, 32)
    tensors[f"{own}.self_attn.o_proj.weight"] = random(32, 64)
    if name.startswith("Qwen3"):
      for part in ("q", "k"):
        tensors[f"{own}.self_attn.{part}_norm.weight"] = 1 + random(16)
    for part, shape in (
      ("gate", (64, 32)),
      ("up", (64, 32)),
      ("down", (32, 64)),
    ):
      tensors[f"{own}.mlp.{part}_proj.weight"] = random(*shape)
  safetensors.save_file(tensors, folder / "model.safetensors")
  words = {f"w{number}": number for number in range(VOCABULARY)}
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(words, unk_token="w0")
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  tokenizer.save(str(folder / "tokenizer.json"))
  kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
  (folder / "tokenizer_config.json").write_text(json.dumps(kind))


def backend(folder: Any) -> Any:
  """SkyRL's backend for a checkpoint, with two trained adapters, a and b."""
  jax_backend = module("tinker.backends.jax")
  types = module("tinker.types")
  made = jax_backend.JaxBackendImpl(
    str(folder),
    jax_backend.JaxBackendConfig(max_lora_adapters=_ADAPTERS, max_lora_rank=4),
  )
  for number, name in enumerate("ab"):
    made.create_model(
      name, types.LoraConfig(rank=4, alpha=8.0, seed=number + 1)
    )
    made.models[name].loaded_checkpoint_id = "now"
    change(made, name, number)
  return made


def change(made: Any, name: str, seed: int) -> None:
  """Other weights for an adapter, where training would put them."""
  nnx = importlib.import_module("flax.nnx")
  index = made.models[name].adapter_index
  state = nnx.state(made.model)
  keys = iter(jax.random.split(jax.random.key(seed), 200))

  def changed(path: Any, leaf: Any) -> Any:
    if "lora_B" not in jax.tree_util.keystr(path):
      return leaf
    noise = 0.1 * jax.random.normal(next(keys), leaf.shape[1:], leaf.dtype)
    return leaf.at[index].set(noise)

  nnx.update(made.model, jax.tree.map_with_path(changed, state))


def request(
  prompts: list[list[int]],
  *,
  adapters: list[str] | None = None,
  samples: int = 1,
  log_probs: bool = False,
  **params: Any,
) -> Any:
  """A batch with a request for each prompt, of so many samples each.

  Params are of `SamplingParams`; a list has one for each prompt.
  """
  types = module("tinker.types")
  usual = {"temperature": 0.0, "max_tokens": 12, "seed": 0}
  rows, slices = [], []
  for number, prompt in enumerate(prompts):
    own = {
      name: value[number] if isinstance(value, list) else value
      for name, value in (usual | params).items()
    }
    first = len(rows)
    for sample in range(samples):
      asked = own | {"seed": own["seed"] + sample}
      rows.append((prompt, types.SamplingParams(**asked), number))
    model = (adapters or [""] * len(prompts))[number]
    slices.append((str(number), model, first, len(rows), log_probs))
  names = [(adapters or [""] * len(prompts))[number] for _, _, number in rows]
  return types.PreparedSampleBatch(
    all_prompts=[prompt for prompt, _, _ in rows],
    all_sampling_params=[asked for _, asked, _ in rows],
    all_model_ids=names,
    all_checkpoint_ids=["now" if name else "" for name in names],
    all_checkpoint_paths=["" for _ in names],
    needs_prompt_logprobs=log_probs,
    request_batch_slices=slices,
  )


def prompt(seed: int, length: int) -> list[int]:
  """Random tokens."""
  return np.random.default_rng(seed).integers(1, VOCABULARY, length).tolist()


def distribution(made: Any, tokens: list[int]) -> np.ndarray:
  """What the base model says of the token after some, float32[V]."""
  ids = jnp.asarray([tokens], jnp.int32)
  out = made.model(
    ids,
    attention_mask=jnp.ones_like(ids),
    adapter_indices=jnp.zeros((1,), jnp.int32),
  )
  logits = made.model.compute_logits(out.last_hidden_state)
  return np.asarray(jax.nn.softmax(logits[0, -1]))
