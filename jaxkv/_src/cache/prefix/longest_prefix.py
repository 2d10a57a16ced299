"""The longest cached prefix of token sequences."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.groups import sizes as groups
from jaxkv._src.cache.groups.kinds import FullAttention
from jaxkv._src.cache.groups.kinds import GroupKind
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix.prefix_index import PrefixIndex
from jaxkv._src.cache.state import CacheState


class Prefix(NamedTuple):
  """What is cached of R sequences; P = T // S.

  Attributes:
    num_cached: int32[R], tokens of the prefix.
    first: int32[R, G], columns of it that a group does not need.
    stop: int32[R, G], columns of it, those included.
    pages: int32[G, R, P]; only the columns between mean something.
    root: uint32[R, 4], the key before the first page.
    chain: uint32[R, 4], the key after the prefix.
    junction: int32[R], tokens that some groups had cached where not all had;
      0 where they agreed.
  """

  num_cached: Array
  first: Array
  stop: Array
  pages: Array
  root: Array
  chain: Array
  junction: Array


def find(
  state: CacheState,
  tokens: Array,
  lengths: Array,
  salts: Array | None,
  asked: Array,
) -> Prefix | None:
  """Looks sequences up.

  At most `length - 1` tokens are found: at least one has to be computed for
  its logits.

  Args:
    state: the cache.
    tokens: int32[R, T].
    lengths: int32[R]; a length outside of 1 .. T finds nothing.
    salts: uint32[R, 4] or None.
    asked: bool[R], the sequences to look for. Costs nothing when all False.

  Returns:
    What was found; None without prefix caching.
  """
  config, index = state.config, state.pool.index
  if index is None:
    return None
  rows, columns = tokens.shape[0], tokens.shape[1] // config.page_size
  possible = jnp.where(
    asked & (lengths >= 1) & (lengths <= tokens.shape[1]), lengths - 1, 0
  )
  root = hashing.root_key(config, state.epoch, salts)
  root = jnp.broadcast_to(root, (rows, hashing.KEY_WORDS))
  no_columns = groups.full_pages(config, possible & 0)
  nothing = Prefix(
    num_cached=possible & 0,
    first=no_columns,
    stop=no_columns,
    pages=jnp.zeros((config.num_groups, rows, columns), jnp.int32)
    + (possible & 0)[None, :, None],
    root=root,
    chain=root,
    junction=possible & 0,
  )
  if columns == 0:
    return nothing

  def search() -> Prefix:
    held = tokens[:, : columns * config.page_size]
    held = held.reshape(rows, columns, config.page_size)
    keys = hashing.row_keys(config, root, held)
    pages = _looked_up(config, index, keys, held)
    found, longest = _agreed(config, pages > 0, possible)
    first = groups.skipped_pages(config, found)
    stop = groups.full_pages(config, found)
    # A prefix of which no page is needed would be a hit on nothing.
    found = jnp.where(jnp.any(first < stop, axis=1), found, 0)
    first, stop = (
      jnp.where((found > 0)[:, None], columns, 0) for columns in (first, stop)
    )
    last = jnp.maximum(found // config.page_size - 1, 0)[:, None, None]
    chain = jnp.take_along_axis(keys, last, axis=1)[:, 0]
    chain = jnp.where(found[:, None] > 0, chain, root)
    junction = jnp.where(longest > found, longest, 0)
    return Prefix(found, first, stop, pages, root, chain, junction)

  return lax.cond(
    jnp.any(possible >= config.page_size), search, lambda: nothing
  )


def inside(found: Prefix) -> Array:
  """bool[G, R, P]: the columns with a page of the prefix."""
  column = jnp.arange(found.pages.shape[2], dtype=jnp.int32)[None, None]
  first, stop = found.first.T[..., None], found.stop.T[..., None]
  return (column >= first) & (column < stop)


def attached(config: CacheConfig, found: Prefix) -> Array:
  """int32[G, R, P]: the pages of the prefix, NO_PAGE elsewhere."""
  return jnp.where(inside(found), found.pages, jnp.int32(config.no_page))


def _looked_up(
  config: CacheConfig, index: PrefixIndex, keys: Array, tokens: Array
) -> Array:
  """int32[G, R, P]: the page of every group under every key, 0 for none.

  Args:
    config: the cache's groups.
    index: where to look.
    keys: uint32[R, P, 4], after every S tokens.
    tokens: int32[R, P, S].
  """
  width = max(config.page_sizes)
  queries, contents, shapes = [], [], []
  for group, size in enumerate(config.page_sizes):
    step = size // config.page_size
    own = hashing.keys_of_group(config, keys, group)
    rows, columns = own.shape[:2]
    queries.append(own)
    held = tokens[:, : columns * step].reshape(rows, columns, size)
    contents.append(jnp.pad(held, ((0, 0), (0, 0), (0, width - size))))
    shapes.append((rows, columns))
  found = prefix_index.lookup(
    index,
    jnp.concatenate(
      [query.reshape(-1, hashing.KEY_WORDS) for query in queries]
    ),
    jnp.concatenate([content.reshape(-1, width) for content in contents]),
  )
  pages, begin = [], 0
  for rows, columns in shapes:
    own = found[begin : begin + rows * columns].reshape(rows, columns)
    begin += rows * columns
    pages.append(jnp.pad(own, ((0, 0), (0, keys.shape[1] - columns))))
  return jnp.stack(pages)


class _Spec(NamedTuple):
  """The groups of one kind: they hit together.

  Attributes:
    kind, size: theirs; tokens a page.
    hits: bool[R, P], the pages that all of them have.
  """

  kind: GroupKind
  size: int
  hits: Array

  @property
  def is_full(self) -> bool:
    """Whether a shorter prefix of a hit is always a hit too."""
    return isinstance(self.kind, FullAttention)


def _agreed(
  config: CacheConfig, cached: Array, limit: Array
) -> tuple[Array, Array]:
  """The longest prefix from which all groups can go on.

  Each kind in turn shortens the prefix, full attention first, until none does.

  Args:
    config: the cache's groups.
    cached: bool[G, R, P], the pages there are.
    limit: int32[R], tokens of the longest prefix allowed.

  Returns:
    Its tokens, int32[R], and the most that a kind had on the way, int32[R].
  """
  members: dict[tuple[GroupKind, int], list[int]] = {}
  for group, key in enumerate(
    zip(config.groups, config.page_sizes, strict=True)
  ):
    members.setdefault(key, []).append(group)
  specs = [
    _Spec(*key, jnp.all(cached[jnp.asarray(own)], axis=0))
    for key, own in members.items()
  ]
  specs.sort(key=lambda spec: not spec.is_full)
  if config.num_groups == 1:
    return _shortened(config, specs[0], limit, limit >= 0), limit & 0
  found = _Agreement(
    known=(limit + 1) // config.page_size * config.page_size,
    length=limit,
    verified=jnp.zeros((len(specs), *limit.shape), bool),
    full=(limit,) * len(specs),
    seen=limit & 0,
  )
  start, found = found.length, _round(config, specs, found, first=True)
  if len(specs) <= 2 and specs[0].is_full:
    return found.length, found.seen

  def settle(loop):
    going, before = loop
    after = _round(config, specs, before, first=False)
    seen = jnp.where(going, after.seen, before.seen)
    going &= after.length < before.length
    length = jnp.where(going, after.length, before.length)
    return going, after._replace(length=length, seen=seen)

  going = found.length < start
  _, found = lax.while_loop(
    lambda loop: jnp.any(loop[0]), settle, (going, found)
  )
  return found.length, found.seen


class _Agreement(NamedTuple):
  """Where the kinds stand.

  Attributes:
    known: int32[R], tokens that have a key.
    length: int32[R], tokens of the prefix so far.
    verified: bool[X, R], kinds that left their last page out at this length.
    full: int32[R] by kind, what each of full attention has.
    seen: int32[R], the most that a kind had within what the others have.
  """

  known: Array
  length: Array
  verified: Array
  full: tuple[Array, ...]
  seen: Array


def _round(
  config: CacheConfig, specs: list[_Spec], found: _Agreement, *, first: bool
) -> _Agreement:
  """Every kind shortens the prefix once.

  With a draft model a kind looks one page beyond the prefix and leaves the
  last page out, but only once at each length: the page that proves a prefix
  must not cost one more in every round. (`CacheConfig.classic`: it does.)
  """
  known, length, verified, full, seen = found
  for number, spec in enumerate(specs):
    if spec.is_full and not first:
      length = jnp.minimum(length, full[number])
      continue
    drop = config.draft_model & ~verified[number]
    beyond = drop & (not spec.kind.holds_states)
    bound = jnp.where(beyond, jnp.minimum(length + spec.size, known), length)
    if config.classic:
      drop, bound = drop | config.draft_model, length
    shorter = _shortened(config, spec, bound, drop)
    shrank = ~drop & (shorter < length)
    verified = jnp.where(shrank[None], False, verified).at[number].max(drop)
    full = (*full[:number], shorter, *full[number + 1 :])
    length, seen = shorter, jnp.maximum(seen, shorter)
  return _Agreement(known, length, verified, full, seen)


def _shortened(
  config: CacheConfig, spec: _Spec, bound: Array, drop: Array
) -> Array:
  """int32[R]: tokens of the longest prefix of one kind within a bound."""
  pages = spec.kind.longest_hit(
    spec.hits,
    bound,
    drop & config.draft_model,
    spec.size,
    config.alignment // spec.size,
  )
  return pages * spec.size
