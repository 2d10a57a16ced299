"""A shadow K/V memory: it stores the name of the content of every page.

K/V depends on a token, on all tokens before it, on the salt and on the weights.
Names are equal if and only if all of these are equal. A name is derived from
the name before it, independently of the cache's keys.
"""

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import ChunkedLocal
from jaxkv import Recurrent
from jaxkv import SlidingWindow
from jaxkv._src.cache.pool import page_pool
from jaxkv.results import Moves


class FalseContent(AssertionError):
  """A page does not hold the content that a reader relies on."""


class Names:
  """Numbers contents; equal contents get equal numbers."""

  def __init__(self):
    self._numbers: dict[tuple, int] = {}
    self._contents: list[tuple] = [()]

  def of(self, *content: object) -> int:
    """Returns the number of a content."""
    name = self._numbers.setdefault(content, len(self._contents))
    if name == len(self._contents):
      self._contents.append(content)
    return name

  def continued(self, name: int, tokens: list[int], epoch: int) -> list[int]:
    """Returns the names of tokens that follow a name."""
    names = []
    for token in tokens:
      name = self.of(name, token, epoch)
      names.append(name)
    return names

  def last_tokens(self, name: int, count: int) -> tuple[int, ...]:
    """Returns the tokens that end at a name."""
    tokens = []
    for _ in range(count):
      name, token, _ = self._contents[name]
      tokens.append(token)
    return tuple(tokens[::-1])


class ShadowMemory:
  """The content of a cache's pages, and the references to them.

  A page of K/V holds a name for each token; a page of states holds one name, in
  its first column. Names differ between groups, as their layers do.

  Attributes:
    config: the cache's config.
    content: names by page id, and 0 where nothing was written; pages in
      offload memory included.  # int64[X, S]
    table: the last page table.  # int32[B, G, M]
    length: the last lengths.  # int32[B]
    cached: True for pages in the index, by id.  # bool[X]
    held: entries of the page table for each page.  # int64[N]
    pins: pins of each page.  # int64[N]
    pinned: full pinned pages, which must not be written to.
    num_writes: the number of page writes.
  """

  def __init__(self, config: jaxkv.CacheConfig):
    self.config = config
    pages = config.total_pages
    num_pages = max(config.num_numbers, pages + 1)
    self.content = np.zeros((num_pages, max(config.page_sizes)), np.int64)
    self.pins = np.zeros(pages, np.int64)
    self.pinned: set[int] = set()
    self.num_writes = 0
    self.look(jaxkv.init(config))

  def look(self, state: jaxkv.CacheState, moves: Moves | None = None) -> None:
    """Reads tables, lengths and cached pages of a state, and makes moves."""
    if moves is not None:
      self.move(moves)
    self.table, self.length, self.cached = jax.device_get(_seen(state))
    entries = self.table.ravel()
    counts = np.bincount(entries, minlength=self.config.total_pages + 1)
    counts[0] = 0
    self.held = counts[: self.config.total_pages]

  # --- who relies on pages ---------------------------------------------------

  @property
  def refs(self) -> np.ndarray:
    """int64[N]: references, pins included."""
    return self.held + self.pins

  @property
  def used(self) -> np.ndarray:
    """int64[B, G]: columns in use."""
    return np.sum(self.table != self.config.no_page, axis=2)

  def room(self, slot: int) -> int:
    """Returns the tokens for which every group of a slot has pages."""
    config = self.config
    pairs = zip(config.page_sizes, self.used[slot], strict=True)
    return min(int(num_held) * page_size for page_size, num_held in pairs)

  def pin(self, pages: np.ndarray) -> None:
    """Pins pages; full ones must not be written to any more."""
    np.add.at(self.pins, pages, 1)
    full = self._full_pages()
    self.pinned |= {
      page for page in pages.tolist() if self.cached[page] or page in full
    }

  def unpin(self, pages: np.ndarray) -> None:
    """Removes pins."""
    np.subtract.at(self.pins, pages, 1)
    if self.pins.min() < 0:
      raise FalseContent("a pin was given back twice")
    self.pinned = {page for page in self.pinned if self.pins[page]}

  def _full_pages(self) -> set[int]:
    """Returns the pages that the tokens of a slot fill."""
    full = set()
    for group, page_size in enumerate(self.config.page_sizes):
      ends = np.arange(1, self.table.shape[2] + 1) * page_size
      inside = ends[None] <= self.length[:, None]
      full |= set(self.table[:, group][inside].tolist())
    return full

  # --- writing ---------------------------------------------------------------

  def write_expert_ids(
    self, slot: int, group: int, start: int, names: list[int]
  ) -> None:
    """Writes K/V at positions `start`, `start + 1` ... of a slot."""
    page_size = self.config.page_sizes[group]
    position = np.arange(start, start + len(names))
    pages = self.table[slot, group, position // page_size]
    for page in set(pages.tolist()):
      self._check_writable(page)
    self.content[pages, position % page_size] = self._in_group(names, group)

  def write_states(
    self, slot: int, group: int, start: int, names: list[int]
  ) -> None:
    """Writes the states at the ends of pages, and the last one."""
    page_size = self.config.page_sizes[group]
    num_tokens = start + len(names)
    num_pages = -(-num_tokens // page_size) if names else 0
    for column in range(start // page_size, num_pages):
      page = int(self.table[slot, group, column])
      if page:
        stop_token = min((column + 1) * page_size, num_tokens)
        self.write_page(page, group, names[stop_token - start - 1])

  def write_page(self, page: int, group: int, name: int) -> None:
    """Writes a whole page."""
    self._check_writable(page)
    self.content[page] = self._in_group(name, group)

  def move(self, moves: Moves) -> None:
    """Makes moves to and from offload memory."""
    first_page = self.config.no_page + 1
    for index in range(int(moves.count)):
      page = moves.page[index]
      source = moves.restored_from[index]
      target = moves.saved_to[index]
      has_source = source < Moves.NONE
      restored = self.content[first_page + source].copy() if has_source else 0
      if target < Moves.NONE:
        self.content[first_page + target] = self.content[page]
      # Without a content to restore, the page is as good as never written.
      self.content[page] = restored

  def copy(self, src: np.ndarray, dst: np.ndarray) -> int:
    """Makes the copies that a verb returned; returns their number."""
    is_copy = dst != self.config.no_page
    src = src[is_copy]
    dst = dst[is_copy]
    if len(set(dst.tolist())) < len(dst):
      raise FalseContent(f"several copies to one page: {dst}")
    content = self.content[src]
    for page in dst.tolist():
      self._check_writable(page)
    self.content[dst] = content
    return len(dst)

  def _check_writable(self, page: int) -> None:
    wrongs = {
      "page that does not exist": not 0 < page < self.config.no_page,
      "cached page": self.cached[page % self.config.total_pages],
      "shared page": self.held[page % self.config.total_pages] != 1,
      "pinned page": page in self.pinned,
    }
    for name, wrong in wrongs.items():
      if wrong:
        raise FalseContent(f"a {name} is written to: {page}")
    self.num_writes += 1

  # --- reading ---------------------------------------------------------------

  def wrong(
    self, group: int, pages: np.ndarray, names: np.ndarray, lengths: np.ndarray
  ) -> np.ndarray:
    """Finds tokens or states whose content is not the expected one.

    Args:
      group: the group of the pages.
      pages: int32[R, M], the pages of R sequences in order.
      names: int64[R, T], the names of their tokens.
      lengths: int32[R].

    Returns:
      bool[R, X]; False for null pages and pages that do not exist.
    """
    group_kind = self.config.groups[group]
    page_size = self.config.page_sizes[group]
    exists = (pages > 0) & (pages != self.config.no_page)
    lengths = lengths[:, None]
    if group_kind.holds_states:
      first_token = np.arange(pages.shape[1])[None] * page_size
      stop_token = np.minimum(first_token + page_size, lengths)
      last_token = np.maximum(stop_token - 1, 0)
      expected = np.take_along_axis(names, last_token, axis=1)
      content = self.content[pages, 0]
      inside = first_token < lengths
    else:
      content = self.content[pages][..., :page_size].reshape(len(pages), -1)
      expected = names[:, : content.shape[1]]
      exists = np.repeat(exists, page_size, axis=1)
      inside = np.arange(content.shape[1])[None] < lengths
    return inside & exists & (content != self._in_group(expected, group))

  def lacks_state(self, group: int, names: np.ndarray) -> np.ndarray:
    """bool[B]: slots without the state after their last name, int64[B, T]."""
    page_size = self.config.page_sizes[group]
    table = self.table[:, group]
    last_token = np.maximum(self.length - 1, 0)
    column = last_token // page_size
    if self.config.state_retention is not None:
      # A state that is not at a page end is in the last column in use.
      num_columns = np.sum(table != self.config.no_page, axis=1)
      column = np.where(self.length % page_size, num_columns - 1, column)
    slots = np.arange(len(table))
    pages = table[slots, column]
    expected = self._in_group(names[slots, last_token], group)
    holds_state = (pages > 0) & (pages != self.config.no_page)
    holds_state &= self.content[pages, 0] == expected
    return (self.length > 0) & ~holds_state

  def missing(self, group: int) -> np.ndarray:
    """bool[B, M]: columns of slots without a page that the next token needs."""
    group_kind = self.config.groups[group]
    page_size = self.config.page_sizes[group]
    pages = self.table[:, group]
    lengths = self.length[:, None]
    first_token = np.arange(pages.shape[1])[None] * page_size
    stop_token = np.minimum(first_token + page_size, lengths)
    needed = stop_token > num_skipped_tokens(group_kind, lengths)
    has_no_page = pages == self.config.no_page
    return (first_token < lengths) & (has_no_page | ((pages == 0) & needed))

  def _in_group(self, names, group: int) -> np.ndarray:
    """Returns the names as the layers of one group write them."""
    return np.asarray(names, np.int64) * self.config.num_groups + group


def num_skipped_tokens(
  group_kind: jaxkv.GroupKind, length: np.ndarray
) -> np.ndarray:
  """Returns the leading tokens to which no token after `length` attends."""
  match group_kind:
    case SlidingWindow(window):
      return np.maximum(length - (window - 1), 0)
    case ChunkedLocal(chunk):
      return length // chunk * chunk
    case Recurrent():
      return np.maximum(length - 1, 0)
  return np.zeros_like(length)


@jax.jit
def _seen(state: jaxkv.CacheState):
  num_pages = max(state.config.num_numbers, state.config.total_pages)
  pages = jnp.arange(num_pages, dtype=jnp.int32)
  cached = page_pool.is_cached(state.pool, pages)
  return state.page_table, state.length, cached
