"""Pages of sequences by group: every group has a kind and a page size."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache.checks import check_array
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.groups.kinds import GroupKind


def by_group(
  config: CacheConfig, function: Callable[[GroupKind, int], Array]
) -> Array:
  """`function(kind, page_size)` of every group, stacked on a new last axis.

  Groups that are alike share one computation.

  Args:
    config: the cache's groups.
    function: returns int32[...] or bool[...], the same shape for all.

  Returns:
    int32[..., G] or bool[..., G].
  """
  groups = list(zip(config.groups, config.page_sizes, strict=True))
  results = {group: function(*group) for group in dict.fromkeys(groups)}
  if len(results) == 1:
    result = results[groups[0]][..., None]
    return jnp.broadcast_to(result, (*result.shape[:-1], len(groups)))
  return jnp.stack([results[group] for group in groups], axis=-1)


def pages_for(
  config: CacheConfig, tokens: Array, encoder: Array | None = None
) -> Array:
  """Pages that hold so many tokens.

  Args:
    config: the cache's groups.
    tokens: int32[...].
    encoder: int32[...], tokens of their encoders; None for none.

  Returns:
    int32[..., G].
  """

  def columns(kind: GroupKind, size: int) -> Array:
    if not kind.holds_encoder:
      return kind.num_columns(tokens, size)
    counts = jnp.zeros_like(tokens) if encoder is None else encoder
    return kind.num_columns(counts, size)

  return by_group(config, columns)


def encoder_or_none(
  config: CacheConfig, counts: Array | None, shape: tuple[int, ...]
) -> Array:
  """int32[R]: the argument `num_encoder_tokens`, or zeros for None.

  Raises:
    ValueError: it is not int32 of this shape, or no group holds such tokens.
  """
  if counts is None:
    return jnp.zeros(shape, jnp.int32)
  check_array("num_encoder_tokens", counts, shape, jnp.int32)
  if not config.holds_encoder:
    raise ValueError(
      "num_encoder_tokens is for caches with a CrossAttention group, and "
      f"CacheConfig.groups is {config.groups}."
    )
  return counts


def or_encoder(config: CacheConfig, columns: Array, held: Array) -> Array:
  """int32[..., G]: columns, but for groups of an encoder those that are held.

  Args:
    config: the cache's groups.
    columns: int32[..., G], by the sequences' own tokens.
    held: int32[..., G], columns in use.
  """
  if not config.holds_encoder:
    return columns
  return jnp.where(holds_encoder(config, columns.shape), held, columns)


def tokens_with_room(config: CacheConfig, columns: Array) -> Array:
  """int32[...]: tokens for which all groups have these columns int32[..., G].

  Scratch pages are no room, and groups of an encoder hold none of the tokens.
  """
  if config.holds_states:
    scratch = [kind.num_speculative for kind in config.groups]
    scratch = jnp.broadcast_to(jnp.asarray(scratch, jnp.int32), columns.shape)
    columns = jnp.maximum(columns - scratch, 0)
  sizes = jnp.asarray(config.page_sizes, jnp.int32)
  tokens = columns * jnp.broadcast_to(sizes, columns.shape)
  if config.holds_encoder:
    most = jnp.int32(jnp.iinfo(jnp.int32).max)
    tokens = jnp.where(holds_encoder(config, columns.shape), most, tokens)
  return jnp.min(tokens, axis=-1)


def holds_encoder(config: CacheConfig, shape: tuple[int, ...]) -> Array:
  """bool[..., G] of a shape: the groups that hold an encoder's tokens."""
  held = jnp.asarray([kind.holds_encoder for kind in config.groups])
  return jnp.broadcast_to(held, shape)


def overfull(config: CacheConfig, columns: Array) -> Array:
  """bool[R]: whether so many columns, int32[R, G], are more than there are.

  Only scratch pages can be too many for a sequence that fits its slot.
  """
  if not config.holds_states:
    return jnp.bool_(False)
  most = [[config.slot_tokens // size for size in config.page_sizes]]
  return jnp.any(columns > jnp.asarray(most, jnp.int32), axis=1)


def full_pages(config: CacheConfig, tokens: Array) -> Array:
  """int32[..., G]: pages that so many tokens, int32[...], fill."""
  return by_group(config, lambda _, size: tokens // size)


def open_pages(config: CacheConfig, tokens: Array) -> Array:
  """bool[..., G]: whether tokens, int32[...], end inside a page."""
  return by_group(
    config, lambda kind, size: (tokens % size > 0) & (not kind.holds_encoder)
  )


def skipped_pages(config: CacheConfig, tokens: Array) -> Array:
  """int32[..., G]: leading pages not needed after tokens, int32[...]."""
  return by_group(config, lambda kind, size: kind.num_skipped(tokens) // size)


def final_pages(config: CacheConfig, tokens: Array) -> Array:
  """int32[..., G]: pages whose keys are settled when tokens are committed.

  Hits end where all groups have a whole page, so pages past the last such
  place wait. With a draft model a group may need one page more than the hit.
  """
  aligned = tokens // config.alignment * config.alignment

  def settled(_, size: int) -> Array:
    if config.classic:
      return tokens // size
    if not config.draft_model:
      return aligned // size
    one_more = jnp.minimum(tokens, aligned + size)
    return jnp.where(aligned > 0, one_more, aligned) // size

  return by_group(config, settled)


def reusable(
  config: CacheConfig,
  pages: Array,
  group: Array,
  prompt: Array | None,
  junction: Array | None,
) -> Array:
  """bool[X]: whether pages can be part of a hit, by their groups.

  Args:
    config: the cache's groups.
    pages: int32[X], counted from the start of their sequence.
    group: int32[X].
    prompt: int32[X], `SlotHashes.prompt` of their sequences.
    junction: int32[X], `SlotHashes.junction` of their sequences.
  """
  if config.classic:
    return pages >= 0

  def kept(kind: GroupKind, size: int) -> Array:
    ends = ()
    if prompt is not None and junction is not None:
      ends = tuple(
        jnp.where(at >= 0, _end(config, at, size), -1)
        for at in _kept_prefixes(config, prompt, junction, size)
      )
    drop = int(config.draft_model)
    every = None if config.retention is None else config.retention // size
    align = config.alignment // size
    return kind.reusable(pages, size, align, every, ends, drop)

  numbers = jnp.arange(config.num_groups, dtype=jnp.int32)[None]
  own = group[:, None] == numbers
  return jnp.any(by_group(config, kept) & own, axis=-1)


def _end(config: CacheConfig, tokens: Array, size: int) -> Array:
  """int32[X]: pages of the longest hit in so many tokens, and one dropped."""
  aligned = tokens // config.alignment * config.alignment
  return aligned // size + int(config.draft_model)


def _kept_prefixes(
  config: CacheConfig, prompt: Array, junction: Array, size: int
) -> tuple[Array, ...]:
  """int32[X] each: tokens after which sequences may go on; negative for none.

  Where the same prompt would, a longer one, and one that shares as much as an
  earlier one did. With a draft model the hit ends a page earlier.
  """
  junction = jnp.where(junction > 0, junction, -1)
  if not config.draft_model:
    return prompt - 1, junction
  align = config.alignment
  again, longer = (prompt - 1) // align * align, prompt // align * align
  before = jnp.where(junction > 0, junction - size, -1)
  return (
    *(
      jnp.where(prompt > 0, jnp.maximum(end - align, 0), -1)
      for end in (again, longer)
    ),
    junction,
    before,
  )
