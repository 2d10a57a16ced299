"""A folder as Hugging Face writes it."""

import functools
import pathlib
import re
from typing import Any

import jax.numpy as jnp

from jaxkv._src.models.loading import safetensors_files
from jaxkv._src.models.loading import tokenizer
from jaxkv._src.models.loading import unpacking
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families.table import family_of
from jaxkv._src.models.loading.opened import OpenedCheckpoint
from jaxkv._src.models.loading.plans import Plan
from jaxkv._src.models.loading.safetensors_files import json_object
from jaxkv._src.models.loading.stored import Stored

_DTYPES = ("float32", "bfloat16", "float16")
_LENGTH = 4096
_OTHER_SENSES = re.compile(
  r"(model\.)?(vision_tower|multi_modal_projector|vision_model)\..*"
)
_TEXT = re.compile(r"(model\.language_model\.|language_model\.model\.)")


def opened(folder: pathlib.Path) -> OpenedCheckpoint:
  """Opens a folder: reads its configuration and the headers of its files.

  Raises:
    ValueError: a file is missing or damaged, or config.json asks for an
      unsupported feature.
  """
  where = str(folder / "config.json")
  values = json_object(folder / "config.json")
  family = family_of(values.get("architectures"), where)
  stored = safetensors_files.open_folder(folder)
  outer = ConfigFile(values, where)
  quantization = outer.table("quantization_config")
  if "text_config" in values:
    outer, values = values, dict(outer.table("text_config"))
    for key in ("architectures", "eos_token_id", "tie_word_embeddings"):
      values.setdefault(key, outer.get(key))
    quantization = values.get("quantization_config") or quantization
    stored = _text_only(stored)
  stored = _unpacked(stored, quantization, where)
  config = ConfigFile(values, where, num_tensors=len(stored))

  def plan(dtype: Any) -> Plan:
    made = family(config, dtype)
    config.check_all_read()
    return made

  return OpenedCheckpoint(
    name=str(folder),
    dtype=_dtype(values, where),
    plan=plan,
    stored=stored,
    stop_tokens=stop_tokens(folder, values),
    max_length=config.size("max_position_embeddings", _LENGTH),
    open_tokenizer=functools.partial(tokenizer.from_folder, folder),
  )


def stop_tokens(
  folder: pathlib.Path, config: dict[str, Any]
) -> tuple[int, ...]:
  """The tokens that end a text, of generation_config.json if it is there.

  Args:
    folder: may have it.
    config: the keys of config.json.
  """
  chosen = config.get("eos_token_id")
  path = folder / "generation_config.json"
  if path.exists():
    generation = json_object(path).get("eos_token_id")
    chosen = chosen if generation is None else generation
  if chosen is None:
    return ()
  tokens = chosen if isinstance(chosen, list) else [chosen]
  if not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
    raise ValueError(
      f"`eos_token_id` in {folder} must be a token or a list of tokens, got "
      f"{chosen!r}."
    )
  return tuple(tokens)


def _dtype(values: dict[str, Any], where: str) -> Any:
  name = values.get("dtype") or values.get("torch_dtype") or "float32"
  if name not in _DTYPES:
    raise ValueError(
      f"`dtype` in {where} must be one of {', '.join(_DTYPES)}, got {name!r}; "
      "name one in `load(dtype=)`."
    )
  return jnp.dtype(name)


def _text_only(stored: Stored) -> Stored:
  """The language model of a checkpoint that also sees."""
  renamed = {
    _TEXT.sub("model.", name, count=1).removeprefix("language_model."): tensor
    for name, tensor in stored.items()
  }
  return {
    name: tensor
    for name, tensor in renamed.items()
    if not _OTHER_SENSES.fullmatch(name)
  }


def _unpacked(stored: Stored, quantization: Any, where: str) -> Stored:
  if not quantization:
    return stored
  method = quantization.get("quant_method")
  if method == "mxfp4":
    return unpacking.mxfp4(stored)
  block = quantization.get("weight_block_size")
  if method == "fp8" and _is_pair(block):
    return unpacking.fp8_blocks(stored, (block[0], block[1]))
  raise ValueError(
    f"`quantization_config` in {where} must be mxfp4, or fp8 with a "
    f"`weight_block_size`, got {quantization!r}; load weights that are not "
    "quantized."
  )


def _is_pair(block: Any) -> bool:
  """Whether a value is two positive ints."""
  return (
    isinstance(block, list)
    and len(block) == 2
    and all(type(size) is int and size > 0 for size in block)
  )
