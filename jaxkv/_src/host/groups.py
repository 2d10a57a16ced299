"""The layer groups of a manager, which compute with Python numbers.

`CrossAttention` and `SpeculativeRecurrent` are kinds that a device cache does
not have.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any
from typing import ClassVar

import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.group_kinds import Recurrent
from jaxkv._src.cache.prefix import prefix_rules


@dataclasses.dataclass(frozen=True)
class CrossAttention(GroupKind):
  """Layers that attend to the output of an encoder.

  A sequence gets pages for all of the encoder's tokens when it starts, and
  keeps them while it runs. A manager with such a group needs
  `enable_caching=False`, because K/V depends on the encoder's input, and page
  keys do not. `CacheManager.state` refuses such a group.
  """

  is_on_device: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class SpeculativeRecurrent(Recurrent):
  """Recurrent layers with scratch pages for the states after draft tokens.

  `CacheManager.state` refuses such a group.

  Attributes:
    num_speculative: the number of draft tokens in a step. Each of them has a
      scratch page, which holds the state after this token.
  """

  num_speculative: int
  is_on_device: ClassVar[bool] = False


class LayerGroup:
  """A layer group, which computes page counts by the rules of its kind.

  Attributes:
    number: its index among the groups.
    kind: its kind; `holds_states`, `skips_pages` and `keeps_last_page` are
      copies of the kind's attributes.
    holds_encoder: True if pages hold the encoder's tokens.
    size: tokens per page.
    step: `PrefixNode`s per page; each has `CacheConfig.page_size` tokens.
    scratch: scratch pages of a sequence, for the states of draft tokens.
    most_pages: the most pages that one sequence holds at once.
  """

  def __init__(self, number: int, config: CacheConfig, most_pages: int):
    self.number = number
    # `Any`, because the methods of kinds are annotated for JAX arrays only.
    kind: Any = config.groups[number]
    self.kind = kind
    self.size = config.page_sizes[number]
    _check_kind(kind, self.size)
    self.step = self.size // config.page_size
    self.scratch = 0
    if isinstance(kind, SpeculativeRecurrent):
      self.scratch = kind.num_speculative
    self.most_pages = most_pages
    self.holds_states: bool = kind.holds_states
    self.holds_encoder = isinstance(kind, CrossAttention)
    self.skips_pages: bool = kind.skips_pages
    self.keeps_last_page: bool = kind.keeps_last_page
    # Most kinds inherit `num_columns` and `published`. Their results are then
    # computed here, because a call of the kind would slow down each allocation.
    self._has_plain_columns = type(kind).num_columns is GroupKind.num_columns
    self._publishes_all = (
      config.prefix_rules == "classic"
      or type(kind).published is GroupKind.published
    )
    self._config = config

  def columns_for(self, tokens: int, state_tokens: int, encoder: int) -> int:
    """Counts the columns that a sequence needs.

    Recurrent groups use `state_tokens`, encoder groups use `encoder`.
    """
    # As in vLLM, lookahead tokens need no states.
    if self.holds_states:
      tokens = state_tokens
    if self.holds_encoder:
      tokens = encoder
    if self._has_plain_columns:
      return -(-tokens // self.size) + self.scratch
    return int(self.kind.num_columns(tokens, self.size)) + self.scratch

  def skipped_tokens(self, tokens: int) -> int:
    """Counts the tokens to which no token after the first `tokens` attends."""
    return int(self.kind.num_skipped_tokens(tokens))

  def skipped_pages(self, tokens: int) -> int:
    """Counts the pages to which no token after the first `tokens` attends."""
    return int(self.kind.num_skipped_tokens(tokens)) // self.size

  def final_pages(self, tokens: int) -> int:
    """Counts the pages that have a key after `tokens` final tokens."""
    return prefix_rules.final_pages_of(self._config, self.size, tokens)

  def room(self, columns: int) -> int:
    """Returns the number of tokens that fit in a number of columns."""
    # Scratch pages have states of draft tokens only.
    return max(columns - self.scratch, 0) * self.size

  def first_fresh(
    self, held: int, stop: int, *, is_new: bool
  ) -> tuple[int, int]:
    """Plans the growth of a table from `held` to `stop` columns.

    In a recurrent group, the new table ends with the running state and the
    scratch pages. Other new columns are null. Old scratch pages in columns
    before the running state move to the first new columns that are not null.

    Returns:
      The first column that gets a page from the free queue, and the number of
      scratch pages that move.
    """
    if not self.holds_states or stop <= held:
      return held, 0
    # A new request has no scratch pages yet.
    running = stop - self.scratch - 1
    moved = 0
    if not is_new:
      moved = min(held, running) - (held - self.scratch)
      moved = min(moved, self.scratch)
    return max(held, running) + moved, moved

  def published(
    self, columns: range, prompt_length: int, boundary: int
  ) -> Sequence[bool]:
    """Returns, for each of the columns, True if a hit can include its page."""
    if self._publishes_all:
      return [True] * len(columns)
    by_prompt = self._config.publishes_by_prompt
    return prefix_rules.published_of(
      self._config,
      self.kind,
      self.size,
      np.arange(columns.start, columns.stop, dtype=np.int32),
      prompt_length if by_prompt else None,
      boundary if by_prompt else None,
    ).tolist()


def _check_kind(kind: Any, size: int) -> None:
  """Raises unless a kind returns Python numbers or NumPy arrays."""
  # A user's kind may compute with jax.numpy. It would initialize a device, and
  # each call of a scheduler would wait for that device.
  hits = np.ones((1, 4), bool)
  row = np.ones((1,), np.int32)
  calls: dict[str, tuple[Any, ...]] = {
    "num_skipped_tokens": (3,),
    "num_columns": (3, size),
    "longest_hit": (hits, row * 3 * size, row > 1, size, 1),
    "published": (np.arange(4, dtype=np.int32), size, 1, None, (), 0),
  }
  for name, arguments in calls.items():
    cause = None
    try:
      answer = getattr(kind, name)(*arguments)
      text = type(answer).__name__
    # A user wrote the kind, so any exception means that it is not supported.
    except Exception as error:
      answer, text, cause = None, repr(error), error
    if not isinstance(answer, int | np.generic | np.ndarray):
      raise TypeError(
        f"`{type(kind).__name__}.{name}` must return a Python number or NumPy "
        f"array for NumPy arguments, got {text}; compute with operators, and "
        "use jax.numpy only for JAX arrays."
      ) from cause
