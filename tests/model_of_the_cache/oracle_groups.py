"""What each group of the oracle needs, settles and keeps (SEMANTICS 4.5-4.8).

Rules that the reference systems have too are those of `reference_kinds.py`.
"""

import dataclasses
import types

from jaxkv import CacheConfig
from jaxkv import CrossAttention
from jaxkv import FullAttention
from jaxkv import GroupKind
from jaxkv import Recurrent
from tests.model_of_the_cache.oracle_pool import NULL
from tests.model_of_the_cache.reference_kinds import Rules
from tests.model_of_the_cache.reference_kinds import ceil_div
from tests.model_of_the_cache.reference_kinds import reachable
from tests.model_of_the_cache.reference_kinds import skipped_tokens

_NOWHERE = 2**40
"""The end of a prompt that there is none of, behind all pages."""


@dataclasses.dataclass(frozen=True)
class Group:
  """A group of layers; equal ones are looked up together.

  Attributes:
    kind: its kind, with its page size.
    size: tokens a page.
    config: the cache that it belongs to.
  """

  kind: GroupKind
  size: int
  config: CacheConfig

  @property
  def is_full(self) -> bool:
    """Whether it attends to everything."""
    return isinstance(self.kind, FullAttention)

  @property
  def is_cross(self) -> bool:
    """Whether its pages are for an encoder's tokens."""
    return isinstance(self.kind, CrossAttention)

  @property
  def scratch(self) -> int:
    """Scratch pages behind the last one."""
    return getattr(self.kind, "num_speculative", 0)

  @property
  def holds_states(self) -> bool:
    """Whether a page is a snapshot where it ends."""
    return isinstance(self.kind, Recurrent)

  def pages_for(self, tokens: int, encoder: int = 0) -> int:
    """Columns for so many tokens, or so many of the encoder."""
    columns = ceil_div(encoder if self.is_cross else tokens, self.size)
    return columns + self.scratch

  def grown(self, pages: list[int], stop: int, begins: bool) -> list[int]:
    """The table before its last columns up to `stop` are popped.

    Of states only the running one has a page, and behind it stand the scratch
    pages, those there are before the new ones (4.9).
    """
    if not self.holds_states or stop <= len(pages):
      return list(pages)
    running, before = stop - self.scratch - 1, len(pages)
    table = pages + [NULL] * (running - before)
    if not begins:
      for column in range(before - self.scratch, min(before, running)):
        table.append(table[column])
        table[column] = NULL
    return table

  def full_pages(self, tokens: int) -> int:
    """Pages that so many tokens fill."""
    return tokens // self.size

  def skipped_pages(self, tokens: int) -> int:
    """Leading pages that nothing behind so many tokens looks at."""
    return max(skipped_tokens(self.kind, tokens) // self.size, 0)

  def settled_pages(self, tokens: int) -> int:
    """Pages whose turn to be published has come (4.8).

    Hits end where all groups have whole pages, so no page behind the last such
    place is of use yet, but for the one that a draft model asks for.
    """
    if self.config.classic:
      return self.full_pages(tokens)
    aligned = tokens // self.config.alignment * self.config.alignment
    if self.config.draft_model and aligned > 0:
      return self.full_pages(min(tokens, aligned + self.size))
    return self.full_pages(aligned)

  def is_published(self, column: int, prompt: int, junction: int) -> bool:
    """Whether a page can ever be part of a hit (4.8).

    Args:
      column: of the page.
      prompt: tokens that the sequence was admitted with; 0 for no prompt.
      junction: where it turned off from what some groups had; 0 for nowhere.
    """
    request = types.SimpleNamespace(
      num_prompt_tokens=prompt or _NOWHERE, shared_prefix_boundary=junction
    )
    return reachable(self.kind, column, request, self.rules())

  def rules(self) -> Rules:
    """The options of the cache as the reference systems name them."""
    return Rules(
      classic=self.config.classic,
      caching=True,
      eagle=self.config.draft_model,
      hybrid=self.config.num_groups > 1,
      hash_size=self.config.page_size,
      align=self.config.alignment,
      max_model_len=self.config.slot_tokens,
      max_in_flight=self.config.slot_tokens,
      retention=self.config.retention,
    )


def groups_of(config: CacheConfig) -> list[Group]:
  """The groups of a cache."""
  return [
    Group(dataclasses.replace(kind, page_size=size), size, config)
    for kind, size in zip(config.groups, config.page_sizes, strict=True)
  ]
