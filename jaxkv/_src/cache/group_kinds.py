"""Kinds of layer groups: which pages a group keeps, and which of them can hit.

Layers with the same cache behaviour form a group. A kind is a small static
object with a few pure functions over arrays of sequences. A subclass that
overrides them is a kind of your own. Lengths are in tokens; P counts pages of
the group's own size.

`GroupSizes` applies a function of every group to token counts.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing


@dataclasses.dataclass(frozen=True)
class GroupKind:
  """Layers that attend to every earlier token; the base of all kinds.

  Attributes:
    page_size: tokens a page of this group, a multiple of
      `CacheConfig.page_size`; None for that size itself.

  Raises:
    TypeError: a size is not an int.
    ValueError: a size is less than 1.
  """

  page_size: int | None = dataclasses.field(default=None, kw_only=True)

  holds_states: ClassVar[bool] = False
  """Whether a page holds the state after its last token, not K/V of tokens."""

  holds_encoder: ClassVar[bool] = False
  """Whether pages hold the encoder's tokens, not those of the sequence."""

  num_speculative: ClassVar[int] = 0
  """Scratch pages behind the page of the last token."""

  keeps_last_page: ClassVar[bool] = False
  """Whether a running sequence keeps its last full page, needed or not."""

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value, name = getattr(self, field.name), type(self).__name__
      if value is None and field.name == "page_size":
        continue
      if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
          f"`{name}.{field.name}` must be an int, got {value!r} of type "
          f"{type(value).__name__}."
        )
      least = field.metadata.get("least", 1)
      if value < least:
        raise ValueError(
          f"`{name}.{field.name}` must be at least {least}, got {value}."
        )

  @property
  def skips_pages(self) -> bool:
    """Whether a running sequence leaves pages behind."""
    return type(self).num_skipped_tokens is not GroupKind.num_skipped_tokens

  def num_skipped_tokens(self, num_tokens: Array) -> Array:
    """Leading tokens that no token after the first `num_tokens` attends to.

    Args:
      num_tokens: int32[...].

    Returns:
      int32[...]. Pages with no other tokens are no longer needed.
    """
    return jnp.zeros_like(num_tokens)

  def longest_hit(
    self, hits: Array, limit: Array, drop: Array, page_size: int, align: int
  ) -> Array:
    """Pages of the longest prefix from which a sequence can continue.

    Only the pages behind `num_skipped_tokens` of such a prefix must be cached.

    Args:
      hits: bool[R, P], pages that are cached.
      limit: int32[R], tokens of the longest prefix allowed.
      drop: bool[R], whether the prefix leaves out the last page found, which a
        draft model needs computed again.
      page_size: tokens a page.
      align: the prefix ends at a multiple of this many pages.

    Returns:
      int32[R].
    """
    end = jnp.arange(hits.shape[1] + 1, dtype=jnp.int32)[None]
    found = end - drop.astype(jnp.int32)[:, None]
    skipped = self.num_skipped_tokens(jnp.maximum(found, 0) * page_size)
    begin = indexing.quotient(skipped, page_size)
    misses = jnp.cumsum(~hits, axis=1, dtype=jnp.int32)
    misses = jnp.pad(misses, ((0, 0), (1, 0)))
    whole = misses == jnp.take_along_axis(misses, begin, axis=1)
    most = indexing.quotient(limit, page_size)[:, None]
    whole &= (end <= most) & (indexing.remainder(found, align) == 0)
    return jnp.max(jnp.where(whole, jnp.maximum(found, 0), 0), axis=1)

  def published(
    self,
    pages: Array,
    page_size: int,
    align: int,
    every: int | None,
    ends: tuple[Array, ...],
    drop: int,
  ) -> Array:
    """Whether full pages are published: whether they can be part of a hit.

    Args:
      pages: int32[X], their columns in the page table.
      page_size: tokens a page.
      align: hits end at multiples of this many pages.
      every: hits are kept that end at multiples of this many pages; 0 for none
        of them, None for all.
      ends: int32[X] each, pages of further prefixes that are kept, dropped
        pages included; negative for none.
      drop: pages that a hit leaves out at its end, 0 or 1.

    Returns:
      bool[X].
    """
    return pages >= 0

  def most_pages(self, page_size: int, in_flight: int, longest: int) -> int:
    """The most pages that one sequence holds.

    Args:
      page_size: tokens a page.
      in_flight: the most tokens that are allocated at once.
      longest: tokens of the longest sequence.
    """
    return -(-longest // page_size)

  def num_columns(self, num_tokens: Array, page_size: int) -> Array:
    """int32[...]: columns of the page table for int32[...] tokens."""
    pages = indexing.quotient(num_tokens + (page_size - 1), page_size)
    return pages + self.num_speculative


@dataclasses.dataclass(frozen=True)
class FullAttention(GroupKind):
  """Layers that attend to every earlier token.

  Also for latent attention (MLA) and attention sinks: they change the contents
  of a page, not which pages a sequence needs.
  """


@dataclasses.dataclass(frozen=True)
class SlidingWindow(GroupKind):
  """Layers that attend to the last `window` tokens, their own included.

  Attributes:
    window: tokens.
  """

  window: int

  def num_skipped_tokens(self, num_tokens: Array) -> Array:
    """See `GroupKind`."""
    return jnp.maximum(num_tokens - (self.window - 1), 0)

  def longest_hit(
    self, hits: Array, limit: Array, drop: Array, page_size: int, align: int
  ) -> Array:
    """See `GroupKind`.

    As in vLLM, a prefix shorter than the window is aligned twice: before and
    after the last page is left out.
    """
    found = super().longest_hit(hits, limit, drop, page_size, align)
    short = drop & (found * page_size < self.window - 1)
    lost = jnp.where(short, align if align > 1 else 0, 0)
    return jnp.maximum(found - lost, 0)

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
    needed = -(-(self.window - 1) // page_size) + drop
    every = align if every is None else every
    if every and needed >= every:
      return pages >= 0
    kept = pages < 0
    if every:
      place = (pages - drop) % every
      kept = (pages >= drop) & (place >= every - needed)
    for end in ends:
      kept |= (pages >= end - needed) & (pages < end)
    return kept

  def most_pages(self, page_size: int, in_flight: int, longest: int) -> int:
    """See `GroupKind`. A window may begin inside a page."""
    tokens = min(self.window - 1 + in_flight, longest)
    return -(-tokens // page_size) + 1


@dataclasses.dataclass(frozen=True)
class ChunkedLocal(GroupKind):
  """Layers that attend to earlier tokens of their own chunk.

  Attributes:
    chunk: tokens.
  """

  chunk: int

  def num_skipped_tokens(self, num_tokens: Array) -> Array:
    """See `GroupKind`."""
    return indexing.quotient(num_tokens, self.chunk) * self.chunk

  def most_pages(self, page_size: int, in_flight: int, longest: int) -> int:
    """See `GroupKind`."""
    return -(-min(self.chunk + in_flight, longest) // page_size)


@dataclasses.dataclass(frozen=True)
class Recurrent(GroupKind):
  """Layers with a state instead of keys and values, such as Mamba's.

  A page is a snapshot of the state at the page's end. A sequence continues from
  its last cached snapshot. A page is published when tokens past its end are
  committed; a model that computes across a page's end writes its state there.

  Attributes:
    num_speculative: draft tokens, with a scratch page each.
  """

  num_speculative: int = dataclasses.field(  # pyright: ignore
    default=0, metadata={"least": 0}
  )
  holds_states: ClassVar[bool] = True

  def num_skipped_tokens(self, num_tokens: Array) -> Array:
    """See `GroupKind`. Only the state of the last token is needed."""
    return jnp.maximum(num_tokens - 1, 0)

  def longest_hit(
    self, hits: Array, limit: Array, drop: Array, page_size: int, align: int
  ) -> Array:
    """See `GroupKind`. A draft model has no states to compute again."""
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
    kept = pages < 0
    if every:
      kept = (pages + 1) % every == 0
    for end in ends:
      kept |= (end > drop) & (pages == end - drop - 1)
    return kept

  def most_pages(self, page_size: int, in_flight: int, longest: int) -> int:
    """See `GroupKind`. Every page of tokens has a column."""
    return -(-longest // page_size) + self.num_speculative


@dataclasses.dataclass(frozen=True)
class CrossAttention(GroupKind):
  """Layers that attend to the output of an encoder.

  A sequence gets pages for all of the encoder's tokens once and keeps them
  while it runs, whatever its own length. A cache with such a group has no
  prefix cache: page keys do not cover the encoder's input, and K/V depends on
  it.
  """

  holds_encoder: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class GroupSizes:
  """The sizes of G groups: `CacheConfig.sizes`.

  The methods take tokens int32[...] and give int32[..., G] or bool[..., G], or
  the other way round.

  Attributes:
    groups: the kind of each group.
    page_sizes: tokens a page of each group.
    slot_tokens: tokens for which one slot has room.
  """

  groups: tuple[GroupKind, ...]
  page_sizes: tuple[int, ...]
  slot_tokens: int

  def by_group(self, function: Callable[[GroupKind, int], Array]) -> Array:
    """`function(kind, page_size)` of every group, stacked on a new last axis.

    Equal groups share one computation.
    """
    groups = list(zip(self.groups, self.page_sizes, strict=True))
    results = {group: function(*group) for group in dict.fromkeys(groups)}
    if len(results) == 1:
      result = results[groups[0]][..., None]
      return jnp.broadcast_to(result, (*result.shape[:-1], len(groups)))
    return jnp.stack([results[group] for group in groups], axis=-1)

  def columns_for(self, tokens: Array, encoder_tokens: Array) -> Array:
    """int32[..., G]: columns for int32[...] tokens, and those of encoders."""
    return self.by_group(
      lambda kind, size: kind.num_columns(
        encoder_tokens if kind.holds_encoder else tokens, size
      )
    )

  def full_pages(self, tokens: Array) -> Array:
    """int32[..., G]: pages that int32[...] tokens fill."""
    return self.by_group(lambda _, size: indexing.quotient(tokens, size))

  def open_pages(self, tokens: Array) -> Array:
    """bool[..., G]: whether int32[...] tokens end inside a page."""
    return self.by_group(
      lambda kind, size: (
        (indexing.remainder(tokens, size) > 0) & (not kind.holds_encoder)
      )
    )

  def skipped_pages(self, tokens: Array) -> Array:
    """int32[..., G]: leading pages not needed after int32[...] tokens."""
    return self.by_group(
      lambda kind, size: indexing.quotient(
        kind.num_skipped_tokens(tokens), size
      )
    )

  def without_kept(self, columns: Array, lengths: Array) -> Array:
    """int32[..., G]: leading columns not needed, but those that a kind keeps.

    Args:
      columns: int32[..., G].
      lengths: int32[...], tokens of the sequences.
    """
    keeps = [kind.keeps_last_page for kind in self.groups]
    if not any(keeps):
      return columns
    full = self.full_pages(lengths)
    kept = _each(keeps, columns).astype(bool) & (full > 0)
    return jnp.where(kept, jnp.minimum(columns, full - 1), columns)

  def tokens_with_room(self, columns: Array) -> Array:
    """int32[...]: tokens for which all groups have columns, int32[..., G].

    Scratch pages give no room, and groups of an encoder hold other tokens.
    """
    scratch = _each([kind.num_speculative for kind in self.groups], columns)
    tokens = jnp.maximum(columns - scratch, 0) * _each(self.page_sizes, columns)
    most = jnp.int32(jnp.iinfo(jnp.int32).max)
    tokens = jnp.where(self.holds_encoder(columns), most, tokens)
    return jnp.min(tokens, axis=-1)

  def too_many(self, columns: Array) -> Array:
    """bool[R]: whether columns, int32[R, G], are more than a slot has.

    Only scratch pages can be too many for a sequence that fits its slot.
    """
    if not any(kind.num_speculative for kind in self.groups):
      return jnp.bool_(False)
    most = [self.slot_tokens // size for size in self.page_sizes]
    return jnp.any(columns > _each(most, columns), axis=1)

  def holds_encoder(self, columns: Array) -> Array:
    """bool[..., G], as `columns`: the groups that hold an encoder's tokens."""
    held = [kind.holds_encoder for kind in self.groups]
    return _each(held, columns).astype(bool)

  def keep_encoder(self, columns: Array, held: Array) -> Array:
    """int32[..., G]: columns, but those held in groups of an encoder.

    Args:
      columns: int32[..., G], by the sequences' own tokens.
      held: int32[..., G], columns in use.
    """
    if not any(kind.holds_encoder for kind in self.groups):
      return columns
    return jnp.where(self.holds_encoder(columns), held, columns)

  def encoder_tokens(self, counts: Array | None, like: Array) -> Array:
    """int32[R]: the argument `num_encoder_tokens`, or zeros for None.

    Raises:
      ValueError: no group holds such tokens.
    """
    if counts is None:
      return jnp.zeros_like(like)
    if not any(kind.holds_encoder for kind in self.groups):
      raise ValueError(
        "`num_encoder_tokens` must be None without a CrossAttention group; "
        f"`CacheConfig.groups` is {self.groups}."
      )
    return counts


def _each(values: Sequence[int], columns: Array) -> Array:
  """int32[..., G]: one value a group, in the shape of `columns`."""
  return jnp.broadcast_to(jnp.asarray(values, jnp.int32), columns.shape)
