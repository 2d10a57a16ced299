"""Loads pretrained decoders."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import tqdm

from jaxkv._src.arrays.arguments import refuse
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.models.decoder import cache_config as decoder_sizes
from jaxkv._src.models.decoder import forward as decoder_forward
from jaxkv._src.models.decoder import init_kv as decoder_kv
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.grouped_log_probs import grouped_log_probs
from jaxkv._src.models.decoder.params import Params
from jaxkv._src.models.loading import assemble
from jaxkv._src.models.loading import checkpoint_errors
from jaxkv._src.models.loading import checkpoint_folder
from jaxkv._src.models.loading import gguf_checkpoint
from jaxkv._src.models.loading import hub
from jaxkv._src.models.loading.assemble import Checkpoint
from jaxkv._src.models.loading.checkpoint_folder import DTYPES
from jaxkv._src.models.loading.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
  """A pretrained decoder with its parameters and tokenizer.

  Attributes:
    config: the description of the decoder.
    params: parameters of the decoder.
    max_length: the longest sequence that the model was trained for, in tokens.
    stop_tokens: ids of the tokens that end a text or a chat message.
    open_tokenizer: reads and returns the tokenizer.
    name: name of the file or folder, for error messages.
  """

  config: Decoder
  params: Params
  max_length: int
  stop_tokens: tuple[int, ...]
  open_tokenizer: Callable[[], Tokenizer]
  name: str = "the model"

  @functools.cached_property
  def tokenizer(self) -> Tokenizer:
    """The tokenizer, with the chat template.

    Raises:
      ImportError: the package `tokenizers` is not installed.
      ValueError: there is no tokenizer, or it is damaged or not supported.
    """
    # Read on demand, because not all programs need the package `tokenizers`.
    with checkpoint_errors.one_line_errors(self.name):
      return self.open_tokenizer()

  @property
  def forward(self) -> Callable[..., Any]:
    """`jaxkv.models.forward` with this decoder, for a rollout."""
    return functools.partial(decoder_forward.forward, config=self.config)

  @property
  def forward_uncached(self) -> Callable[..., Any]:
    """`jaxkv.models.forward_uncached` with this decoder."""
    function = decoder_forward.forward_uncached
    return functools.partial(function, config=self.config)

  @property
  def grouped_log_probs(self) -> Callable[..., Any]:
    """`jaxkv.models.grouped_log_probs` with this decoder, for a trainer."""
    return functools.partial(grouped_log_probs, config=self.config)

  def cache_config(
    self, *, num_slots: int, max_length: int | None = None, **options: Any
  ) -> CacheConfig:
    """Sizes the pools of this decoder's cache.

    Args:
      num_slots: B, the maximum number of sequences at a time.
      max_length: the longest sequence, in tokens; None for `self.max_length`.
      **options: further arguments of `jaxkv.models.cache_config`, such as
        `memory`.
    """
    longest = self.max_length if max_length is None else max_length
    return decoder_sizes.cache_config(
      self.config, num_slots=num_slots, max_length=longest, **options
    )

  def init_kv(
    self,
    config: CacheConfig,
    *,
    dtype: Any = None,
    record_experts: bool = False,
  ) -> Any:
    """Creates the K/V memory of `forward`; see `jaxkv.models.init_kv`."""
    return decoder_kv.init_kv(
      self.config, config, dtype=dtype, record_experts=record_experts
    )


def load(
  source: str | os.PathLike[str],
  *,
  dtype: Any = None,
  local_files_only: bool = False,
  progress: bool = False,
) -> Pretrained:
  """Loads a pretrained decoder.

  Raises a ValueError if a checkpoint has unknown tensors, or unknown keys in
  its configuration. Parameters are assembled one by one, so loading needs
  little memory besides them.

  Args:
    source: one of

      - a folder in Hugging Face's format: config.json, safetensors, and
        tokenizer.json;
      - a .gguf file of the architectures llama, qwen2, qwen3 and gemma3;
      - the id of a model on the hub, if the package `huggingface_hub` is
        installed.
    dtype: dtype of parameters and activations: float32, bfloat16 or float16.
      None for the checkpoint's dtype, or bfloat16 for a .gguf file.
    local_files_only: True to use only files that are already on this machine.
    progress: True to show a progress bar on stderr.

  Raises:
    ImportError: a package is not installed. The message names the extra to
      install.
    TypeError: `source` is not a path or an id, or `dtype` is not a dtype.
    ValueError: `dtype` is not supported, or the checkpoint does not exist, is
      damaged, or needs an unsupported feature.
    OSError: a file cannot be read.

  Examples:
    >>> model = load("HuggingFaceTB/SmolLM2-135M")  # doctest: +SKIP
    >>> model.tokenizer.encode("Hello").shape  # doctest: +SKIP
    (1,)
    >>> load("no_such_folder")
    Traceback (most recent call last):
    ValueError: `source` must be a folder with a config.json, ...
  """
  # `dtype` is checked first, because opening a checkpoint can start a download.
  if dtype is not None and jnp.dtype(dtype).name not in DTYPES:
    raise ValueError(
      f"`dtype` must be one of {', '.join(DTYPES)}, got "
      f"{jnp.dtype(dtype).name}."
    )
  if not isinstance(source, str | os.PathLike):
    refuse(TypeError, "source", "a folder, a .gguf file or a hub id", source)
  with checkpoint_errors.one_line_errors(os.fspath(source)):
    checkpoint = _open_checkpoint(source, local_files_only)
    return _read(checkpoint, jnp.dtype(dtype or checkpoint.dtype()), progress)


def _read(checkpoint: Checkpoint, dtype: Any, progress: bool) -> Pretrained:
  """Checks and reads the tensors of a checkpoint."""
  weight_map = checkpoint.weight_map(dtype)
  # Checked before any tensor is read, because reading can take minutes.
  assemble.check(weight_map, checkpoint.tensors, checkpoint.name)
  num_sources = sum(1 for _ in assemble.sources_of(weight_map))
  with tqdm.tqdm(
    total=num_sources, desc="loading", unit="tensor", disable=not progress
  ) as bar:
    params = assemble.assemble(weight_map, checkpoint.tensors, bar.update)
  return Pretrained(
    config=weight_map.decoder,
    params=params,
    max_length=checkpoint.max_length,
    stop_tokens=checkpoint.stop_tokens,
    open_tokenizer=checkpoint.open_tokenizer,
    name=checkpoint.name,
  )


def _open_checkpoint(
  source: str | os.PathLike[str], local_files_only: bool
) -> Checkpoint:
  path = pathlib.Path(source)
  # A local folder takes precedence over a model of that name on the hub.
  if path.is_dir():
    return checkpoint_folder.open_checkpoint(path)
  if path.suffix == ".gguf" or path.is_file():
    return gguf_checkpoint.open_checkpoint(path)
  if hub.is_id(str(source)):
    return checkpoint_folder.open_checkpoint(
      hub.download(str(source), local_files_only=local_files_only)
    )
  raise ValueError(
    "`source` must be a folder with a config.json, a .gguf file, or the id of "
    f"a model on the hub, such as Qwen/Qwen3-0.6B, got {os.fspath(source)!r}."
  )
