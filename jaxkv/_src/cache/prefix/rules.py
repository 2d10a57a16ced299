"""Which full pages are published, and which prefixes may hit.

The one place that reads `CacheConfig.prefix_rules`, `use_eagle` and
`prefix_retention_interval`.
"""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import GroupKind


def final_pages(config: CacheConfig, tokens: Array) -> Array:
  """int32[..., G]: pages that have their key when tokens are committed.

  A hit ends where every group ends a page. Pages past the last such position
  get their keys later. With a draft model a group may need one page more.
  """
  aligned = indexing.quotient(tokens, config.alignment) * config.alignment

  def final(_, size: int) -> Array:
    if config.prefix_rules == "classic":
      return indexing.quotient(tokens, size)
    if not config.use_eagle:
      return indexing.quotient(aligned, size)
    one_more = jnp.minimum(tokens, aligned + size)
    return indexing.quotient(jnp.where(aligned > 0, one_more, aligned), size)

  return config.sizes.by_group(final)


def published(
  config: CacheConfig,
  pages: Array,
  group: Array,
  prompt_length: Array | None,
  boundary: Array | None,
) -> Array:
  """bool[X]: whether full pages are published: whether they can be hit.

  Args:
    config: the cache's groups and rules.
    pages: int32[X], their columns in the page table.
    group: int32[X], their groups.
    prompt_length: int32[X], `SlotHashes.prompt_length` of their sequences.
    boundary: int32[X], `SlotHashes.shared_prefix_boundary` of them.
  """
  if config.prefix_rules == "classic":
    return pages >= 0

  def kept(kind: GroupKind, size: int) -> Array:
    ends = ()
    if prompt_length is not None and boundary is not None:
      ends = tuple(
        jnp.where(end >= 0, _hit_pages(config, end, size), -1)
        for end in _kept_prefixes(config, prompt_length, boundary, size)
      )
    interval = config.prefix_retention_interval
    return kind.published(
      pages,
      size,
      config.alignment // size,
      None if interval is None else interval // size,
      ends,
      int(config.use_eagle),
    )

  numbers = jnp.arange(config.num_groups, dtype=jnp.int32)[None]
  own = group[:, None] == numbers
  return jnp.any(config.sizes.by_group(kept) & own, axis=-1)


def lookup_bound(
  config: CacheConfig,
  kind: GroupKind,
  size: int,
  length: Array,
  num_hashed: Array,
  dropped: Array,
) -> tuple[Array, Array]:
  """How far a kind looks for a prefix, and whether it drops its last page.

  With a draft model, a kind looks one page past the prefix and leaves out the
  last page found. It does so once for each length; otherwise every round would
  leave out one more page, as it does under the classic rules.

  Args:
    config: the cache's groups and rules.
    kind: of one group.
    size: its tokens a page.
    length: int32[R], tokens of the prefix so far.
    num_hashed: int32[R], tokens that have a key.
    dropped: bool[R], whether the kind dropped a page at this length.

  Returns:
    int32[R], tokens, and bool[R].
  """
  drop = config.use_eagle & ~dropped
  if config.prefix_rules == "classic":
    return length, drop | config.use_eagle
  beyond = drop & (not kind.holds_states)
  further = jnp.minimum(length + size, num_hashed)
  return jnp.where(beyond, further, length), drop


def drops_last_page(config: CacheConfig, drop: Array) -> Array:
  """`drop`, bool[R], for a draft model; False without one."""
  return drop & config.use_eagle


def tells_boundary(config: CacheConfig) -> bool:
  """Whether a lookup tells where an earlier prompt diverged."""
  return config.prefix_rules == "current"


def _hit_pages(config: CacheConfig, tokens: Array, size: int) -> Array:
  """int32[X]: pages of the longest hit in int32[X] tokens, dropped included."""
  aligned = tokens // config.alignment * config.alignment
  return aligned // size + int(config.use_eagle)


def _kept_prefixes(
  config: CacheConfig, prompt_length: Array, boundary: Array, size: int
) -> tuple[Array, ...]:
  """int32[X] each: tokens of the prefixes that are kept; negative for none.

  Three prompts can be expected: the same one, a longer one, and one that
  diverges at `boundary`. The prefixes are those that they would hit. With a
  draft model a hit ends one page earlier.
  """
  boundary = jnp.where(boundary > 0, boundary, -1)
  if not config.use_eagle:
    return prompt_length - 1, boundary
  align = config.alignment
  again = (prompt_length - 1) // align * align
  longer = prompt_length // align * align
  before = jnp.where(boundary > 0, boundary - size, -1)
  return (
    *(
      jnp.where(prompt_length > 0, jnp.maximum(end - align, 0), -1)
      for end in (again, longer)
    ),
    boundary,
    before,
  )
