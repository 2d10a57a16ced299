"""Decides which pages are worth a move to host memory and back."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class HostPolicy:
  """The cost of a page in host memory, compared with computing it again.

  A page returns from host memory only if that takes less time than computing
  its tokens again. `python -m jaxkv doctor` measures both speeds.

  Attributes:
    bytes_per_second: the speed at which pages return from host memory.
    tokens_per_second: the speed at which the model computes prompts.

  Raises:
    TypeError: a speed is not a number.
    ValueError: a speed is not finite, or not above 0.

  Examples:
    Tokens of Llama-3-8B have 131,072 bytes. A TPU v6e computes 22,900 of them
    in a second, and moves 16.4 GB in a second, which is 125,000 tokens:

    >>> HostPolicy(16.4e9, 22_900).restores(131_072)
    True
  """

  bytes_per_second: float
  tokens_per_second: float

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
          f"`HostPolicy.{field.name}` must be a number, got {value!r} of type "
          f"{type(value).__name__}."
        )
      if not 0 < value < math.inf:
        raise ValueError(
          f"`HostPolicy.{field.name}` must be finite and above 0, got {value}."
        )

  def restores(self, bytes_per_token: float) -> bool:
    """Returns True if restoring a token is faster than computing it."""
    seconds = bytes_per_token / self.bytes_per_second
    return seconds < 1 / self.tokens_per_second

  def max_pages(self, page_bytes: int, page_size: int) -> int:
    """Returns the number of pages that are worth restoring for a column.

    A column has a page in each group. The pages that are needed together also
    return together, so the time that all of them take is compared with the time
    to compute the column's tokens.

    Args:
      page_bytes: bytes of a page, over all layers.
      page_size: tokens of a page.
    """
    seconds = page_size / self.tokens_per_second
    return math.ceil(seconds * self.bytes_per_second / page_bytes) - 1
