"""A .gguf file as a checkpoint: its tensors, stop tokens and tokenizer."""

import functools
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv._src.models.loading import gguf_tokenizer
from jaxkv._src.models.loading.config_file import ConfigFile
from jaxkv._src.models.loading.families.table import family_of
from jaxkv._src.models.loading.gguf_file import read_gguf
from jaxkv._src.models.loading.opened import OpenedCheckpoint
from jaxkv._src.models.loading.plans import Plan
from jaxkv._src.models.loading.stored import StoredTensor


def opened(path: pathlib.Path) -> OpenedCheckpoint:
  """Opens a .gguf file: reads its facts, and where its tensors are.

  Raises:
    ImportError: the package `gguf` is missing.
    ValueError: the file is missing or damaged, or has an unsupported
      architecture or tensor type.
  """
  if not path.exists():
    raise ValueError(f"there is no file {path}; name a .gguf file.")
  values, tensors = read_gguf(path)
  family = family_of(values["architectures"], str(path))
  config = ConfigFile(values, str(path), num_tensors=len(tensors))

  def plan(dtype: Any) -> Plan:
    made = family(config, dtype)
    config.check_all_read()
    return made

  return OpenedCheckpoint(
    name=str(path),
    dtype=jnp.dtype(jnp.bfloat16),
    plan=plan,
    stored={
      name: StoredTensor(
        tensors.shape(name),
        np.dtype(np.float32),
        functools.partial(tensors.__getitem__, name),
      )
      for name in tensors
    },
    stop_tokens=gguf_tokenizer.stop_tokens(path),
    max_length=config.size("max_position_embeddings"),
    open_tokenizer=functools.partial(gguf_tokenizer.from_file, path),
  )
