"""Token counts as pages, group by group."""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import ops
from jaxkv._src.cache.groups.kinds import GroupKind


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
    return self.by_group(lambda _, size: ops.quotient(tokens, size))

  def open_pages(self, tokens: Array) -> Array:
    """bool[..., G]: whether int32[...] tokens end inside a page."""
    return self.by_group(
      lambda kind, size: (
        (ops.remainder(tokens, size) > 0) & (not kind.holds_encoder)
      )
    )

  def skipped_pages(self, tokens: Array) -> Array:
    """int32[..., G]: leading pages not needed after int32[...] tokens."""
    return self.by_group(
      lambda kind, size: ops.quotient(kind.num_skipped_tokens(tokens), size)
    )

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
