"""Token counts as pages, group by group: each group has a kind and a page size.

Every function takes tokens int32[...] and gives int32[..., G] or bool[..., G],
or the other way round.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import ops
from jaxkv._src.cache.checks import check_shape
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.groups.kinds import GroupKind


def by_group(
  config: CacheConfig, function: Callable[[GroupKind, int], Array]
) -> Array:
  """`function(kind, page_size)` of every group, stacked on a new last axis.

  Equal groups share one computation.
  """
  groups = list(zip(config.groups, config.page_sizes, strict=True))
  results = {group: function(*group) for group in dict.fromkeys(groups)}
  if len(results) == 1:
    result = results[groups[0]][..., None]
    return jnp.broadcast_to(result, (*result.shape[:-1], len(groups)))
  return jnp.stack([results[group] for group in groups], axis=-1)


def pages_for(
  config: CacheConfig, tokens: Array, encoder_tokens: Array
) -> Array:
  """int32[..., G]: columns for int32[...] tokens, and for those of encoders."""
  return by_group(
    config,
    lambda kind, size: kind.num_columns(
      encoder_tokens if kind.holds_encoder else tokens, size
    ),
  )


def full_pages(config: CacheConfig, tokens: Array) -> Array:
  """int32[..., G]: pages that int32[...] tokens fill."""
  return by_group(config, lambda _, size: ops.quotient(tokens, size))


def open_pages(config: CacheConfig, tokens: Array) -> Array:
  """bool[..., G]: whether int32[...] tokens end inside a page."""
  return by_group(
    config,
    lambda kind, size: (
      (ops.remainder(tokens, size) > 0) & (not kind.holds_encoder)
    ),
  )


def skipped_pages(config: CacheConfig, tokens: Array) -> Array:
  """int32[..., G]: leading pages not needed after int32[...] tokens."""
  return by_group(
    config,
    lambda kind, size: ops.quotient(kind.num_skipped_tokens(tokens), size),
  )


def tokens_with_room(config: CacheConfig, columns: Array) -> Array:
  """int32[...]: tokens for which all groups have columns, int32[..., G].

  Scratch pages give no room, and groups of an encoder hold other tokens.
  """
  scratch = [kind.num_speculative for kind in config.groups]
  sizes = [size for size in config.page_sizes]
  if any(scratch):
    columns = jnp.maximum(columns - _of_groups(scratch, columns.shape), 0)
  tokens = columns * _of_groups(sizes, columns.shape)
  if config.holds_encoder:
    most = jnp.int32(jnp.iinfo(jnp.int32).max)
    tokens = jnp.where(holds_encoder(config, columns.shape), most, tokens)
  return jnp.min(tokens, axis=-1)


def too_many(config: CacheConfig, columns: Array) -> Array:
  """bool[R]: whether columns, int32[R, G], are more than a slot has.

  Only scratch pages can be too many for a sequence that fits its slot.
  """
  if not any(kind.num_speculative for kind in config.groups):
    return jnp.bool_(False)
  most = [config.slot_tokens // size for size in config.page_sizes]
  return jnp.any(columns > _of_groups(most, columns.shape), axis=1)


def holds_encoder(config: CacheConfig, shape: tuple[int, ...]) -> Array:
  """bool[..., G] of a shape: the groups that hold an encoder's tokens."""
  held = jnp.asarray([kind.holds_encoder for kind in config.groups])
  return jnp.broadcast_to(held, shape)


def keep_encoder(config: CacheConfig, columns: Array, held: Array) -> Array:
  """int32[..., G]: columns, but those held in groups of an encoder.

  Args:
    config: the cache's groups.
    columns: int32[..., G], by the sequences' own tokens.
    held: int32[..., G], columns in use.
  """
  if not config.holds_encoder:
    return columns
  return jnp.where(holds_encoder(config, columns.shape), held, columns)


def encoder_tokens_or_zeros(
  config: CacheConfig, counts: Array | None, shape: tuple[int, ...]
) -> Array:
  """int32[R]: the argument `num_encoder_tokens`, or zeros for None.

  Raises:
    ValueError: it has another shape, or no group holds such tokens.
  """
  if counts is None:
    return jnp.zeros(shape, jnp.int32)
  check_shape("num_encoder_tokens", counts, shape)
  if not config.holds_encoder:
    raise ValueError(
      "`num_encoder_tokens` must be None without a CrossAttention group; "
      f"`CacheConfig.groups` is {config.groups}."
    )
  return counts


def _of_groups(values: list[int], shape: tuple[int, ...]) -> Array:
  return jnp.broadcast_to(jnp.asarray(values, jnp.int32), shape)
