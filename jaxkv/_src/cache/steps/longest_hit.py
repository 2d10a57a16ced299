"""Finds the longest cached prefix of token sequences.

The docstring of `jaxkv` defines the terms and the dimension letters.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix import prefix_rules
from jaxkv._src.cache.prefix.prefix_index import PrefixIndex
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import roots


class Prefix(NamedTuple):
  """The longest cached prefixes of R sequences.

  P is T // S, the number of whole pages of `page_size` tokens in T tokens, or 0
  without prefix caching.

  Attributes:
    num_cached_tokens: int32[R], tokens of the prefix.
    first: int32[R, G], the first column that a group needs to continue after
      the prefix; above 0 only for groups that skip pages.
    stop: int32[R, G], one past the last whole page of the prefix.
    pages: int32[R, G, P], the cached page of each column, 0 for none. Columns
      outside of `first <= column < stop` do not belong to the prefix.
    root: uint32[R, 4], see `hashing.root_key`.
    chain: uint32[R, 4], the chained hash after the last token of the prefix.
    boundary: int32[R], tokens of the longest prefix that at least one kind of
      group found, if this is more than `num_cached_tokens`; else 0.
  """

  num_cached_tokens: Array
  first: Array
  stop: Array
  pages: Array
  root: Array
  chain: Array
  boundary: Array

  def attached_pages(self, config: CacheConfig, num_columns: int) -> Array:
    """Returns int32[R, G, num_columns]: pages of the prefix, else NO_PAGE."""
    inside = indexing.between(self.first, self.stop, self.pages.shape[2])
    pages = jnp.where(inside, self.pages, jnp.int32(config.no_page))
    missing = num_columns - pages.shape[2]
    return jnp.pad(
      pages, ((0, 0), (0, 0), (0, missing)), constant_values=config.no_page
    )


def find_prefix(
  state: CacheState,
  tokens: Array,
  lengths: Array,
  asked: Array,
  salts: Array | None = None,
  keys: Array | None = None,
) -> Prefix:
  """Finds the longest cached prefix of each sequence.

  A prefix has at most `length - 1` tokens, since the last token must be
  computed for its logits. If `asked` is all False, nothing is hashed or looked
  up.

  Args:
    state: the cache; without prefix caching, no prefix is found.
    tokens: int32[R, T].
    lengths: int32[R]; for a length outside of 1 .. T no prefix is found.
    asked: bool[R], the sequences to look up.
    salts: uint32[R, 4]; None for no salts.
    keys: uint32[R, P, 4], the chained hashes after each page of `tokens`, if
      the caller has computed them; None to compute them here.
  """
  config = state.config
  index = state.pool.index
  secret = state.secret
  rows = tokens.shape[0]
  columns = tokens.shape[1] // config.page_size
  columns = 0 if index is None else columns
  possible = jnp.where(
    asked & (lengths >= 1) & (lengths <= tokens.shape[1]), lengths - 1, 0
  )
  zero = sharding.zeros_like(possible)
  root = jnp.broadcast_to(roots(state, salts), (rows, hashing.KEY_WORDS))
  # Zeros are computed from `zero` and are not constants. So inside `shard_map`,
  # a miss varies over the same axes as a hit, which `lax.cond` requires.
  no_columns = config.sizes.full_pages(zero)
  no_pages = jnp.broadcast_to(
    no_columns[..., None], (*no_columns.shape, columns)
  )
  miss = Prefix(zero, no_columns, no_columns, no_pages, root, root, zero)
  if index is None or secret is None or columns == 0:
    return miss

  def search() -> Prefix:
    page_tokens = tokens[:, : columns * config.page_size]
    page_tokens = page_tokens.reshape(rows, columns, config.page_size)
    chain = keys
    if chain is None:
      chain = hashing.row_keys(secret, root, page_tokens)
    pages = look_up(config, secret, index, chain, page_tokens)
    if config.offload_pages and config.max_restored_pages < config.num_groups:
      pages = worth_restoring(config, pages)
    num_hashed = (possible + 1) // config.page_size * config.page_size
    if config.restored_tokens is not None:
      pages = _worth_in_all(config, pages, possible, num_hashed)
    num_cached, longest = agree(config, pages > 0, possible, num_hashed)
    first_column = config.sizes.skipped_pages(num_cached)
    stop_column = config.sizes.full_pages(num_cached)
    # A group may need no page of a prefix. For example, a `ChunkedLocal` group
    # needs none if a chunk ends where the prefix ends. If no group needs a
    # page, no stored tokens were compared, so the result is a miss.
    is_needed = jnp.any(first_column < stop_column, axis=1)
    num_cached = jnp.where(is_needed, num_cached, 0)
    first_column, stop_column = (
      jnp.where((num_cached > 0)[:, None], columns, 0)
      for columns in (first_column, stop_column)
    )
    # The chain has an entry every S tokens. Without a hit, entry 0 is read, and
    # the root replaces it below.
    last_step = jnp.maximum(
      elementwise.quotient(num_cached, config.page_size) - 1, 0
    )
    last_step = last_step[:, None, None]
    last_key = jnp.take_along_axis(chain, last_step, axis=1)[:, 0]
    last_key = jnp.where(num_cached[:, None] > 0, last_key, root)
    boundary = jnp.where(longest > num_cached, longest, 0)
    return Prefix(
      num_cached, first_column, stop_column, pages, root, last_key, boundary
    )

  # Hashing and lookup are expensive, so they run only if a hit is possible.
  # Both branches only read the index, so XLA does not copy it.
  return lax.cond(jnp.any(possible >= config.page_size), search, lambda: miss)


def look_up(
  config: CacheConfig,
  secret: Array,
  index: PrefixIndex,
  keys: Array,
  tokens: Array,
  accepts: Callable[[Array], Array] | None = None,
) -> Array:
  """Looks up the pages of all groups, as `prefix_index.lookup` does.

  Takes the chained hash after every S tokens, uint32[R, P, 4], and the tokens,
  int32[R, P, S]. Returns int32[R, G, P], 0 where no page is cached.
  """
  # One lookup serves all groups, because each lookup needs a loop.
  width = max(config.page_sizes)
  queries = []
  contents = []
  shapes = []
  for group, page_size in enumerate(config.page_sizes):
    step = page_size // config.page_size
    group_keys = hashing.keys_of_group(config, secret, keys, group)
    rows, columns = group_keys.shape[:2]
    queries.append(group_keys.reshape(-1, hashing.KEY_WORDS))
    page_tokens = tokens[:, : columns * step].reshape(-1, page_size)
    # Zeros pad the tokens of smaller pages, as in `PrefixIndex.tokens`.
    contents.append(jnp.pad(page_tokens, ((0, 0), (0, width - page_size))))
    shapes.append((rows, columns))
  flat_pages = prefix_index.lookup(
    index,
    jnp.concatenate(queries),
    jnp.concatenate(contents),
    preferred=config.preferred_pages,
    accepts=accepts,
  )
  pages = []
  first_query = 0
  for rows, columns in shapes:
    group_pages = flat_pages[
      first_query : first_query + rows * columns
    ].reshape(rows, columns)
    first_query += rows * columns
    pages.append(jnp.pad(group_pages, ((0, 0), (0, keys.shape[1] - columns))))
  return jnp.stack(pages, axis=1)


def worth_restoring(config: CacheConfig, pages: Array) -> Array:
  """Replaces hits in offload memory by 0 if they are not worth restoring.

  Uses no device for a NumPy array int32[R, G, P], which `jaxkv.host` passes.
  """
  is_offloaded = pages > config.total_pages
  count = is_offloaded.astype(np.int32)
  # If all groups have the same page size, a column has the same tokens in each
  # group. Then the pages of a column are restored together in all groups that
  # need every page of a prefix. All other pages are judged one by one.
  together = np.asarray([not kind.skips_pages for kind in config.groups])
  if len(set(config.page_sizes)) == 1:
    mask = together[None, :, None]
    num_together = (mask.astype(np.int32) * count).sum(axis=1, keepdims=True)
    count = elementwise.where(mask, num_together, count)
  is_worth = count <= config.max_restored_pages
  return elementwise.where(is_offloaded & ~is_worth, 0, pages)


def _worth_in_all(
  config: CacheConfig, pages: Array, limit: Array, num_hashed: Array
) -> Array:
  """Replaces offloaded pages by 0 in rows whose hit is not worth restoring.

  Compares the time to restore all pages of the hit with the time to compute the
  tokens by which these pages make the hit longer. `limit` and `num_hashed` are
  those of `agree`.
  """
  is_offloaded = pages > config.total_pages
  on_device = jnp.where(is_offloaded, 0, pages)
  num_on_device, _ = agree(config, on_device > 0, limit, num_hashed)
  num_cached, _ = agree(config, pages > 0, limit, num_hashed)
  inside = indexing.between(
    config.sizes.skipped_pages(num_cached),
    config.sizes.full_pages(num_cached),
    pages.shape[2],
  )
  counts = jnp.sum(is_offloaded & inside, axis=2).astype(jnp.float32)
  tokens_of_pool = config.restored_tokens or ()
  cost = jnp.float32(0)
  for groups, num_tokens in zip(
    config.groups_of_pools, tokens_of_pool, strict=True
  ):
    num_pages = sum(counts[:, group] for group in groups)
    cost = cost + num_pages * jnp.float32(num_tokens)
  is_worth = cost < (num_cached - num_on_device).astype(jnp.float32)
  return jnp.where(is_worth[:, None, None], pages, on_device)


class _Kind(NamedTuple):
  """The groups of one kind and page size, which `agree` searches together.

  Attributes:
    kind: the kind.
    size: tokens per page.
    hits: bool[R, P], True for columns that are cached in all these groups.
  """

  kind: GroupKind
  size: int
  hits: Array

  @property
  def is_full(self) -> bool:
    """True if every shorter prefix of a hit is also a hit."""
    return isinstance(self.kind, FullAttention)


class _Candidate(NamedTuple):
  """A candidate for the longest prefix on which all kinds agree.

  Attributes:
    length: int32[R], tokens of the candidate.
    dropped: bool[R] for each kind, True if the kind has dropped a page at this
      length, see `prefix_rules.lookup_bound`.
    full: int32[R] for each kind, the tokens that the kind's last search found.
      Only the entries of full-attention kinds are read.
    longest: int32[R], tokens of the longest hit of any kind so far.
  """

  length: Array
  dropped: tuple[Array, ...]
  full: tuple[Array, ...]
  longest: Array


def agree(
  config: CacheConfig, cached: Array, limit: Array, num_hashed: Array
) -> tuple[Array, Array]:
  """Finds the longest prefix from which all groups can continue.

  As in vLLM, the kinds in turn shorten a candidate until all agree. Uses no
  device for NumPy arrays, which `jaxkv.host` passes.

  Args:
    config: the cache's groups.
    cached: bool[R, G, P], the cached pages.
    limit: int32[R], the maximal number of tokens of a prefix.
    num_hashed: int32[R], tokens in the whole pages of the sequences.

  Returns:
    int32[R], tokens of the prefix, and int32[R], tokens of the longest hit of
    any kind in any round; zeros if there is only one group.
  """
  members: dict[tuple[GroupKind, int], list[int]] = {}
  for group, key in enumerate(
    zip(config.rules, config.page_sizes, strict=True)
  ):
    members.setdefault(key, []).append(group)
  kinds = [
    _Kind(*key, cached[:, np.asarray(group_ids)].all(axis=1))
    for key, group_ids in members.items()
  ]
  # Full attention comes first. Every shorter prefix of its hit is also a hit,
  # so it searches only in the first round. In later rounds, its hit is a limit.
  kinds.sort(key=lambda kind: not kind.is_full)
  zero = sharding.zeros_like(limit)
  if config.num_groups == 1:
    return _shorten(config, kinds[0], limit, limit >= 0), zero
  start = _Candidate(
    limit, (zero > 0,) * len(kinds), (zero,) * len(kinds), zero
  )
  candidate = _round(config, kinds, num_hashed, start, is_first_round=True)
  # Full attention accepts every shorter prefix, so with at most one other kind,
  # one round is enough.
  if len(kinds) <= 2 and kinds[0].is_full:
    return candidate.length, candidate.longest

  def trip(loop):
    active, start = loop
    result = _round(config, kinds, num_hashed, start, is_first_round=False)
    longest = elementwise.where(active, result.longest, start.longest)
    active &= result.length < start.length
    length = elementwise.where(active, result.length, start.length)
    return active, result._replace(length=length, longest=longest)

  loop = candidate.length < limit, candidate
  if isinstance(limit, np.ndarray):
    while loop[0].any():
      loop = trip(loop)
  else:
    loop = lax.while_loop(lambda loop: jnp.any(loop[0]), trip, loop)
  return loop[1].length, loop[1].longest


def _round(
  config: CacheConfig,
  kinds: list[_Kind],
  num_hashed: Array,
  candidate: _Candidate,
  *,
  is_first_round: bool,
) -> _Candidate:
  """Lets each kind in turn shorten the candidate."""
  length = candidate.length
  longest = candidate.longest
  dropped = list(candidate.dropped)
  full = list(candidate.full)
  for kind_index, kind in enumerate(kinds):
    if kind.is_full and not is_first_round:
      length = elementwise.minimum(length, full[kind_index])
      continue
    bound, drop = prefix_rules.lookup_bound(
      config, kind.kind, kind.size, length, num_hashed, dropped[kind_index]
    )
    shorter = _shorten(config, kind, bound, drop)
    # A kind drops at most one page while the length stays the same. After a
    # kind shortens the candidate without a drop, each kind may drop a page.
    shrank = ~drop & (shorter < length)
    dropped = [was_dropped & ~shrank for was_dropped in dropped]
    dropped[kind_index] = dropped[kind_index] | drop
    full[kind_index] = length = shorter
    longest = elementwise.maximum(longest, shorter)
  return _Candidate(length, tuple(dropped), tuple(full), longest)


def _shorten(
  config: CacheConfig, kind: _Kind, bound: Array, drop: Array
) -> Array:
  """Returns int32[R]: tokens of a kind's longest prefix within a bound."""
  pages = kind.kind.longest_hit(
    kind.hits,
    bound,
    prefix_rules.drops_last_page(config, drop),
    kind.size,
    config.alignment // kind.size,
  )
  return pages * kind.size
