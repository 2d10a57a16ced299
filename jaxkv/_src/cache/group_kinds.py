"""Kinds of layer groups: rules for the pages and the hits of a group.

Layers with the same cache behaviour form a group. The group's kind is a static
object with pure methods over arrays of R sequences. Users can define further
kinds as subclasses. P is the number of columns in a lookup. The docstring of
`jaxkv` defines the terms.

The methods take JAX arrays, NumPy arrays and Python numbers, because
`jaxkv.host` calls them without a device. A kind whose methods use `jax.numpy`
works in compiled programs only.

`GroupSizes` converts token counts to page counts of every group.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays.arguments import as_count


@dataclasses.dataclass(frozen=True)
class GroupKind:
  """The base of all kinds; its methods are those of full attention.

  Attributes:
    page_size: tokens per page of this group, a multiple of
      `CacheConfig.page_size`; None for `CacheConfig.page_size`.
    pool: the pool of this group's pages, an index into `CacheConfig.num_pages`.

  Raises:
    TypeError: a field is not an int. Fields of subclasses must be ints too.
    ValueError: a field is less than `minimum` in its metadata, by default 1.
  """

  page_size: int | None = dataclasses.field(default=None, kw_only=True)
  pool: int = dataclasses.field(
    default=0, kw_only=True, metadata={"minimum": 0}
  )

  holds_states: ClassVar[bool] = False
  """True if a page holds a recurrent state instead of the K/V of tokens."""

  is_on_device: ClassVar[bool] = True
  """False for kinds that only `jaxkv.host.CacheManager` has."""

  keeps_last_page: ClassVar[bool] = False
  """True if `recycle` never releases the last full page of a sequence."""

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value is not None or field.name != "page_size":
        name = f"{type(self).__name__}.{field.name}"
        count = as_count(name, value, field.metadata.get("minimum", 1))
        object.__setattr__(self, field.name, count)

  @property
  def skips_pages(self) -> bool:
    """True if later tokens stop attending to a sequence's first pages."""
    # The class alone decides, so the answer is static. Programs for kinds that
    # keep all pages contain no code for skipped pages.
    return type(self).num_skipped_tokens is not GroupKind.num_skipped_tokens

  def num_skipped_tokens(self, num_tokens: Array) -> Array:
    """Counts the leading tokens to which no later token attends.

    Args:
      num_tokens: int32[...], the lengths of sequences.

    Returns:
      int32[...]. A page is skipped when all its tokens are skipped.
    """
    return elementwise.zeros_like(num_tokens)

  def longest_hit(
    self, hits: Array, limit: Array, drop: Array, page_size: int, align: int
  ) -> Array:
    """Counts the pages of the longest prefix that a sequence can continue.

    All pages of the prefix must be cached, except the pages that
    `num_skipped_tokens` skips.

    Args:
      hits: bool[R, P], True for columns with a cached page.
      limit: int32[R], the maximal number of tokens, with the page to drop.
      drop: bool[R], True to drop the last page of the longest prefix, because a
        draft model needs that page computed again.
      page_size: tokens per page.
      align: the prefix ends at a multiple of this many pages.

    Returns:
      int32[R].
    """
    xp = elementwise.numpy_for(hits, limit)
    limit_pages = elementwise.quotient(limit, page_size)
    if not self.skips_pages:
      # Every page of the prefix is needed, so it ends before the first miss.
      leading = xp.cumprod(hits, axis=1, dtype=np.int32)
      leading = xp.sum(leading, axis=1, dtype=np.int32)
      num_pages = xp.minimum(leading, limit_pages) - drop.astype(np.int32)
      return elementwise.quotient(xp.maximum(num_pages, 0), align) * align
    # All P + 1 ends are tested at once. If `first_page` and an end have the
    # same number of misses before them, all pages between the two are cached.
    end_page = xp.arange(hits.shape[1] + 1, dtype=np.int32)[None]
    prefix = end_page - drop.astype(np.int32)[:, None]
    skipped = self.num_skipped_tokens(xp.maximum(prefix, 0) * page_size)
    first_page = elementwise.quotient(skipped, page_size)
    misses = xp.cumsum(~hits, axis=1, dtype=np.int32)
    misses = xp.pad(misses, ((0, 0), (1, 0)))
    whole = misses == xp.take_along_axis(misses, first_page, axis=1)
    whole &= end_page <= limit_pages[:, None]
    whole &= elementwise.remainder(prefix, align) == 0
    return xp.max(xp.where(whole, xp.maximum(prefix, 0), 0), axis=1)

  def published(
    self,
    pages: Array,
    page_size: int,
    align: int,
    every: int | None,
    ends: tuple[Array, ...],
    drop: int,
  ) -> Array:
    """Selects the full pages to publish: the pages that a hit can include.

    Args:
      pages: int32[X], the columns of the pages in the page table.
      page_size: tokens per page.
      align: hits end at multiples of this many pages.
      every: a lookup must find a prefix at every multiple of this many pages. 0
        for only the prefixes in `ends`, None for prefixes of every length.
      ends: int32[X] each, the lengths in pages of other prefixes that a lookup
        must find; negative for none. A length includes the page to drop.
      drop: the number of pages, 0 or 1, that a hit drops at its end.

    Returns:
      bool[X].
    """
    return pages >= 0

  def most_pages(self, page_size: int, in_flight: int, longest: int) -> int:
    """Returns the maximal number of pages that one sequence holds.

    Args:
      page_size: tokens per page.
      in_flight: the maximal number of tokens beyond `CacheState.length`.
      longest: tokens of the longest sequence.
    """
    return -(-longest // page_size)

  def num_columns(self, num_tokens: Array, page_size: int) -> Array:
    """Counts the columns for `num_tokens` tokens: int32[...] to int32[...]."""
    return elementwise.quotient(num_tokens + (page_size - 1), page_size)


@dataclasses.dataclass(frozen=True)
class FullAttention(GroupKind):
  """Layers that attend to every earlier token.

  This is also the kind for latent attention (MLA) and attention sinks. Neither
  changes which pages a sequence needs.
  """


@dataclasses.dataclass(frozen=True)
class SlidingWindow(GroupKind):
  """Layers that attend to the last `window` tokens, the query's token included.

  Attributes:
    window: the number of tokens.
  """

  window: int

  def num_skipped_tokens(self, num_tokens: Array) -> Array:
    """See `GroupKind`."""
    return elementwise.maximum(num_tokens - (self.window - 1), 0)

  def longest_hit(
    self, hits: Array, limit: Array, drop: Array, page_size: int, align: int
  ) -> Array:
    """See `GroupKind`."""
    # Hits must equal those of vLLM. If a prefix is shorter than the window,
    # vLLM rounds it down to a multiple of `align` pages, drops the last page,
    # and rounds again. So `align` > 1 costs `align` further pages.
    num_pages = super().longest_hit(hits, limit, drop, page_size, align)
    short = drop & (num_pages * page_size < self.window - 1)
    lost = elementwise.where(short, align if align > 1 else 0, 0)
    return elementwise.maximum(num_pages - lost, 0)

  def published(
    self,
    pages: Array,
    page_size: int,
    align: int,
    every: int | None,
    ends: tuple[Array, ...],
    drop: int,
  ) -> Array:
    """See `GroupKind`. Only the window at the end of a prefix is published."""
    # If the windows of successive prefixes touch, every page is in a window.
    # A token attends to itself and to the `window - 1` tokens before it.
    needed = -(-(self.window - 1) // page_size) + drop
    every = align if every is None else every
    if every and needed >= every:
      return pages >= 0
    is_kept = pages < 0
    if every:
      offset = (pages - drop) % every
      is_kept = (pages >= drop) & (offset >= every - needed)
    for end_page in ends:
      is_kept |= (pages >= end_page - needed) & (pages < end_page)
    return is_kept

  def most_pages(self, page_size: int, in_flight: int, longest: int) -> int:
    """See `GroupKind`. The first page of a window can be partly outside it."""
    tokens = min(self.window - 1 + in_flight, longest)
    return -(-tokens // page_size) + 1


@dataclasses.dataclass(frozen=True)
class ChunkedLocal(GroupKind):
  """Layers that attend to earlier tokens of the same chunk.

  Attributes:
    chunk: tokens per chunk.
  """

  chunk: int

  def num_skipped_tokens(self, num_tokens: Array) -> Array:
    """See `GroupKind`."""
    return elementwise.quotient(num_tokens, self.chunk) * self.chunk

  def most_pages(self, page_size: int, in_flight: int, longest: int) -> int:
    """See `GroupKind`. This is vLLM's bound, for chunks of whole pages."""
    return -(-min(self.chunk + in_flight, longest) // page_size)


@dataclasses.dataclass(frozen=True)
class Recurrent(GroupKind):
  """Layers with a state instead of keys and values, such as Mamba's.

  A page is a snapshot of the state after the page's last token. A sequence
  continues from its last cached snapshot. A page is published when its last
  token is committed. So when a model computes that token, it must write the
  state to the page.
  """

  holds_states: ClassVar[bool] = True

  def num_skipped_tokens(self, num_tokens: Array) -> Array:
    """See `GroupKind`. Only the state of the last token is needed."""
    return elementwise.maximum(num_tokens - 1, 0)

  def longest_hit(
    self, hits: Array, limit: Array, drop: Array, page_size: int, align: int
  ) -> Array:
    """See `GroupKind`."""
    # A draft model has no recurrent states, so no page is dropped for it.
    return super().longest_hit(hits, limit, drop & False, page_size, align)

  def published(
    self,
    pages: Array,
    page_size: int,
    align: int,
    every: int | None,
    ends: tuple[Array, ...],
    drop: int,
  ) -> Array:
    """See `GroupKind`. Only the last state of a prefix is published."""
    if every is None:
      return pages >= 0
    is_kept = pages < 0
    if every:
      is_kept = (pages + 1) % every == 0
    for end_page in ends:
      is_kept |= (end_page > drop) & (pages == end_page - drop - 1)
    return is_kept


@dataclasses.dataclass(frozen=True)
class GroupSizes:
  """Converts token counts to page counts of G groups; see `CacheConfig.sizes`.

  Most methods map token counts, int32[...], to int32[..., G] or bool[..., G].

  Attributes:
    groups: the kind of each group.
    page_sizes: tokens per page of each group.
    slot_tokens: tokens for which one slot has room.
  """

  groups: tuple[GroupKind, ...]
  page_sizes: tuple[int, ...]
  slot_tokens: int

  def by_group(self, function: Callable[[GroupKind, int], Array]) -> Array:
    """Stacks `function(kind, page_size)` of all groups on a new last axis."""
    # Equal groups are computed once. If all groups are equal, the one result is
    # broadcast, so the program does not grow with the number of groups.
    groups = list(zip(self.groups, self.page_sizes, strict=True))
    results = {group: function(*group) for group in dict.fromkeys(groups)}
    if len(results) == 1:
      result = results[groups[0]][..., None]
      return jnp.broadcast_to(result, (*result.shape[:-1], len(groups)))
    return jnp.stack([results[group] for group in groups], axis=-1)

  def columns_for(self, tokens: Array) -> Array:
    """Counts the columns that sequences need: int32[...] to int32[..., G]."""
    return self.by_group(lambda kind, size: kind.num_columns(tokens, size))

  def full_pages(self, tokens: Array) -> Array:
    """Counts the pages that int32[...] tokens fill: int32[..., G]."""
    return self.by_group(lambda _, size: elementwise.quotient(tokens, size))

  def open_pages(self, tokens: Array) -> Array:
    """Returns bool[..., G]: True where int32[...] tokens end inside a page."""
    return self.by_group(
      lambda _, size: elementwise.remainder(tokens, size) > 0
    )

  def skipped_pages(self, tokens: Array) -> Array:
    """Counts the pages skipped after int32[...] tokens: int32[..., G]."""
    return self.by_group(
      lambda kind, size: elementwise.quotient(
        kind.num_skipped_tokens(tokens), size
      )
    )

  def keep_last_page(self, columns: Array, lengths: Array) -> Array:
    """Limits the leading columns to skip, int32[..., G].

    Groups with `keeps_last_page` keep the last full page of sequences of
    `lengths`, int32[...], tokens.
    """
    keeps = [kind.keeps_last_page for kind in self.groups]
    if not any(keeps):
      return columns
    full = self.full_pages(lengths)
    holds_back = _broadcast(keeps, columns).astype(bool) & (full > 0)
    return jnp.where(holds_back, jnp.minimum(columns, full - 1), columns)

  def max_pages(self, in_flight: int, longest: int) -> tuple[int, ...]:
    """Returns the maximum number of pages that one sequence holds, by group.

    In a recurrent group, these are two: the last state at a page end and the
    running state, or the state before a step and that after it. Sequences hold
    no other states if `recycle` comes before each `allocate`.

    Args:
      in_flight: the maximum number of tokens that a step computes.
      longest: tokens of the longest sequence.
    """

    def most(group_kind: GroupKind, page_size: int) -> int:
      if group_kind.holds_states:
        return 2
      pages = group_kind.most_pages(page_size, in_flight, longest)
      # `ChunkedLocal.most_pages` is vLLM's bound, for chunks of whole pages. A
      # chunk of another size can begin inside a page, and needs one more.
      return pages + (
        isinstance(group_kind, ChunkedLocal)
        and group_kind.chunk % page_size > 0
      )

    return tuple(
      min(most(group_kind, page_size), -(-longest // page_size))
      for group_kind, page_size in zip(
        self.groups, self.page_sizes, strict=True
      )
    )

  def tokens_with_room(self, columns: Array) -> Array:
    """Counts the tokens that fit in columns: int32[..., G] to int32[...]."""
    return jnp.min(columns * _broadcast(self.page_sizes, columns), axis=-1)


def _broadcast(values: Sequence[int], columns: Array) -> Array:
  """Broadcasts one value per group to the shape of `columns`, int32[..., G]."""
  return jnp.broadcast_to(jnp.asarray(values, jnp.int32), columns.shape)
