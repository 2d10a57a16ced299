"""Models in GGUF files, as Hugging Face would have stored them.

The sizes become what a `config.json` says, tensors get Hugging Face's names
and order of rows, so one description of a family serves both formats.
"""

import math
import os
import re
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxkv._src.extras import extra_package
from jaxkv._src.models.loading.gguf_config import config_of
from jaxkv._src.models.loading.gguf_header import GgufHeader
from jaxkv._src.models.loading.gguf_header import GgufTensor
from jaxkv._src.models.loading.gguf_header import read_gguf_header

_CHUNK = 1 << 16
"""Blocks that are dequantised at a time."""

_OUTER = {
  "token_embd": "model.embed_tokens",
  "output_norm": "model.norm",
  "output": "lm_head",
}
_INNER = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}
_GEMMA_INNER = _INNER | {
  "post_attention_norm": "post_attention_layernorm",
  "ffn_norm": "pre_feedforward_layernorm",
  "post_ffw_norm": "post_feedforward_layernorm",
}
# Facts in the form of a tensor; the config has them.
_NO_WEIGHTS = {"rope_freqs.weight"}

Dequantize = Callable[[np.ndarray, str], np.ndarray]


class GgufTensors(Mapping[str, np.ndarray]):
  """The tensors of a GGUF file by Hugging Face's names, float32.

  Each is read and dequantised when it is asked for, and is not kept.
  """

  def __init__(
    self,
    header: GgufHeader,
    sources: Mapping[str, str],
    config: Mapping[str, Any],
    dequantize: Dequantize,
  ):
    self._header = header
    self._sources = sources
    self._config = config
    self._dequantize = dequantize

  def __getitem__(self, name: str) -> np.ndarray:
    source = self._sources[name]
    weights = self._read(self._header.tensors[source])
    model = self._config["model_type"]
    if model == "llama" and (heads := self._heads(name)):
      return _without_interleaving(weights, heads)
    if model == "gemma3_text" and name.endswith("norm.weight"):
      return weights - np.float32(1)
    return weights

  def __iter__(self) -> Iterator[str]:
    return iter(self._sources)

  def __len__(self) -> int:
    return len(self._sources)

  def shape(self, name: str) -> tuple[int, ...]:
    """The sizes of a tensor, without reading it."""
    return self._header.tensors[self._sources[name]].shape

  def _heads(self, name: str) -> int:
    """How many heads share the rows of a tensor; 0 where no rope turns it."""
    if ".q_proj." in name:
      return self._config["num_attention_heads"]
    if ".k_proj." in name:
      return self._config["num_key_value_heads"]
    return 0

  def _read(self, tensor: GgufTensor) -> np.ndarray:
    """float32[shape], dequantised."""
    weights = np.empty(math.prod(tensor.shape), np.float32)
    if not weights.size:
      return weights.reshape(tensor.shape)
    blocks = np.memmap(
      self._header.path,
      np.uint8,
      "r",
      offset=tensor.offset,
      shape=(tensor.num_blocks, tensor.block_bytes),
    )
    parts = weights.reshape(tensor.num_blocks, -1)
    for start in range(0, tensor.num_blocks, _CHUNK):
      rows = slice(start, start + _CHUNK)
      data = np.asarray(blocks[rows]).reshape(-1)
      parts[rows] = self._dequantize(data, tensor.type).reshape(
        -1, parts.shape[1]
      )
    return weights.reshape(tensor.shape)


def read_gguf(
  path: str | os.PathLike[str],
) -> tuple[dict[str, Any], GgufTensors]:
  """Reads a GGUF file of the architectures llama, gemma3, qwen2 and qwen3.

  Types F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q8_0, Q4_K and Q6_K are read. The
  file must stay where it is while tensors are read.

  Args:
    path: the file.

  Returns:
    What Hugging Face's `config.json` would say, with the ids that end and
    start a text, and the tensors by Hugging Face's names: float32, a matrix as
    [out, in], with the rows of queries and keys in its order and Gemma's norm
    weights without their offset of 1.

  Raises:
    FileNotFoundError: there is no such file.
    ImportError: the package `gguf` is missing.
    ValueError: the file is damaged, or has an architecture, a fact, a tensor
      or a type that is not read here; one line that names the file.

  Examples:
    >>> config, tensors = read_gguf("model.gguf")  # doctest: +SKIP
    >>> tensors["model.norm.weight"].shape  # doctest: +SKIP
    (576,)
  """
  header = read_gguf_header(path)
  config = config_of(header)
  sources = _sources(header, config["model_type"])
  return config, GgufTensors(header, sources, config, _dequantizer())


def _sources(header: GgufHeader, model: str) -> dict[str, str]:
  """The file's name of each tensor, by Hugging Face's."""
  sources = {}
  inner = _GEMMA_INNER if model == "gemma3_text" else _INNER
  for name in header.tensors:
    if name in _NO_WEIGHTS:
      continue
    found = _renamed(name, inner)
    if found is None:
      raise ValueError(
        f"`{header.path}` must hold tensors of the model {model!r}, got "
        f"{name!r}, which is not known."
      )
    sources[found] = name
  return sources


def _renamed(name: str, inner: Mapping[str, str]) -> str | None:
  stem, _, last = name.rpartition(".")
  if last not in ("weight", "bias"):
    return None
  if stem in _OUTER:
    return f"{_OUTER[stem]}.{last}"
  found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
  if found is None or found[2] not in inner:
    return None
  return f"model.layers.{found[1]}.{inner[found[2]]}.{last}"


def _without_interleaving(weights: np.ndarray, heads: int) -> np.ndarray:
  """Rows of each head with the first halves of all rope pairs in front.

  Args:
    weights: [heads * D, ...], where the two rows of a pair are neighbours.
    heads: how many heads there are.
  """
  pairs = weights.reshape(heads, -1, 2, *weights.shape[1:])
  return pairs.swapaxes(1, 2).reshape(weights.shape)


def _dequantizer() -> Dequantize:
  gguf = extra_package(
    "gguf", install="jaxkv[gguf]", task="To read a .gguf file"
  )

  def dequantize(data: np.ndarray, type_name: str) -> np.ndarray:
    return gguf.dequantize(data, gguf.GGMLQuantizationType[type_name])

  return dequantize
