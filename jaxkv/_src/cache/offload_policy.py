"""The policy by which pages return from offload memory."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class OffloadPolicy:
  """The speeds that decide whether pages return from offload memory.

  A page returns from offload memory only if the copy takes less time than
  computing its tokens again. `python -m jaxkv doctor` estimates both speeds.

  Attributes:
    bytes_per_second: the speed of copies from offload memory to the device.
    tokens_per_second: the speed at which the model processes prompts.

  Raises:
    TypeError: a speed is not a number.
    ValueError: a speed is not finite, or not above 0.

  Examples:
    A token of Llama-3-8B has 131,072 bytes of K/V. A TPU v6e processes 22,900
    tokens per second, and moves 16.4 GB, or 125,000 tokens, per second:

    >>> OffloadPolicy(16.4e9, 22_900).restores(131_072)
    True
  """

  bytes_per_second: float
  tokens_per_second: float

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
          f"`OffloadPolicy.{field.name}` must be a number, got {value!r} of "
          f"type {type(value).__name__}."
        )
      if not 0 < value < math.inf:
        raise ValueError(
          f"`OffloadPolicy.{field.name}` must be finite and above 0, got "
          f"{value}."
        )

  def restores(self, bytes_per_token: float) -> bool:
    """Returns True if copying a token's K/V is faster than computing it."""
    seconds = bytes_per_token / self.bytes_per_second
    return seconds < 1 / self.tokens_per_second

  def max_pages(self, page_bytes: int, page_size: int) -> int:
    """Returns the maximal number of pages to restore for `page_size` tokens.

    Each group can have a page for the same tokens. Copying all of these pages
    must take less time than computing the tokens.

    Args:
      page_bytes: bytes of a page over all layers.
      page_size: tokens per page.
    """
    seconds = page_size / self.tokens_per_second
    return math.ceil(seconds * self.bytes_per_second / page_bytes) - 1
