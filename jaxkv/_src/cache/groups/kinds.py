"""Kinds of layer groups: what a group must keep, and what of it can hit.

Layers that cache alike form a group. A kind is a small static object with a few
pure functions over arrays of sequences; a user's own kind is a subclass that
overrides them. Lengths are tokens, P counts pages of the group's own size.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class GroupKind:
  """Layers that attend to everything before; the base of every other kind.

  Attributes:
    page_size: tokens a page of this group, a multiple of
      `CacheConfig.page_size`; None for that size itself.

  Raises:
    TypeError: a size is not an int.
    ValueError: a size is less than 1.
  """

  page_size: int | None = dataclasses.field(default=None, kw_only=True)

  holds_states: ClassVar[bool] = False
  """Whether a page holds the state after its last token, not its tokens."""

  holds_encoder: ClassVar[bool] = False
  """Whether a page holds tokens of an encoder, not those of the sequence."""

  num_speculative: ClassVar[int] = 0
  """Scratch pages behind the last one."""

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value, name = getattr(self, field.name), type(self).__name__
      if value is None and field.name == "page_size":
        continue
      if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
          f"{name}.{field.name} must be an int, got {value!r} of type "
          f"{type(value).__name__}."
        )
      least = field.metadata.get("least", 1)
      if value < least:
        raise ValueError(
          f"{name}.{field.name} must be at least {least}, got {value}."
        )

  def num_skipped(self, num_tokens: Array) -> Array:
    """Leading tokens that no token after the first `num_tokens` attends to.

    Args:
      num_tokens: int32[...].

    Returns:
      int32[...]. Pages that lie wholly before are not needed any more.
    """
    return jnp.zeros_like(num_tokens)

  def longest_hit(
    self, hits: Array, limit: Array, drop: Array, page_size: int, align: int
  ) -> Array:
    """Pages of the longest prefix from which a sequence can go on.

    Of such a prefix only the pages that `num_skipped` leaves must be cached.

    Args:
      hits: bool[R, P], pages that are cached.
      limit: int32[R], tokens of the longest prefix allowed.
      drop: bool[R], whether the last page found is left out of the prefix: a
        draft model needs it computed again.
      page_size: tokens a page.
      align: the prefix must end at a multiple of so many pages.

    Returns:
      int32[R].
    """
    end = jnp.arange(hits.shape[1] + 1, dtype=jnp.int32)[None]
    found = end - drop.astype(jnp.int32)[:, None]
    begin = self.num_skipped(jnp.maximum(found, 0) * page_size) // page_size
    misses = jnp.cumsum(~hits, axis=1, dtype=jnp.int32)
    misses = jnp.pad(misses, ((0, 0), (1, 0)))
    whole = misses == jnp.take_along_axis(misses, begin, axis=1)
    whole &= (end <= limit[:, None] // page_size) & (found % align == 0)
    return jnp.max(jnp.where(whole, jnp.maximum(found, 0), 0), axis=1)

  def reusable(
    self,
    pages: Array,
    page_size: int,
    align: int,
    every: int | None,
    ends: tuple[Array, ...],
    drop: int,
  ) -> Array:
    """Whether pages can ever be part of a hit, so that they are published.

    Args:
      pages: int32[X], counted from the start of their sequences.
      page_size: tokens a page.
      align: prefixes end at multiples of so many pages.
      every: of those, the ones are kept that end at multiples of so many
        pages; 0 for none of them, None for all.
      ends: int32[X], pages of further prefixes that are kept; negative for
        none. They include the pages left out.
      drop: pages found that are left out of the prefix, 0 or 1.

    Returns:
      bool[X].
    """
    return pages >= 0

  def most_pages(self, page_size: int, in_flight: int, longest: int) -> int:
    """Pages that one sequence holds at most.

    Args:
      page_size: tokens a page.
      in_flight: tokens that may be allocated at once.
      longest: tokens of the longest sequence.
    """
    return -(-longest // page_size)

  def num_columns(self, num_tokens: Array, page_size: int) -> Array:
    """Columns of the page table for so many tokens; int32[...] both."""
    return (num_tokens + (page_size - 1)) // page_size + self.num_speculative


@dataclasses.dataclass(frozen=True)
class FullAttention(GroupKind):
  """Layers that attend to every earlier token.

  Latent attention (MLA) and attention sinks change what a page holds, not
  which pages a sequence needs: they are this kind, or a window, too.
  """


@dataclasses.dataclass(frozen=True)
class SlidingWindow(GroupKind):
  """Layers that attend to the last `window` tokens, their own included.

  Attributes:
    window: tokens.
  """

  window: int

  def num_skipped(self, num_tokens: Array) -> Array:
    """See `GroupKind`."""
    return jnp.maximum(num_tokens - (self.window - 1), 0)

  def longest_hit(
    self, hits: Array, limit: Array, drop: Array, page_size: int, align: int
  ) -> Array:
    """See `GroupKind`.

    As in vLLM, a prefix shorter than the window is aligned both before and
    after the last page found is left out.
    """
    found = super().longest_hit(hits, limit, drop, page_size, align)
    short = drop & (found * page_size < self.window - 1)
    lost = jnp.where(short, align if align > 1 else 0, 0)
    return jnp.maximum(found - lost, 0)

  def reusable(
    self,
    pages: Array,
    page_size: int,
    align: int,
    every: int | None,
    ends: tuple[Array, ...],
    drop: int,
  ) -> Array:
    """See `GroupKind`. Only the window at the end of a prefix is."""
    needed = self._pages_back(page_size) + drop
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
    """See `GroupKind`. The window need not begin where a page does."""
    tokens = min(self.window - 1 + in_flight, longest)
    return -(-tokens // page_size) + 1

  def _pages_back(self, page_size: int) -> int:
    return -(-(self.window - 1) // page_size)


@dataclasses.dataclass(frozen=True)
class ChunkedLocal(GroupKind):
  """Layers that attend to earlier tokens of their own chunk.

  Attributes:
    chunk: tokens.
  """

  chunk: int

  def num_skipped(self, num_tokens: Array) -> Array:
    """See `GroupKind`."""
    return num_tokens // self.chunk * self.chunk

  def most_pages(self, page_size: int, in_flight: int, longest: int) -> int:
    """See `GroupKind`."""
    return -(-min(self.chunk + in_flight, longest) // page_size)


@dataclasses.dataclass(frozen=True)
class Recurrent(GroupKind):
  """Layers with a state instead of keys and values, such as Mamba's.

  A page is a snapshot of the state where the page ends; a sequence goes on
  from the last one that is cached. A page is published when tokens are
  committed past its end, so who computes across one writes the state there.

  Attributes:
    num_speculative: tokens that are computed on trial, a scratch page each.
  """

  num_speculative: int = dataclasses.field(  # pyright: ignore
    default=0, metadata={"least": 0}
  )
  holds_states: ClassVar[bool] = True

  def num_skipped(self, num_tokens: Array) -> Array:
    """See `GroupKind`. Only the state of the last token is needed."""
    return jnp.maximum(num_tokens - 1, 0)

  def longest_hit(
    self, hits: Array, limit: Array, drop: Array, page_size: int, align: int
  ) -> Array:
    """See `GroupKind`. A draft model has no states to compute again."""
    return super().longest_hit(hits, limit, drop & False, page_size, align)

  def reusable(
    self,
    pages: Array,
    page_size: int,
    align: int,
    every: int | None,
    ends: tuple[Array, ...],
    drop: int,
  ) -> Array:
    """See `GroupKind`. Of a prefix only its last state is."""
    if every is None:
      return pages >= 0
    kept = pages < 0
    if every:
      kept = (pages + 1) % every == 0
    for end in ends:
      kept |= (end > drop) & (pages == end - drop - 1)
    return kept

  def most_pages(self, page_size: int, in_flight: int, longest: int) -> int:
    """See `GroupKind`. The table has a column for every page of tokens."""
    return -(-longest // page_size) + self.num_speculative


@dataclasses.dataclass(frozen=True)
class CrossAttention(GroupKind):
  """Layers that attend to the output of an encoder.

  A sequence gets their pages once, for all of the encoder's tokens, and keeps
  them while it runs; its own length has no part in it. They are never cached,
  and in a cache with such a group nothing is: what a decoder computes depends
  on the encoder's input, of which page keys know nothing.
  """

  holds_encoder: ClassVar[bool] = True
