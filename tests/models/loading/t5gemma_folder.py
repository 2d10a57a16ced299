"""A tiny random T5Gemma in a folder, written without torch."""

import json
from typing import Any

import numpy as np

from jaxkv._src.models.loading import assemble
from jaxkv._src.models.loading import safetensors_files
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families.t5gemma import t5gemma
from jaxkv._src.models.loading.stored import StoredTensor

# As the first checkpoints were written: no `rope_parameters`.
MODULE: dict[str, Any] = {
  "attention_bias": False,
  "attn_logit_softcapping": 50.0,
  "bos_token_id": 2,
  "eos_token_id": 1,
  "final_logit_softcapping": 30.0,
  "head_dim": 8,
  "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size": 16,
  "intermediate_size": 24,
  "max_position_embeddings": 64,
  "model_type": "t5_gemma_module",
  "num_attention_heads": 2,
  "num_hidden_layers": 2,
  "num_key_value_heads": 1,
  "query_pre_attn_scalar": 8,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10_000.0,
  "sliding_window": 4,
  "vocab_size": 320,
}


def values(**changes: Any) -> dict[str, Any]:
  """What config.json says; the encoder is narrower than the decoder."""
  return {
    "architectures": ["T5GemmaForConditionalGeneration"],
    "decoder": MODULE | {"cross_attention_hidden_size": 12},
    "dropout_rate": 0.0,
    "encoder": MODULE | {"hidden_size": 12, "num_hidden_layers": 3},
    "is_encoder_decoder": True,
    "model_type": "t5gemma",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 320,
  } | changes


def write(folder: Any, config: dict[str, Any]) -> dict[str, np.ndarray]:
  """Writes a folder, and returns its tensors."""
  plan = t5gemma(ConfigFile(config, "config.json"), np.float32)
  draws = np.random.default_rng(0)
  tensors = {
    name: draws.normal(size=shape).astype(np.float32)
    for part in assemble.parts_of(plan)
    for name, shape in part.tensors
  }
  (folder / "config.json").write_text(json.dumps(config))
  with open(folder / "model.safetensors", "wb") as file:
    pairs = [
      (name, StoredTensor(array.shape, array.dtype, lambda array=array: array))
      for name, array in tensors.items()
    ]
    safetensors_files.write(file, pairs, np.float32)
  return tensors
