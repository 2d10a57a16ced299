"""Writes small GGUF files with the package `gguf`."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

Blocks = tuple[np.ndarray, str]
"""A tensor's bytes, a row in each row, and the name of its type."""

SIZES = {
  "block_count": 2,
  "context_length": 128,
  "embedding_length": 64,
  "feed_forward_length": 96,
  "attention.head_count": 4,
  "attention.head_count_kv": 2,
  "attention.layer_norm_rms_epsilon": 1e-5,
}


def write_gguf(
  path: pathlib.Path,
  architecture: str,
  facts: Mapping[str, Any],
  tensors: Mapping[str, np.ndarray | Blocks],
) -> pathlib.Path:
  """Writes a file; fact names that start with a dot get the architecture."""
  gguf = pytest.importorskip("gguf", reason="it writes the files")
  writer = gguf.GGUFWriter(path, architecture)
  for key, value in facts.items():
    key = architecture + key if key.startswith(".") else key
    _add_fact(writer, key, value)
  for name, tensor in tensors.items():
    if isinstance(tensor, tuple):
      dtype = gguf.GGMLQuantizationType[tensor[1]]
      writer.add_tensor(name, tensor[0], raw_dtype=dtype)
    else:
      writer.add_tensor(name, tensor)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def _add_fact(writer: Any, key: str, value: Any) -> None:
  if isinstance(value, bool):
    writer.add_bool(key, value)
  elif isinstance(value, int):
    writer.add_uint32(key, value)
  elif isinstance(value, float):
    writer.add_float32(key, value)
  elif isinstance(value, str):
    writer.add_string(key, value)
  else:
    writer.add_array(key, value)


def sizes(**others: Any) -> dict[str, Any]:
  """Returns facts of a small model; `rope__freq_base` is `.rope.freq_base`."""
  named = {key.replace("__", "."): value for key, value in others.items()}
  return {f".{key}": value for key, value in (SIZES | named).items()}


def weights(architecture: str, seed: int = 0) -> dict[str, np.ndarray]:
  """Draws float32 tensors of a small model, by their names in the file."""
  width, inner, queries, keys, head = 64, 96, 64, 32, 16
  layer = {
    "attn_norm.weight": (width,),
    "attn_q.weight": (queries, width),
    "attn_k.weight": (keys, width),
    "attn_v.weight": (keys, width),
    "attn_output.weight": (width, queries),
    "ffn_norm.weight": (width,),
    "ffn_gate.weight": (inner, width),
    "ffn_up.weight": (inner, width),
    "ffn_down.weight": (width, inner),
  }
  if architecture == "qwen2":
    layer |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,)}
    layer |= {"attn_v.bias": (keys,)}
  if architecture in ("qwen3", "gemma3"):
    layer |= {"attn_q_norm.weight": (head,), "attn_k_norm.weight": (head,)}
  if architecture == "gemma3":
    layer |= {"post_attention_norm.weight": (width,)}
    layer |= {"post_ffw_norm.weight": (width,)}
  shapes = {"token_embd.weight": (320, width), "output_norm.weight": (width,)}
  for i in range(2):
    shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
  random = np.random.default_rng(seed)
  return {
    name: random.standard_normal(shape).astype(np.float32)
    for name, shape in shapes.items()
  }
