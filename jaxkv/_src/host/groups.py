"""The layer groups of a manager: their kinds' rules for Python numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.prefix import rules


class LayerGroup:
  """A layer group, which computes the rules of its kind.

  Attributes:
    number: its index among the groups.
    kind: its kind; `holds_states`, `holds_encoder`, `skips_pages` and
      `keeps_last_page` are attributes of the kind.
    size: tokens a page.
    step: prefix nodes a page, `size` in units of `CacheConfig.page_size`.
    scratch: scratch pages of a sequence, for the states of draft tokens.
    most_pages: the most pages that one sequence holds at once.
    publishes_all: True if every full page is published.
  """

  def __init__(self, number: int, config: CacheConfig, most_pages: int):
    self.number = number
    self.kind = config.groups[number]
    self.size = config.page_sizes[number]
    self.step = self.size // config.page_size
    self.scratch = self.kind.num_speculative
    self.most_pages = most_pages
    self.holds_states = self.kind.holds_states
    self.holds_encoder = self.kind.holds_encoder
    self.skips_pages = self.kind.skips_pages
    self.keeps_last_page = self.kind.keeps_last_page
    self.publishes_all = (
      config.prefix_rules == "classic"
      or type(self.kind).published is GroupKind.published
    )
    # Every allocation counts columns. Most kinds inherit the rule, which
    # `columns_for` then computes itself, to save a call of the kind.
    rule = type(self.kind).num_columns
    self._has_plain_columns = rule is GroupKind.num_columns
    self._config = config

  def columns_for(self, tokens: int, state_tokens: int, encoder: int) -> int:
    """Counts the columns that a sequence needs.

    A recurrent group counts `state_tokens`, an encoder group `encoder` tokens.
    """
    # As in vLLM, lookahead tokens need no states.
    if self.holds_states:
      tokens = state_tokens
    if self.holds_encoder:
      tokens = encoder
    if self._has_plain_columns:
      return -(-tokens // self.size) + self.scratch
    return int(self.kind.num_columns(tokens, self.size))  # pyright: ignore

  def skipped_tokens(self, tokens: int) -> int:
    """Counts the leading tokens that no token after `tokens` attends to."""
    return int(self.kind.num_skipped_tokens(tokens))  # pyright: ignore

  def skipped_pages(self, tokens: int) -> int:
    """Counts the leading pages that no token after `tokens` attends to."""
    return self.skipped_tokens(tokens) // self.size

  def final_pages(self, tokens: int) -> int:
    """Counts the pages that have a content after `tokens` final tokens."""
    return rules.final_pages_of(self._config, self.size, tokens)

  def room(self, columns: int) -> int:
    """Returns the number of tokens that fit columns."""
    return max(columns - self.scratch, 0) * self.size

  def first_fresh(
    self, held: int, stop: int, *, begins: bool
  ) -> tuple[int, int]:
    """Plans the growth of a table from `held` to `stop` columns.

    In a recurrent group only the running state gets a page. New columns before
    it are null, and the scratch pages before it move to the columns after it.

    Returns:
      The first column that gets a page from the free queue, and the number of
      scratch pages that move.
    """
    if not self.holds_states or stop <= held:
      return held, 0
    # The scratch pages fill the last columns of a table. A request that begins
    # has none yet.
    running = stop - self.scratch - 1
    moved = 0
    if not begins:
      moved = min(held, running) - (held - self.scratch)
      moved = min(max(moved, 0), self.scratch)
    return max(held, running) + moved, moved

  def published(
    self, columns: range, prompt_length: int, boundary: int
  ) -> Sequence[bool]:
    """Returns, for each full page, True if a hit can include it."""
    if self.publishes_all:
      return [True] * len(columns)
    by_prompt = self._config.publishes_by_prompt
    published = rules.published_of(
      self._config,
      self.kind,
      self.size,
      np.arange(columns.start, columns.stop, dtype=np.int32),
      prompt_length if by_prompt else None,
      boundary if by_prompt else None,
    )
    return published.tolist()


def make_groups(
  config: CacheConfig, most_pages: Sequence[int]
) -> tuple[LayerGroup, ...]:
  """Returns the groups of a config.

  Raises:
    TypeError: a kind does not compute with Python numbers and numpy arrays.
  """
  for kind, size in zip(config.groups, config.page_sizes, strict=True):
    _check_kind(kind, size)
  return tuple(
    LayerGroup(number, config, limit) for number, limit in enumerate(most_pages)
  )


def _check_kind(kind: GroupKind, size: int) -> None:
  """Raises unless a kind answers with numbers and arrays of the host."""
  # A user's kind may compute with jax.numpy. It would start a device, and each
  # call of a scheduler would wait for it.
  pages, ones = np.arange(4, dtype=np.int32), np.ones((1,), np.int32)
  calls: dict[str, Any] = {
    "num_skipped_tokens": lambda: kind.num_skipped_tokens(3),  # pyright: ignore
    "num_columns": lambda: kind.num_columns(3, size),  # pyright: ignore
    "longest_hit": lambda: kind.longest_hit(
      np.ones((1, 4), bool),  # pyright: ignore
      ones * 3 * size,  # pyright: ignore
      ones > 1,  # pyright: ignore
      size,
      1,
    ),
    "published": lambda: kind.published(pages, size, 1, None, (), 0),  # pyright: ignore
  }
  for name, call in calls.items():
    try:
      answer = call()
    except Exception as error:
      raise TypeError(_complaint(kind, name, repr(error))) from error
    if not isinstance(answer, int | np.generic | np.ndarray):
      raise TypeError(_complaint(kind, name, type(answer).__name__))


def _complaint(kind: GroupKind, name: str, answer: str) -> str:
  return (
    f"`{type(kind).__name__}.{name}` must answer for Python numbers and numpy "
    f"arrays, got {answer}; compute with operators, and with numpy for "
    "arguments that are no jax arrays."
  )
