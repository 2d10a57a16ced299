"""Rules that select the full pages to publish and the prefixes to find.

In the package `cache`, only this module and `CacheConfig` read the options
`prefix_rules`, `use_eagle` and `prefix_retention_interval`.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.config import StateRetention
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.group_kinds import Recurrent
from jaxkv._src.cache.group_kinds import SlidingWindow
from jaxkv._src.cache.prefix.hashing import SlotHashes


def final_pages(config: CacheConfig, tokens: Array) -> Array:
  """Counts the pages that have a key after `tokens` committed tokens.

  Takes int32[...] and returns int32[..., G].
  """
  return config.sizes.by_group(
    lambda _, size: final_pages_of(config, size, tokens)
  )


def final_pages_of(config: CacheConfig, page_size: int, tokens: Any) -> Any:
  """Computes `final_pages` for groups with pages of `page_size` tokens."""
  if config.prefix_rules == "classic":
    return elementwise.quotient(tokens, page_size)
  # A hit ends at a position where all groups end a page. A hit cannot include
  # pages past the last such position, so they get their keys later. With a
  # draft model, one page past the position gets a key too. A lookup finds this
  # page and drops it, so that the hit ends at the position.
  aligned = elementwise.quotient(tokens, config.alignment) * config.alignment
  if not config.use_eagle:
    return elementwise.quotient(aligned, page_size)
  with_draft = elementwise.minimum(tokens, aligned + page_size)
  counted = elementwise.where(aligned > 0, with_draft, aligned)
  return elementwise.quotient(counted, page_size)


def published(
  config: CacheConfig,
  pages: Array,
  group: Array,
  prompt_length: Array | None,
  boundary: Array | None,
) -> Array:
  """Selects the full pages to publish; the classic rules publish all of them.

  Takes the columns `pages` in the page table, their groups, and `prompt_length`
  and `shared_prefix_boundary` of their sequences in `SlotHashes`, int32[X]
  each. Returns bool[X].
  """
  if config.prefix_rules == "classic":
    return pages >= 0
  group_numbers = jnp.arange(config.num_groups, dtype=jnp.int32)[None]
  in_group = group[:, None] == group_numbers
  by_group = config.sizes.by_group(
    lambda kind, size: published_of(
      config, kind, size, pages, prompt_length, boundary
    )
  )
  return jnp.any(by_group & in_group, axis=-1)


def published_of(
  config: CacheConfig,
  kind: GroupKind,
  page_size: int,
  pages: Any,
  prompt_length: Any,
  boundary: Any,
) -> Any:
  """Computes `published` for groups of one kind and page size."""
  interval = config.prefix_retention_interval
  if isinstance(interval, StateRetention):
    return _has_aligned_end(config, kind, page_size, pages)
  ends = ()
  if prompt_length is not None and boundary is not None:
    prefixes = _retained_prefixes(config, prompt_length, boundary, page_size)
    ends = tuple(
      elementwise.where(length >= 0, _hit_pages(config, length, page_size), -1)
      for length in prefixes
    )
  return kind.published(
    pages,
    page_size,
    config.alignment // page_size,
    None if interval is None else interval // page_size,
    ends,
    int(config.use_eagle),
  )


def _has_aligned_end(
  config: CacheConfig, kind: GroupKind, page_size: int, pages: Any
) -> Any:
  """Returns True for pages that a hit can use, under a `StateRetention`."""
  if not kind.holds_states:
    return pages >= 0
  # A hit ends where all groups end a page, and needs the state there.
  return (pages + 1) * page_size % config.alignment == 0


# The reasons for which a state is kept, in ascending order. `recycle` gives up
# a PASSED state, and a RESENT one if the pool had to evict a page.
PASSED, RESENT, SHARED = range(3)


def reason_to_keep(
  config: CacheConfig, end: Array, hashes: SlotHashes
) -> Array:
  """Returns int32[X]: the reason to keep a state, PASSED, RESENT or SHARED.

  Takes a config with a `StateRetention`, the number of tokens of each state,
  int32[X], and the hashes of X slots.
  """
  resent, shared = kept_ends(config, hashes)
  retention = config.state_retention
  is_shared = jnp.any(end[:, None] == shared, axis=1)
  if retention is not None and retention.interval:
    is_shared |= end % retention.interval == 0
  is_resent = jnp.any(end[:, None] == resent, axis=1)
  return jnp.where(is_shared, SHARED, jnp.where(is_resent, RESENT, PASSED))


def kept_ends(config: CacheConfig, hashes: SlotHashes) -> tuple[Array, Array]:
  """Returns the numbers of tokens after which X slots keep states.

  Takes arguments as `reason_to_keep`. Returns int32[X, 2], the ends for the
  same prompt, and int32[X, 3], the ends that other prompts share; 0 for none.
  """
  assert hashes.prompt_length is not None  # Requires a `StateRetention`.
  assert hashes.shared_prefix_boundary is not None
  assert hashes.shared_tokens is not None
  align = config.alignment
  # With a draft model, a hit is one page shorter.
  longest = jnp.maximum(hashes.prompt_length - 1, 0)
  longest = elementwise.quotient(longest, align)
  longest = jnp.maximum(longest - int(config.use_eagle), 0) * align
  resent = jnp.stack([longest, jnp.maximum(longest - align, 0)], axis=-1)
  boundary = hashes.shared_prefix_boundary[:, None]
  shared = jnp.concatenate([boundary, hashes.shared_tokens], axis=-1)
  return resent, elementwise.quotient(shared, align) * align


def next_kept_end(
  config: CacheConfig, length: Array, hashes: SlotHashes
) -> Array:
  """Returns int32[X]: the first end after `length` that is kept, or NOWHERE.

  Takes arguments as `reason_to_keep`; `length`, int32[X], counts tokens.
  """
  ends = jnp.concatenate(kept_ends(config, hashes), axis=-1)
  retention = config.state_retention
  if retention is not None and retention.interval:
    interval = retention.interval
    following = elementwise.quotient(length, interval) * interval + interval
    ends = jnp.concatenate([ends, following[:, None]], axis=-1)
  is_ahead = ends > length[:, None]
  return jnp.min(jnp.where(is_ahead, ends, indexing.NOWHERE), axis=-1)


def lookup_bound(
  config: CacheConfig,
  kind: GroupKind,
  page_size: int,
  length: Array,
  num_hashed: Array,
  dropped: Array,
) -> tuple[Array, Array]:
  """Bounds a kind's search, and selects the rows in which it drops a page.

  In each round of `longest_hit.agree`, the kinds of groups in turn shorten the
  candidate for the longest prefix. With `use_eagle`, a kind drops the last page
  that it finds. To find this page, a kind that is not recurrent searches one
  page past the candidate. With the classic rules, every kind searches only up
  to the end of the candidate, and drops a page in every search.

  Args:
    config: the cache's groups and rules.
    kind: the kind of a group.
    page_size: the group's tokens per page.
    length: int32[R], tokens of the candidate.
    num_hashed: int32[R], tokens in the whole pages of the sequence.
    dropped: bool[R], True if the kind already dropped a page at this length.

  Returns:
    int32[R], the bound in tokens, and bool[R], True to drop the last page.
  """
  # With the current rules, a kind drops at most one page at each length of the
  # candidate. Otherwise two kinds could shorten it in every round, down to 0.
  drop = config.use_eagle & ~dropped
  if config.prefix_rules == "classic":
    return length, drop | config.use_eagle
  extends = drop & (not kind.holds_states)
  extended = elementwise.minimum(length + page_size, num_hashed)
  return elementwise.where(extends, extended, length), drop


def drops_last_page(config: CacheConfig, drop: Any) -> Any:
  """Returns `drop`, bool[...], with `use_eagle`, and False without it."""
  return drop & config.use_eagle


def has_plain_hits(config: CacheConfig) -> bool:
  """Returns True if full attention alone usually decides the length of a hit.

  Then the longest hit of full attention is the hit of all groups, unless
  another group lacks a page that it needs to continue from there.
  """
  kinds = set(config.rules)
  full = [type(kind) for kind in kinds if isinstance(kind, FullAttention)]
  if full != [FullAttention]:
    return False
  if config.num_groups == 1:
    return True
  # A kind that a user defines may have another rule. With a draft model, kinds
  # drop different numbers of pages.
  standard = {
    kind.longest_hit for kind in (GroupKind, SlidingWindow, Recurrent)
  }
  is_standard = all(type(kind).longest_hit in standard for kind in kinds)
  return is_standard and not config.use_eagle


def reports_boundary(config: CacheConfig) -> bool:
  """Returns True if `jaxkv.host` reports where an earlier prompt diverged."""
  return config.prefix_rules == "current"


def _hit_pages(config: CacheConfig, tokens: Any, page_size: int) -> Any:
  """Counts the pages of a hit in int32[X] tokens, plus the page to drop."""
  aligned = tokens // config.alignment * config.alignment
  return aligned // page_size + int(config.use_eagle)


def _retained_prefixes(
  config: CacheConfig, prompt_length: Any, boundary: Any, page_size: int
) -> tuple[Any, ...]:
  """Returns lengths of retained prefixes, int32[X] each; negative for none."""
  # A later prompt may repeat this prompt, begin with it, or diverge from it at
  # `boundary`. The prefixes that such prompts would hit are retained. With a
  # draft model, hits are up to A tokens shorter. Without a draft model, no
  # prefix is retained only for prompts that begin with this one, as in vLLM.
  boundary = elementwise.where(boundary > 0, boundary, -1)
  if not config.use_eagle:
    return prompt_length - 1, boundary
  align = config.alignment
  repeated = (prompt_length - 1) // align * align
  longer = prompt_length // align * align
  before_boundary = elementwise.where(boundary > 0, boundary - page_size, -1)
  return (
    *(
      elementwise.where(
        prompt_length > 0, elementwise.maximum(length - align, 0), -1
      )
      for length in (repeated, longer)
    ),
    boundary,
    before_boundary,
  )
