"""Rules for the full pages to publish, and for the prefixes that can be hit.

Only this module reads `CacheConfig.prefix_rules`, `use_eagle` and
`prefix_retention_interval`.
"""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import GroupKind


def final_pages(config: CacheConfig, tokens: Array) -> Array:
  """Counts the pages that have a key after int32[...] committed tokens.

  Returns int32[..., G].
  """
  # A hit ends where all groups end a page. Pages past the last such position
  # cannot be hit yet, so they get their keys later. With a draft model a lookup
  # drops one more page at the end, so that page needs a key too.
  aligned = indexing.quotient(tokens, config.alignment) * config.alignment

  def final(_, size: int) -> Array:
    if config.prefix_rules == "classic":
      return indexing.quotient(tokens, size)
    if not config.use_eagle:
      return indexing.quotient(aligned, size)
    with_draft = jnp.minimum(tokens, aligned + size)
    return indexing.quotient(jnp.where(aligned > 0, with_draft, aligned), size)

  return config.sizes.by_group(final)


def published(
  config: CacheConfig,
  pages: Array,
  group: Array,
  prompt_length: Array | None,
  boundary: Array | None,
) -> Array:
  """Finds the full pages to publish, which are those that a hit can include.

  Args:
    config: the cache's groups and rules.
    pages: int32[X], the columns of the pages in the page table.
    group: int32[X], their groups.
    prompt_length: int32[X], `SlotHashes.prompt_length` of their sequences.
    boundary: int32[X], `SlotHashes.shared_prefix_boundary` of their sequences.

  Returns:
    bool[X].
  """
  if config.prefix_rules == "classic":
    return pages >= 0

  def of_kind(kind: GroupKind, size: int) -> Array:
    ends = ()
    if prompt_length is not None and boundary is not None:
      ends = tuple(
        jnp.where(end >= 0, _hit_pages(config, end, size), -1)
        for end in _retained_prefixes(config, prompt_length, boundary, size)
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

  group_numbers = jnp.arange(config.num_groups, dtype=jnp.int32)[None]
  in_group = group[:, None] == group_numbers
  return jnp.any(config.sizes.by_group(of_kind) & in_group, axis=-1)


def lookup_bound(
  config: CacheConfig,
  kind: GroupKind,
  size: int,
  length: Array,
  num_hashed: Array,
  dropped: Array,
) -> tuple[Array, Array]:
  """Returns a lookup's bound, and True where it drops the last page found.

  With a draft model, a kind looks one page past the candidate prefix and drops
  the last page found. Under the classic rules it looks no further than the
  candidate and drops a page in every round.

  Args:
    config: the cache's groups and rules.
    kind: the kind of a group.
    size: the group's tokens a page.
    length: int32[R], tokens of the candidate prefix.
    num_hashed: int32[R], tokens that have a key.
    dropped: bool[R], True if the kind dropped a page at this length before.

  Returns:
    int32[R], the bound in tokens, and bool[R], True to drop the last page.
  """
  # At each length, a kind drops only one page. Otherwise every round would
  # shorten the prefix, until several kinds agree on an empty one.
  drop = config.use_eagle & ~dropped
  if config.prefix_rules == "classic":
    return length, drop | config.use_eagle
  extends = drop & (not kind.holds_states)
  extended = jnp.minimum(length + size, num_hashed)
  return jnp.where(extends, extended, length), drop


def drops_last_page(config: CacheConfig, drop: Array) -> Array:
  """Returns `drop`, bool[R], with a draft model, and False without one."""
  return drop & config.use_eagle


def reports_boundary(config: CacheConfig) -> bool:
  """Returns True if a lookup reports where an earlier prompt diverged."""
  return config.prefix_rules == "current"


def _hit_pages(config: CacheConfig, tokens: Array, size: int) -> Array:
  """Counts the pages of a hit in int32[X] tokens, with a dropped page."""
  aligned = tokens // config.alignment * config.alignment
  return aligned // size + int(config.use_eagle)


def _retained_prefixes(
  config: CacheConfig, prompt_length: Array, boundary: Array, size: int
) -> tuple[Array, ...]:
  """Returns lengths of retained prefixes, int32[X] each; negative for none."""
  # Three later prompts are likely: the same one, a longer one, and one that
  # diverges at `boundary`. The prefixes that these would hit are retained. With
  # a draft model a hit ends one page earlier.
  boundary = jnp.where(boundary > 0, boundary, -1)
  if not config.use_eagle:
    return prompt_length - 1, boundary
  align = config.alignment
  repeated = (prompt_length - 1) // align * align
  longer = prompt_length // align * align
  before_boundary = jnp.where(boundary > 0, boundary - size, -1)
  return (
    *(
      jnp.where(prompt_length > 0, jnp.maximum(end - align, 0), -1)
      for end in (repeated, longer)
    ),
    boundary,
    before_boundary,
  )
