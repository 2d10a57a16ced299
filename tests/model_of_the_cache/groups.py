"""Layer groups: the pages that they skip, need and publish."""

import dataclasses

from jaxkv import ChunkedLocal
from jaxkv import FullAttention
from jaxkv import GroupKind
from jaxkv import Recurrent
from jaxkv import SlidingWindow
from jaxkv import StateRetention
from jaxkv.host import CrossAttention
from jaxkv.host import SpeculativeRecurrent
from tests.model_of_the_cache.pool import NULL

_NOWHERE = 2**40
"""The length of a prompt if there is none: past all pages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """The rules that all groups of a cache share.

  Attributes:
    page_size: tokens a key; page sizes are multiples of it.
    align: all groups end a page at multiples of this many tokens.
    classic: True for the older rules of lookups and publication.
    draft: True if a draft model needs the last page computed again.
    retention: the retained prefixes of windows and states. None: every position
      where a hit can end; 0: the latest; k: every k tokens and the latest.
    states: the states that are kept; None if `retention` decides.
  """

  page_size: int
  align: int
  classic: bool = False
  draft: bool = False
  retention: int | None = None
  states: StateRetention | None = None


def ceil_div(tokens: int, page_size: int) -> int:
  """Returns the number of pages of `page_size` tokens."""
  return -(-tokens // page_size)


@dataclasses.dataclass(frozen=True)
class Group:
  """A group of layers; equal groups are looked up together.

  Attributes:
    kind: the kind. Only its type and its sizes are used, not its methods.
    size: tokens a page.
    rules: the rules of the cache.
  """

  kind: GroupKind
  size: int
  rules: Rules

  @property
  def is_full(self) -> bool:
    """True if the group attends to all tokens."""
    return isinstance(self.kind, FullAttention)

  @property
  def is_cross(self) -> bool:
    """True if the pages hold an encoder's tokens."""
    return isinstance(self.kind, CrossAttention)

  @property
  def holds_states(self) -> bool:
    """True if a page is a snapshot of a state at the page's end."""
    return isinstance(self.kind, Recurrent)

  @property
  def scratch(self) -> int:
    """The number of scratch pages after the last page."""
    drafts = isinstance(self.kind, SpeculativeRecurrent)
    return self.kind.num_speculative if drafts else 0

  def pages_for(self, tokens: int, encoder: int = 0) -> int:
    """Counts the columns for tokens, or for tokens of the encoder."""
    columns = ceil_div(encoder if self.is_cross else tokens, self.size)
    return columns + self.scratch

  def full_pages(self, tokens: int) -> int:
    """Counts the pages that tokens fill."""
    return tokens // self.size

  def grown(
    self, pages: list[int], stop_column: int, is_new: bool, length: int = 0
  ) -> list[int]:
    """Returns the table before its last columns up to `stop_column` are popped.

    Of the states only the running one gets a page. The scratch pages follow it,
    the existing ones first. A state after `length` tokens that is not at a page
    end may move to the last column.
    """
    if not self.holds_states or stop_column <= len(pages):
      return list(pages)
    is_open = not is_new and len(pages) * self.size > length
    if self.rules.states is not None and is_open:
      num_new = stop_column - len(pages)
      return [*pages[:-1], *[NULL] * num_new, pages[-1]]
    running_column = stop_column - self.scratch - 1
    num_held = len(pages)
    table = pages + [NULL] * (running_column - num_held)
    if not is_new:
      for column in range(
        num_held - self.scratch, min(num_held, running_column)
      ):
        table.append(table[column])
        table[column] = NULL
    return table

  def most_pages(self, longest: int, in_flight: int) -> int | None:
    """Returns the maximal pages of a sequence at any time; None for no bound.

    Args:
      longest: tokens of the longest sequence.
      in_flight: tokens that steps in flight may still write.
    """
    match self.kind:
      case SlidingWindow(window=window):
        tokens = min(window - 1 + in_flight, longest)
        return ceil_div(tokens, self.size) + 1
      case ChunkedLocal(chunk=chunk):
        return ceil_div(min(chunk + in_flight, longest), self.size)
      case _:
        return None

  def skipped_tokens(self, tokens: int) -> int:
    """Counts the leading tokens that no token after `tokens` attends to."""
    match self.kind:
      case SlidingWindow(window=window):
        return max(0, tokens - window + 1)
      case ChunkedLocal(chunk=chunk):
        return tokens // chunk * chunk
      case Recurrent():
        return max(0, tokens - 1)
      case _:
        return 0

  def skipped_pages(self, tokens: int) -> int:
    """Counts the leading pages that no token after `tokens` attends to."""
    return self.skipped_tokens(tokens) // self.size

  def passed_pages(self, pages: list[int], tokens: int) -> int:
    """Counts the leading pages of a table that `recycle` releases.

    The last state at a page end may have to stay.
    """
    num_skipped = min(self.skipped_pages(tokens), len(pages))
    if self.rules.states is None or not self.holds_states:
      return num_skipped
    full = pages[: self.full_pages(tokens)]
    ends = [column for column, page in enumerate(full) if page != NULL]
    return min(num_skipped, ends[-1]) if ends else num_skipped

  def reason(self, end: int, prompt: int, shared: list[int]) -> int:
    """Returns why a state after `end` tokens is kept; 0 for no reason."""
    if self.rules.states is None or not self.holds_states:
      return 2
    align = self.rules.align
    interval = self.rules.states.interval
    if any(end == tokens // align * align for tokens in shared):
      return 2
    if interval and end % interval == 0:
      return 2
    longest = max(prompt - 1, 0) // align * align
    longest = max(longest - self.rules.draft * align, 0)
    return int(end in (longest, longest - align))

  def settled_pages(self, tokens: int) -> int:
    """Counts the pages that are considered for publication.

    Hits end where all groups have whole pages, so a page after the last such
    position is useless so far, except for one page that a draft model needs.
    """
    if self.rules.classic:
      return self.full_pages(tokens)
    aligned = tokens // self.rules.align * self.rules.align
    if self.rules.draft and aligned > 0:
      return self.full_pages(min(tokens, aligned + self.size))
    return self.full_pages(aligned)

  def is_published(self, column: int, prompt: int, junction: int) -> bool:
    """Returns True if a page can ever be part of a hit.

    Args:
      column: the column of the page.
      prompt: tokens with which the sequence was admitted; 0 for no prompt.
      junction: where it diverged from tokens that some groups had; 0 for none.
    """
    if self.rules.classic:
      return True
    if self.rules.states is not None:
      end = (column + 1) * self.size
      return not self.holds_states or end % self.rules.align == 0
    ends = self._kept_ends(prompt or _NOWHERE, junction)
    match self.kind:
      case SlidingWindow():
        return self._window_is_published(column, ends)
      case Recurrent():
        return self._state_is_published(column, ends)
      case _:
        return True

  @property
  def window_pages(self) -> int:
    """The number of pages before a token that its window can reach."""
    return ceil_div(self.kind.window - 1, self.size)

  def _window_is_published(self, column, ends):
    shift = int(self.rules.draft)
    retention = self.rules.retention
    need = self.window_pages + shift
    segment = self.rules.align if retention is None else retention
    if segment:
      period = segment // self.size
      if need >= period:
        return True
      if column >= shift and (column - shift) % period >= period - need:
        return True
    if retention is None:
      return False
    return any(page + shift - need <= column < page + shift for page in ends)

  def _state_is_published(self, column, ends):
    retention = self.rules.retention
    if retention is None:
      return True
    if retention and (column + 1) * self.size % retention == 0:
      return True
    return any(column == page - 1 for page in ends)

  def _kept_ends(self, prompt, junction):
    """Returns where a repeated, longer or diverging prompt would continue."""
    align = self.rules.align
    tokens = [prompt - 1] + [junction] * (junction > 0)
    if self.rules.draft:
      repeated = (prompt - 1) // align * align
      extended = prompt // align * align
      tokens = [max(repeated - align, 0), max(extended - align, 0)]
      tokens += [junction, junction - self.size] * (junction > 0)
    return [length // align * align // self.size for length in tokens]
