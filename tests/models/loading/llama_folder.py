"""Writes a folder with a tiny Llama of random weights."""

import json
import pathlib
import struct

import ml_dtypes
import numpy as np

from jaxkv._src.models.loading.lazy_tensor import LazyTensor

CONFIG = {
  "architectures": ["LlamaForCausalLM"],
  "dtype": "bfloat16",
  "eos_token_id": 2,
  "hidden_size": 8,
  "intermediate_size": 12,
  "max_position_embeddings": 64,
  "model_type": "llama",
  "num_attention_heads": 2,
  "num_hidden_layers": 2,
  "num_key_value_heads": 1,
  "vocab_size": 11,
}
_NAMES = {
  np.dtype(np.float32): "F32",
  np.dtype(np.uint8): "U8",
  np.dtype(ml_dtypes.bfloat16): "BF16",
  np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
}
_LAYER = {
  "input_layernorm": (8,),
  "post_attention_layernorm": (8,),
  "self_attn.q_proj": (8, 8),
  "self_attn.k_proj": (4, 8),
  "self_attn.v_proj": (4, 8),
  "self_attn.o_proj": (8, 8),
  "mlp.gate_proj": (12, 8),
  "mlp.up_proj": (12, 8),
  "mlp.down_proj": (8, 12),
}


def stored(values):
  return LazyTensor(values.shape, values.dtype, lambda: values)


def tensors():
  shapes = {
    f"model.layers.{layer}.{name}.weight": shape
    for layer in range(2)
    for name, shape in _LAYER.items()
  }
  shapes |= {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,)}
  shapes |= {"lm_head.weight": (11, 8)}
  draw = np.random.default_rng(0)
  return {
    name: draw.normal(size=shape).astype(np.float32)
    for name, shape in shapes.items()
  }


def write_tensors(path, tensors, dtype=ml_dtypes.bfloat16):
  """Writes a safetensors file: a header in JSON, then all bytes."""
  header = {}
  data = b""
  for name, values in tensors.items():
    start = len(data)
    data += values.astype(dtype).tobytes()
    header[name] = {
      "dtype": _NAMES[np.dtype(dtype)],
      "shape": list(values.shape),
      "data_offsets": [start, len(data)],
    }
  text = json.dumps(header).encode()
  path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_folder(folder: pathlib.Path) -> None:
  """Writes weights and configuration."""
  write_tensors(folder / "model.safetensors", tensors())
  (folder / "config.json").write_text(json.dumps(CONFIG))
