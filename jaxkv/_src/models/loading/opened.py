"""A checkpoint whose files are known to be there, and not read yet."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxkv._src.models.loading.plans import Plan
from jaxkv._src.models.loading.stored import Stored
from jaxkv._src.models.loading.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedCheckpoint:
  """What a format gives the loader.

  Attributes:
    name: for messages.
    dtype: of most weights.
    plan: what its tensors become, with parameters of a type.
    stored: its tensors.
    stop_tokens: tokens that end a text or a message.
    max_length: the longest sequence that it was made for, in tokens.
    open_tokenizer: reads the tokenizer.
  """

  name: str
  dtype: Any
  plan: Callable[[Any], Plan]
  stored: Stored
  stop_tokens: tuple[int, ...]
  max_length: int
  open_tokenizer: Callable[[], Tokenizer]
