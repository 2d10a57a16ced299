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


def write_checkpoint(folder: Any, name: str, **fields: Any) -> None:
  """Writes a Hugging Face folder with random weights and a word tokenizer."""
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
  } | fields
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
    prefix = f"model.layers.{layer}"
    for norm in ("input_layernorm", "post_attention_layernorm"):
      tensors[f"{prefix}.{norm}.weight"] = 1 + random(32)
    for part, rows in (("q", 64), ("k", 32), ("v", 32)):
      tensors[f"{prefix}.self_attn.{part}_proj.weight"] = random(rows, 32)
    tensors[f"{prefix}.self_attn.o_proj.weight"] = random(32, 64)
    if name.startswith("Qwen3"):
      for part in ("q", "k"):
        tensors[f"{prefix}.self_attn.{part}_norm.weight"] = 1 + random(16)
    for part, shape in (
      ("gate", (64, 32)),
      ("up", (64, 32)),
      ("down", (32, 64)),
    ):
      tensors[f"{prefix}.mlp.{part}_proj.weight"] = random(*shape)
  safetensors.save_file(tensors, folder / "model.safetensors")
  words = {f"w{i}": i for i in range(VOCABULARY)}
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(words, unk_token="w0")
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  tokenizer.save(str(folder / "tokenizer.json"))
  fields = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
  (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def backend(folder: Any) -> Any:
  """Returns SkyRL's backend for a checkpoint, with trained adapters a and b."""
  jax_backend = module("tinker.backends.jax")
  types = module("tinker.types")
  jax_impl = jax_backend.JaxBackendImpl(
    str(folder),
    jax_backend.JaxBackendConfig(max_lora_adapters=_ADAPTERS, max_lora_rank=4),
  )
  for index, name in enumerate("ab"):
    jax_impl.create_model(
      name, types.LoraConfig(rank=4, alpha=8.0, seed=index + 1)
    )
    jax_impl.models[name].loaded_checkpoint_id = "now"
    change(jax_impl, name, index)
  return jax_impl


def change(jax_impl: Any, name: str, seed: int) -> None:
  """Replaces an adapter's weights, as training does."""
  nnx = importlib.import_module("flax.nnx")
  index = jax_impl.models[name].adapter_index
  state = nnx.state(jax_impl.model)
  keys = iter(jax.random.split(jax.random.key(seed), 200))

  def changed(path: Any, leaf: Any) -> Any:
    if "lora_B" not in jax.tree_util.keystr(path):
      return leaf
    noise = 0.1 * jax.random.normal(next(keys), leaf.shape[1:], leaf.dtype)
    return leaf.at[index].set(noise)

  nnx.update(jax_impl.model, jax.tree.map_with_path(changed, state))


def request(
  prompts: list[list[int]],
  *,
  adapters: list[str] | None = None,
  samples: int = 1,
  log_probs: bool = False,
  **params: Any,
) -> Any:
  """Makes a batch with a request for each prompt, of `samples` samples each.

  `params` are of `SamplingParams`; a list has one for each prompt.
  """
  types = module("tinker.types")
  usual = {"temperature": 0.0, "max_tokens": 12, "seed": 0}
  rows, slices = [], []
  for index, prompt in enumerate(prompts):
    settings = {
      name: value[index] if isinstance(value, list) else value
      for name, value in (usual | params).items()
    }
    first_row = len(rows)
    for sample in range(samples):
      sample_settings = settings | {"seed": settings["seed"] + sample}
      rows.append((prompt, types.SamplingParams(**sample_settings), index))
    model = (adapters or [""] * len(prompts))[index]
    slices.append((str(index), model, first_row, len(rows), log_probs))
  names = [(adapters or [""] * len(prompts))[index] for _, _, index in rows]
  return types.PreparedSampleBatch(
    all_prompts=[prompt for prompt, _, _ in rows],
    all_sampling_params=[sample_settings for _, sample_settings, _ in rows],
    all_model_ids=names,
    all_checkpoint_ids=["now" if name else "" for name in names],
    all_checkpoint_paths=["" for _ in names],
    needs_prompt_logprobs=log_probs,
    request_batch_slices=slices,
  )


def prompt(seed: int, length: int) -> list[int]:
  """Draws tokens."""
  return np.random.default_rng(seed).integers(1, VOCABULARY, length).tolist()


def distribution(jax_impl: Any, tokens: list[int]) -> np.ndarray:
  """Returns the base model's distribution of the next token, float32[V]."""
  ids = jnp.asarray([tokens], jnp.int32)
  out = jax_impl.model(
    ids,
    attention_mask=jnp.ones_like(ids),
    adapter_indices=jnp.zeros((1,), jnp.int32),
  )
  logits = jax_impl.model.compute_logits(out.last_hidden_state)
  return np.asarray(jax.nn.softmax(logits[0, -1]))
