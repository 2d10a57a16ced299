"""The longest cached prefix of token sequences."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix import rules
from jaxkv._src.cache.prefix.prefix_index import PrefixIndex
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import roots


class Prefix(NamedTuple):
  """What is cached of R sequences.

  P is T // S; without prefix caching it is 0.

  Attributes:
    num_cached_tokens: int32[R].
    first: int32[R, G], its leading columns that a group does not need.
    stop: int32[R, G], all its columns.
    pages: int32[R, G, P]; the columns `first .. stop` are the prefix.
    root: uint32[R, 4], the key before the first page.
    chain: uint32[R, 4], the key after the prefix.
    boundary: int32[R], tokens that some groups had cached when not all had; 0
      where they agreed.
  """

  num_cached_tokens: Array
  first: Array
  stop: Array
  pages: Array
  root: Array
  chain: Array
  boundary: Array

  def attached_pages(self, config: CacheConfig, num_columns: int) -> Array:
    """int32[R, G, num_columns]: the pages of the prefix, NO_PAGE elsewhere."""
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
  hashed: tuple[Array, Array] | None = None,
) -> Prefix:
  """Looks sequences up.

  At most `length - 1` tokens are found: one must be computed for its logits.

  Args:
    state: the cache; without prefix caching nothing is found.
    tokens: int32[R, T].
    lengths: int32[R]; a length outside of 1 .. T finds nothing.
    asked: bool[R], the sequences to look for. Costs nothing when all are False.
    salts: uint32[R, 4]; None for none.
    hashed: the keys before the first page, uint32[R, 4], and after each page,
      uint32[R, P, 4], where the tokens are hashed already.
  """
  config, index, secret = state.config, state.pool.index, state.secret
  rows, columns = tokens.shape[0], tokens.shape[1] // config.page_size
  columns = 0 if index is None else columns
  possible = jnp.where(
    asked & (lengths >= 1) & (lengths <= tokens.shape[1]), lengths - 1, 0
  )
  zero = sharding.zeros_like(possible)
  if hashed is None:
    root = jnp.broadcast_to(roots(state, salts), (rows, hashing.KEY_WORDS))
  else:
    root = hashed[0]
  no_columns = config.sizes.full_pages(zero)
  no_pages = jnp.broadcast_to(
    no_columns[..., None], (*no_columns.shape, columns)
  )
  nothing = Prefix(zero, no_columns, no_columns, no_pages, root, root, zero)
  if index is None or secret is None or columns == 0:
    return nothing

  def search() -> Prefix:
    held = tokens[:, : columns * config.page_size]
    held = held.reshape(rows, columns, config.page_size)
    chain = hashed[1] if hashed else hashing.row_keys(secret, root, held)
    pages = _look_up(config, secret, index, chain, held)
    found, longest = _agree(config, pages > 0, possible)
    first = config.sizes.skipped_pages(found)
    stop = config.sizes.full_pages(found)
    # A prefix that needs no page would be a hit without anything cached.
    found = jnp.where(jnp.any(first < stop, axis=1), found, 0)
    first, stop = (
      jnp.where((found > 0)[:, None], columns, 0) for columns in (first, stop)
    )
    last = jnp.maximum(indexing.quotient(found, config.page_size) - 1, 0)
    last = last[:, None, None]
    end = jnp.take_along_axis(chain, last, axis=1)[:, 0]
    end = jnp.where(found[:, None] > 0, end, root)
    boundary = jnp.where(longest > found, longest, 0)
    return Prefix(found, first, stop, pages, root, end, boundary)

  return lax.cond(
    jnp.any(possible >= config.page_size), search, lambda: nothing
  )


def _look_up(
  config: CacheConfig,
  secret: Array,
  index: PrefixIndex,
  keys: Array,
  tokens: Array,
) -> Array:
  """int32[R, G, P]: each group's page under each key, 0 for none.

  Args:
    config: the cache's groups.
    secret: of the keys.
    index: where to look.
    keys: uint32[R, P, 4], after every S tokens.
    tokens: int32[R, P, S].
  """
  width = max(config.page_sizes)
  queries, contents, shapes = [], [], []
  for group, size in enumerate(config.page_sizes):
    step = size // config.page_size
    own = hashing.keys_of_group(config, secret, keys, group)
    rows, columns = own.shape[:2]
    queries.append(own.reshape(-1, hashing.KEY_WORDS))
    held = tokens[:, : columns * step].reshape(-1, size)
    contents.append(jnp.pad(held, ((0, 0), (0, width - size))))
    shapes.append((rows, columns))
  found = prefix_index.lookup(
    index, jnp.concatenate(queries), jnp.concatenate(contents)
  )
  pages, begin = [], 0
  for rows, columns in shapes:
    own = found[begin : begin + rows * columns].reshape(rows, columns)
    begin += rows * columns
    pages.append(jnp.pad(own, ((0, 0), (0, keys.shape[1] - columns))))
  return jnp.stack(pages, axis=1)


class _Kind(NamedTuple):
  """The groups of one kind and page size, which hit together.

  Attributes:
    kind: the kind.
    size: tokens a page.
    hits: bool[R, P], the pages that all of the groups have.
  """

  kind: GroupKind
  size: int
  hits: Array

  @property
  def is_full(self) -> bool:
    """Whether a shorter prefix of a hit is always a hit too."""
    return isinstance(self.kind, FullAttention)


class _Agreement(NamedTuple):
  """Where the kinds stand.

  Attributes:
    length: int32[R], tokens of the prefix so far.
    dropped: bool[X, R], kinds that dropped their last page at this length.
    full: int32[X, R], what each kind of full attention has.
    longest: int32[R], the most that a kind had within what the others have.
  """

  length: Array
  dropped: Array
  full: Array
  longest: Array


def _agree(
  config: CacheConfig, cached: Array, limit: Array
) -> tuple[Array, Array]:
  """The longest prefix from which all groups can continue.

  Each kind in turn shortens the prefix, full attention first, until none does.

  Args:
    config: the cache's groups.
    cached: bool[R, G, P], the pages there are.
    limit: int32[R], tokens of the longest prefix allowed.

  Returns:
    Its tokens, int32[R], and the most that a kind had on the way, int32[R].
  """
  members: dict[tuple[GroupKind, int], list[int]] = {}
  for group, key in enumerate(
    zip(config.groups, config.page_sizes, strict=True)
  ):
    members.setdefault(key, []).append(group)
  kinds = [
    _Kind(*key, jnp.all(cached[:, jnp.asarray(own)], axis=1))
    for key, own in members.items()
  ]
  kinds.sort(key=lambda kind: not kind.is_full)
  zero = sharding.zeros_like(limit)
  if config.num_groups == 1:
    return _shorten(config, kinds[0], limit, limit >= 0), zero
  each = jnp.broadcast_to(zero, (len(kinds), *limit.shape))
  before = _Agreement(limit, each > 0, each, zero)
  num_hashed = (limit + 1) // config.page_size * config.page_size
  found = _round(config, kinds, num_hashed, before, first=True)
  if len(kinds) <= 2 and kinds[0].is_full:
    return found.length, found.longest

  def settle(loop):
    going, before = loop
    after = _round(config, kinds, num_hashed, before, first=False)
    longest = jnp.where(going, after.longest, before.longest)
    going &= after.length < before.length
    length = jnp.where(going, after.length, before.length)
    return going, after._replace(length=length, longest=longest)

  going = found.length < limit
  _, found = lax.while_loop(
    lambda loop: jnp.any(loop[0]), settle, (going, found)
  )
  return found.length, found.longest


def _round(
  config: CacheConfig,
  kinds: list[_Kind],
  num_hashed: Array,
  found: _Agreement,
  *,
  first: bool,
) -> _Agreement:
  """Every kind shortens the prefix once; full attention in the first round."""
  length, dropped, full, longest = found
  for number, kind in enumerate(kinds):
    if kind.is_full and not first:
      length = jnp.minimum(length, full[number])
      continue
    bound, drop = rules.lookup_bound(
      config, kind.kind, kind.size, length, num_hashed, dropped[number]
    )
    shorter = _shorten(config, kind, bound, drop)
    shrank = ~drop & (shorter < length)
    dropped = jnp.where(shrank[None], False, dropped).at[number].max(drop)
    full = full.at[number].set(shorter)
    length, longest = shorter, jnp.maximum(longest, shorter)
  return _Agreement(length, dropped, full, longest)


def _shorten(
  config: CacheConfig, kind: _Kind, bound: Array, drop: Array
) -> Array:
  """int32[R]: tokens of the longest prefix of one kind within a bound."""
  pages = kind.kind.longest_hit(
    kind.hits,
    bound,
    rules.drops_last_page(config, drop),
    kind.size,
    config.alignment // kind.size,
  )
  return pages * kind.size
