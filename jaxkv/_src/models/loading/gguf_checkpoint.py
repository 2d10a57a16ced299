"""Opens a GGUF file as a checkpoint with Hugging Face's names and layouts."""

import functools
import pathlib
import struct
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv._src.extras import extra_package
from jaxkv._src.models.loading import assemble
from jaxkv._src.models.loading import gguf_tokenizer
from jaxkv._src.models.loading import rope_config
from jaxkv._src.models.loading.assemble import Checkpoint
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families import gemma
from jaxkv._src.models.loading.families import llama
from jaxkv._src.models.loading.lazy_tensor import LazyTensor
from jaxkv._src.models.loading.lazy_tensor import Tensors
from jaxkv._src.models.loading.lazy_tensor import transformed
from jaxkv._src.models.loading.weight_maps import WeightMap

_FAMILIES = {
  "llama": llama.llama,
  "qwen2": llama.qwen2,
  "qwen3": llama.qwen3,
  "gemma3": gemma.gemma3,
}
_SIZES = {
  "block_count": "num_hidden_layers",
  "context_length": "max_position_embeddings",
  "embedding_length": "hidden_size",
  "feed_forward_length": "intermediate_size",
  "attention.head_count": "num_attention_heads",
}
# The maximum number of keys, and of tensors. It bounds the loops over them,
# because a damaged file can state any number.
_MAX_COUNT = 1 << 16


def open_checkpoint(path: pathlib.Path) -> Checkpoint:
  """Reads the metadata of a .gguf file, and opens its tensors."""
  if not path.exists():
    raise ValueError(f"there is no file {path}; name a .gguf file.")
  task = "To read a .gguf file"
  gguf = extra_package("gguf", install="jaxkv[gguf]", task=task)
  metadata, tensors = read(gguf, path)
  name = metadata.get("general.architecture")
  metadata.only("general.architecture", *_FAMILIES)
  values = _config(metadata, name, tensors)
  metadata.check_all_read()
  config = ConfigFile(values, str(path), num_tensors=len(tensors))
  weight_map = functools.partial(_FAMILIES[name], config)
  # `eos` ends a text, and chat models end a message with `eot`.
  keys = (f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot"))
  tokens = (metadata.count(key, None) for key in keys)
  stop_tokens = dict.fromkeys(token for token in tokens if token is not None)
  return Checkpoint(
    name=str(path),
    dtype=lambda: jnp.dtype(jnp.bfloat16),
    weight_map=weight_map,
    tensors=_renamed(gguf, tensors, values, name, weight_map(jnp.float32)),
    stop_tokens=tuple(stop_tokens),
    max_length=values["max_position_embeddings"],
    open_tokenizer=functools.partial(gguf_tokenizer.open_tokenizer, metadata),
  )


def read(gguf: Any, path: pathlib.Path) -> tuple[ConfigFile, Tensors]:
  """Reads the metadata, and opens the tensors, under their names in the file.

  Tensors have their outermost axis first. They are dequantized to float32 when
  they are read, so the file must exist until then.
  """
  try:
    with path.open("rb") as file:
      magic, version, *counts = struct.unpack("<4sIQQ", file.read(24))
    if magic != b"GGUF" or version not in (2, 3) or max(counts) > _MAX_COUNT:
      raise ValueError(
        f"magic {magic}, version {version}, {counts} tensors and keys"
      )
    # By default numpy only warns if an integer overflows or is divided by 0,
    # but a damaged file must raise an error.
    with np.errstate(all="raise"):
      reader = _reader_class(gguf)(path)
    values = {key: field.contents() for key, field in reader.fields.items()}
  except (ValueError, LookupError, ArithmeticError, struct.error) as error:
    raise ValueError(
      f"`{path}` must be a complete, little-endian GGUF file of version 2 or 3 "
      f"with at most {_MAX_COUNT} tensors and keys, got ({error}); download or "
      "convert it again."
    ) from error
  metadata = ConfigFile(values, str(path), num_tensors=len(reader.tensors))
  metadata.only("split.count", 0, 1)
  # Two kinds of keys are ignored, because they do not change logits. A key with
  # the value zero or an empty value turns a feature off. A key without the
  # prefix of the architecture does not describe layers.
  prefix = f"{values.get('general.architecture')}."
  metadata.ignore(
    *(k for k, v in values.items() if not v or not k.startswith(prefix))
  )
  tensors = {}
  for tensor in reader.tensors:
    # The shape is reversed, because GGUF lists the innermost axis first.
    shape = tuple(reversed(tensor.shape.tolist()))
    load = functools.partial(gguf.dequantize, tensor.data, tensor.tensor_type)
    tensors[tensor.name] = LazyTensor(shape, np.dtype(np.float32), load)
  return metadata, tensors


def _config(
  metadata: ConfigFile, name: str, tensors: Tensors
) -> dict[str, Any]:
  """Returns the values of an equivalent config.json."""
  config = {key: metadata.size(f"{name}.{a}") for a, key in _SIZES.items()}
  heads = config["num_attention_heads"]
  head_dim = tensors["blk.0.attn_q.weight"].shape[0] // heads
  metadata.only(f"{name}.attention.key_length", head_dim)
  metadata.only(f"{name}.attention.value_length", head_dim)
  metadata.only(f"{name}.rope.dimension_count", head_dim)
  metadata.ignore(f"{name}.vocab_size", f"{name}.tensor_data_layout")
  kv_heads = metadata.size(f"{name}.attention.head_count_kv", heads)
  eps = metadata.number(f"{name}.attention.layer_norm_rms_epsilon")
  # If a file has no rotary base, llama.cpp uses this one.
  base = 1e6 if name == "gemma3" else 1e4
  config |= {
    "num_key_value_heads": kv_heads,
    # Rounding restores 1e-5, which the file stores as 9.99999975e-6 in float32.
    "rms_norm_eps": float(f"{eps:.6g}"),
    "head_dim": head_dim,
    "vocab_size": tensors["token_embd.weight"].shape[0],
    "tie_word_embeddings": "output.weight" not in tensors,
    "rope_theta": metadata.number(f"{name}.rope.freq_base", base),
  }
  config["rope_scaling"] = _scaling(metadata, name, config, tensors)
  if name == "gemma3":
    return config | _gemma(metadata, config)
  metadata.only(f"{name}.attention.sliding_window", 0)
  if name == "llama":
    config["attention_bias"] = "blk.0.attn_output.bias" in tensors
  return config


def _gemma(metadata: ConfigFile, config: dict[str, Any]) -> dict[str, Any]:
  """Returns the values of config.json that only Gemma 3 needs."""
  window = "gemma3.attention.sliding_window"
  scale = config["head_dim"]
  # Gemma 3 27B scales attention logits by (hidden_size / heads) ** -0.5, and
  # other sizes of Gemma 3 by head_dim ** -0.5. A GGUF file has no key for the
  # scale, but only 27B has 62 layers.
  if config["num_hidden_layers"] == 62:
    scale = config["hidden_size"] // config["num_attention_heads"]
  keys = {
    "query_pre_attn_scalar": scale,
    "sliding_window": metadata.size(window),
    "rope_local_base_freq": metadata.number("gemma3.rope.freq_base_swa", 1e4),
  }
  pattern = metadata.get(f"{window}_pattern", 6)
  if not isinstance(pattern, list):
    return keys | {"sliding_window_pattern": pattern}
  kinds = ("full_attention", "sliding_attention")
  return keys | {"layer_types": [kinds[slides] for slides in pattern]}


def _scaling(
  metadata: ConfigFile, name: str, config: dict[str, Any], tensors: Tensors
) -> dict[str, Any] | None:
  """Returns `rope_scaling` of an equivalent config.json.

  A Llama 3 file has the scaling as a tensor, which is removed from `tensors`.
  """
  prefix = f"{name}.rope.scaling."
  metadata.ignore(f"{prefix}finetuned")
  metadata.only(f"{prefix}type", "none", "linear", "yarn")
  metadata.only(f"{prefix}attn_factor", 1.0)
  original = metadata.size(f"{prefix}original_context_length", None)
  table = {
    "rope_type": metadata.get(f"{prefix}type", "none"),
    "factor": metadata.number(f"{prefix}factor", 1.0),
    "original_max_position_embeddings": original,
  }
  if "rope_freqs.weight" in tensors:
    divisors = tensors.pop("rope_freqs.weight").read()
    return rope_config.llama3_table(
      divisors, config["rope_theta"], metadata, config["head_dim"]
    )
  return None if table["rope_type"] == "none" else table


def _renamed(
  gguf: Any,
  tensors: Tensors,
  config: dict[str, Any],
  name: str,
  weight_map: WeightMap,
) -> Tensors:
  """Converts names, row order and norm weights to Hugging Face's format."""
  architecture = gguf.MODEL_ARCH[name.upper()]
  names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
  new_names = {
    names.get_name(key, (".weight", ".bias")): key
    for source in assemble.sources_of(weight_map)
    for key, _ in source.tensors
  }

  def split_halves(weights: np.ndarray) -> np.ndarray:
    """Moves the first rows of a head's rotary pairs before the second rows."""
    pairs = weights.reshape(-1, config["head_dim"] // 2, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)

  renamed = {}
  for key, tensor in tensors.items():
    # llama.cpp adds the offset, 1, to Gemma's norm weights, and interleaves the
    # rotary pairs of Llama's queries and keys. Both are undone here.
    if name == "gemma3" and key.endswith("norm.weight"):
      tensor = transformed(tensor, lambda weights: weights - np.float32(1))
    if name == "llama" and (".attn_q." in key or ".attn_k." in key):
      tensor = transformed(tensor, split_halves)
    # Unknown tensors keep their names, so that `assemble.check` refuses them.
    renamed[new_names.get(key, key)] = tensor
  return renamed


def _reader_class(gguf: Any) -> Any:
  """Returns a subclass of `GGUFReader` that is faster and checks all bounds."""

  class Reader(gguf.GGUFReader):
    def _get(self, offset: int, dtype: Any, count: int = 1, **_: Any) -> Any:
      return np.frombuffer(self.data, dtype, int(count), int(offset))

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
      # The package `gguf` makes several objects for each element of an array,
      # which takes seconds for the vocabulary of a large model.
      if raw_type != gguf.GGUFValueType.ARRAY:
        return super()._get_field_parts(orig_offs, raw_type)
      item_type, count = struct.unpack_from("<IQ", self.data, orig_offs)
      item_type = gguf.GGUFValueType(item_type)
      offset = orig_offs + 12
      types = [gguf.GGUFValueType.ARRAY, item_type]
      if item_type != gguf.GGUFValueType.STRING:
        values = self._get(offset, self.gguf_scalar_to_np[item_type], count)
        return 12 + values.nbytes, [values], [0], types
      strings = []
      for _ in range(count):
        strings.append(self._get_str(offset)[1])
        offset += 8 + len(strings[-1])
      return offset - orig_offs, strings, list(range(count)), types

  return Reader
