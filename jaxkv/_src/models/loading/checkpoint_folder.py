"""Opens a folder in Hugging Face's format."""

import functools
import pathlib
import re
from typing import Any

import jax.numpy as jnp

from jaxkv._src.models.loading import dequantize
from jaxkv._src.models.loading import safetensors_files
from jaxkv._src.models.loading import tokenizer
from jaxkv._src.models.loading.assemble import Checkpoint
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families.architectures import family_of
from jaxkv._src.models.loading.lazy_tensor import Tensors
from jaxkv._src.models.loading.safetensors_files import json_object
from jaxkv._src.models.loading.weight_maps import WeightMap

DTYPES = ("float32", "bfloat16", "float16")
_OUTER_KEYS = (
  "architectures",
  "dtype",
  "eos_token_id",
  "tie_word_embeddings",
  "torch_dtype",
)
_VISION = re.compile(
  r"(model\.)?(vision_tower|multi_modal_projector|vision_model)\..*"
)
_TEXT = re.compile(r"(model\.language_model\.|language_model\.model\.)")


def open_checkpoint(folder: pathlib.Path) -> Checkpoint:
  """Opens a checkpoint: reads config.json and the headers of tensor files."""
  file = str(folder / "config.json")
  values = json_object(folder / "config.json")
  family = family_of(values.get("architectures"), file)
  tensors = safetensors_files.open_folder(folder)
  outer = ConfigFile(values, file)
  quantization = outer.table("quantization_config")
  # In a multimodal checkpoint the keys of the language model are in the table
  # `text_config`, but `_OUTER_KEYS` can be outside of it.
  if "text_config" in values:
    outer_values = values
    values = dict(outer.table("text_config"))
    for key in _OUTER_KEYS:
      values.setdefault(key, outer_values.get(key))
    quantization = values.get("quantization_config") or quantization
    tensors = _text_tensors(tensors)
  tensors = _dequantized(tensors, quantization, file)
  config = ConfigFile(values, file, num_tensors=len(tensors))

  def weight_map(dtype: Any) -> WeightMap:
    result = family.weight_map(config, dtype)
    config.check_all_read()
    return result

  return Checkpoint(
    name=str(folder),
    dtype=functools.partial(_dtype, values, file),
    weight_map=weight_map,
    tensors=tensors,
    stop_tokens=_stop_tokens(folder, values),
    max_length=config.size("max_position_embeddings", family.max_length),
    open_tokenizer=functools.partial(tokenizer.from_folder, folder),
  )


def _dtype(values: dict[str, Any], file: str) -> Any:
  name = values.get("dtype") or values.get("torch_dtype") or "float32"
  if name not in DTYPES:
    raise ValueError(
      f"`dtype` in {file} must be one of {', '.join(DTYPES)}, got {name!r}; "
      "name one in `load(dtype=)`."
    )
  return jnp.dtype(name)


def _stop_tokens(
  folder: pathlib.Path, config: dict[str, Any]
) -> tuple[int, ...]:
  """Returns the ids of the tokens that end a text or a chat message."""
  # generation_config.json takes precedence, because chat models can end a
  # message with a token that config.json lacks.
  value = config.get("eos_token_id")
  path = folder / "generation_config.json"
  if path.exists():
    generation = json_object(path).get("eos_token_id")
    value = value if generation is None else generation
  if value is None:
    return ()
  tokens = value if isinstance(value, list) else [value]
  if not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
    raise ValueError(
      f"`eos_token_id` in {folder} must be a token id or a list of ids, got "
      f"{value!r}."
    )
  return tuple(tokens)


def _text_tensors(tensors: Tensors) -> Tensors:
  """Returns the language model's tensors of a multimodal checkpoint."""
  # A name begins with "model." and "language_model.", in an order that depends
  # on the version of transformers. Weight maps expect "model." alone.
  renamed = {
    _TEXT.sub("model.", name, count=1).removeprefix("language_model."): tensor
    for name, tensor in tensors.items()
  }
  return {
    name: tensor
    for name, tensor in renamed.items()
    if not _VISION.fullmatch(name)
  }


def _dequantized(tensors: Tensors, quantization: Any, file: str) -> Tensors:
  if not quantization:
    return tensors
  method = quantization.get("quant_method")
  if method == "mxfp4":
    return dequantize.mxfp4(tensors)
  block = quantization.get("weight_block_size")
  # Types are compared, because a bool is an int.
  is_pair = isinstance(block, list) and [*map(type, block)] == [int, int]
  if method == "fp8" and is_pair and min(block) > 0:
    return dequantize.fp8_blocks(tensors, (block[0], block[1]))
  raise ValueError(
    f"`quantization_config` in {file} must be mxfp4, or fp8 with a "
    f"`weight_block_size`, got {quantization!r}; load weights that are not "
    "quantized."
  )
