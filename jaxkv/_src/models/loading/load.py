"""jaxkv.models.load: a checkpoint in one line."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import tqdm

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.models.decoder import forward as decoder_forward
from jaxkv._src.models.decoder import memory
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.params import Params
from jaxkv._src.models.loading import assemble
from jaxkv._src.models.loading import damage
from jaxkv._src.models.loading import folder as folders
from jaxkv._src.models.loading import gguf_checkpoint
from jaxkv._src.models.loading import hub
from jaxkv._src.models.loading.opened import OpenedCheckpoint
from jaxkv._src.models.loading.tokenizer import Tokenizer

_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
  """A checkpoint, with everything that a loop needs.

  Attributes:
    config: the decoder.
    params: its parameters.
    max_length: the longest sequence that it was made for, in tokens.
    stop_tokens: tokens that end a text or a message.
    open_tokenizer: reads the tokenizer.
    name: of the file or folder, for messages.
  """

  config: Decoder
  params: Params
  max_length: int
  stop_tokens: tuple[int, ...]
  open_tokenizer: Callable[[], Tokenizer]
  name: str = "the model"

  @functools.cached_property
  def tokenizer(self) -> Tokenizer:
    """Text to tokens and back, with the chat template.

    Raises:
      ImportError: the package `tokenizers` is not installed.
      ValueError: the checkpoint has none, or it is damaged.
    """
    with damage.reported(self.name):
      return self.open_tokenizer()

  @property
  def forward(self) -> Callable[..., Any]:
    """`jaxkv.models.forward` of this decoder, as a rollout calls it."""
    return functools.partial(decoder_forward.forward, config=self.config)

  def cache_config(
    self,
    *,
    num_pages: int,
    num_slots: int,
    page_size: int = 16,
    max_length: int | None = None,
    **options: Any,
  ) -> CacheConfig:
    """The sizes of a cache with the layer groups of this decoder.

    Args:
      num_pages: N, pages of all groups together.
      num_slots: B, sequences at once.
      page_size: S, tokens a page.
      max_length: of a sequence, in tokens; None for what the model was made
        for.
      **options: of `jaxkv.CacheConfig`.
    """
    longest = self.max_length if max_length is None else max_length
    return CacheConfig(
      num_pages=num_pages,
      page_size=page_size,
      num_slots=num_slots,
      pages_per_slot=-(-longest // page_size),
      groups=memory.cache_groups(self.config),
      **options,
    )

  def init_kv(
    self, config: CacheConfig, *, dtype: Any = None, experts: bool = False
  ) -> Any:
    """The memory of this decoder for a cache; see `jaxkv.models.init_kv`."""
    return memory.init_kv(self.config, config, dtype=dtype, experts=experts)


def load(
  source: str | os.PathLike[str],
  *,
  dtype: Any = None,
  local_files_only: bool = False,
  progress: bool = False,
) -> Pretrained:
  """Loads a pretrained decoder.

  Every tensor of the checkpoint is used exactly once, and every key of its
  configuration is known, or the checkpoint is refused. Tensors are read one by
  one, so it takes little memory beside that of the parameters.

  Args:
    source: one of

      - a folder as Hugging Face writes it: config.json, safetensors, and
        tokenizer.json;
      - a .gguf file of the architectures llama, qwen2, qwen3 and gemma3;
      - the id of a model on the hub, if the package `huggingface_hub` is
        installed.
    dtype: of parameters and activations: float32, bfloat16 or float16; None for
      what the checkpoint says.
    local_files_only: whether to download nothing: a model that is not there is
      an error.
    progress: whether to show a progress bar on stderr.

  Raises:
    ImportError: a package is not installed; the message names the extra.
    ValueError: there is no such checkpoint, it is damaged, or it asks for
      something that is not built. The message names the file, key or tensor.
    OSError: a file cannot be read.

  Examples:
    >>> model = load("HuggingFaceTB/SmolLM2-135M")  # doctest: +SKIP
    >>> model.tokenizer.encode("Hello").shape  # doctest: +SKIP
    (1,)
    >>> load("no_such_folder")
    Traceback (most recent call last):
    ValueError: `source` must be a folder with a config.json, ...
  """
  if dtype is not None and jnp.dtype(dtype).name not in _DTYPES:
    raise ValueError(
      f"`dtype` must be one of {', '.join(_DTYPES)}, got "
      f"{jnp.dtype(dtype).name}."
    )
  with damage.reported(os.fspath(source)):
    opened = _opened(source, local_files_only)
    return _loaded(opened, jnp.dtype(dtype or opened.dtype), progress)


def _loaded(opened: OpenedCheckpoint, dtype: Any, progress: bool) -> Pretrained:
  """Reads the tensors of a checkpoint."""
  plan = opened.plan(dtype)
  assemble.check(plan, opened.stored, opened.name)
  total = assemble.num_parts(plan)
  with tqdm.tqdm(
    total=total, desc="loading", unit="tensor", disable=not progress
  ) as bar:
    params = assemble.assemble(plan, opened.stored, bar.update)
  return Pretrained(
    config=plan.decoder,
    params=params,
    max_length=opened.max_length,
    stop_tokens=opened.stop_tokens,
    open_tokenizer=opened.open_tokenizer,
    name=opened.name,
  )


def _opened(
  source: str | os.PathLike[str], local_files_only: bool
) -> OpenedCheckpoint:
  path = pathlib.Path(source)
  if path.is_dir():
    return folders.opened(path)
  if path.suffix == ".gguf" or path.is_file():
    return gguf_checkpoint.opened(path)
  if hub.is_id(str(source)):
    return folders.opened(
      hub.fetched(str(source), local_files_only=local_files_only)
    )
  raise ValueError(
    "`source` must be a folder with a config.json, a .gguf file, or the id of "
    f"a model on the hub, such as Qwen/Qwen3-0.6B, got {os.fspath(source)!r}."
  )
