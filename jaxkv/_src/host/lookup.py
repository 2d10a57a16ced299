"""Finds the longest cached prefix of a request."""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.prefix import rules
from jaxkv._src.host.groups import LayerGroup
from jaxkv._src.host.prefix_nodes import TOKEN_BYTES
from jaxkv._src.host.prefix_nodes import PrefixNode
from jaxkv._src.host.prefix_nodes import chain_digests
from jaxkv._src.host.prefix_nodes import digest_of_key
from jaxkv._src.host.prefix_nodes import grow_path
from jaxkv._src.host.request import RequestFields
from jaxkv._src.host.request import content
from jaxkv._src.host.request import first_tokens
from jaxkv._src.host.request import salt_of
from jaxkv._src.host.state import HostState


class HashedTokens(NamedTuple):
  """The first tokens of a request, with the digests of their whole pages.

  Attributes:
    token_ids: the tokens.
    salt, items: those of the request, see `RequestFields`.
    root: the node before the first page.
    pages: the whole pages of S tokens, masked, as int32 bytes.
    digests: the digest of the prefix that ends with each of these pages.
  """

  token_ids: list[int]
  salt: bytes
  items: tuple[Any, ...]
  root: PrefixNode
  pages: bytes
  digests: list[bytes]

  def serves(self, request: RequestFields, num_tokens: int) -> bool:
    """True if these begin with the first `num_tokens` tokens of the request."""
    # A request may change after its lookup, so the contents are compared.
    if self.salt != request.salt or self.items != request.items:
      return False
    if num_tokens == len(self.token_ids) == request.num_tokens:
      # The usual case, without copies of both lists.
      if isinstance(request.token_ids, list):
        return self.token_ids == request.token_ids
    if num_tokens > len(self.token_ids):
      return False
    return self.token_ids[:num_tokens] == first_tokens(request, num_tokens)

  def nodes(
    self, count: int, last_hit: PrefixNode | None = None
  ) -> list[PrefixNode]:
    """Returns nodes for the first `count` pages.

    The path to `last_hit` is reused if it is the path of these pages.
    """
    # Requests with equal prefixes then share nodes, and keys on the device are
    # computed once.
    page_bytes = len(self.pages) // max(len(self.digests), 1)
    nodes = last_hit.path() if last_hit is not None else []
    begin = len(nodes)
    if not 0 < begin <= count or nodes[-1].digest != self.digests[begin - 1]:
      nodes, begin = [], 0
    last = nodes[-1] if nodes else self.root
    pages = self.pages[begin * page_bytes :]
    return nodes + grow_path(last, self.digests[begin:count], pages, page_bytes)


class Found(NamedTuple):
  """The longest cached prefix.

  Attributes:
    num_tokens: its tokens.
    pages: its pages by group, with null pages behind windows.
    boundary: tokens of a longer prefix that only some groups have cached; 0 if
      there is none.
  """

  num_tokens: int
  pages: tuple[list[int], ...]
  boundary: int


def hash_tokens(
  state: HostState, request: RequestFields, num_tokens: int
) -> HashedTokens:
  """Hashes the first tokens of a request.

  Raises:
    ValueError: a token is not a 32-bit integer.
  """
  size = state.config.page_size
  tokens = first_tokens(request, num_tokens)
  masked = content(request, 0, num_tokens, size, state.secret)
  whole = masked[: num_tokens // size * size].tobytes()
  root = state.root_of(salt_of(request, size))
  digests = chain_digests(root.digest, whole, size * TOKEN_BYTES)
  return HashedTokens(tokens, request.salt, request.items, root, whole, digests)


def find_prefix(
  state: HostState, hashed: HashedTokens, max_tokens: int | None = None
) -> Found:
  """Finds the longest cached prefix that leaves a token to compute.

  Args:
    state: the state.
    hashed: the tokens.
    max_tokens: the most tokens of the prefix; None for no other limit.
  """
  pages = [_cached_pages(state, hashed, group) for group in state.groups]
  # The model computes at least the last token, whose logits give the next one.
  limit = len(hashed.token_ids) - 1
  limit = limit if max_tokens is None else min(limit, max_tokens)
  num_hashed = len(hashed.digests) * state.config.page_size
  num_tokens, longest = _agree(state, pages, limit, num_hashed)
  first = [group.skipped_pages(num_tokens) for group in state.groups]
  stop = [num_tokens // group.size for group in state.groups]
  # If no group needs a page of the prefix, as for a chunk that ends there, the
  # cache proves nothing about these tokens. So this is a miss.
  if not any(a < b for a, b in zip(first, stop, strict=True)):
    num_tokens, first, stop = 0, [0] * len(first), [0] * len(stop)
  columns = tuple(
    [0] * min(begin, end) + column[begin:end]
    for column, begin, end in zip(pages, first, stop, strict=True)
  )
  return Found(num_tokens, columns, longest if longest > num_tokens else 0)


def holds_tokens(
  state: HostState,
  hits: Sequence[list[int]],
  hashed: HashedTokens | None,
  num_computed: int,
) -> bool:
  """True if the pages of a hit still hold the tokens of the request.

  After the lookup a page may have been evicted and given to another request.

  Args:
    state: the state.
    hits: the pages by group.
    hashed: the tokens of the request; None without prefix caching.
    num_computed: the tokens before the first one to compute.
  """
  for group, pages in zip(state.groups, hits, strict=True):
    first = group.skipped_pages(num_computed)
    hit_pages = pages[first:]
    if not hit_pages:
      continue
    if hashed is None:
      return False
    digests = hashed.digests[group.step - 1 :: group.step][first : len(pages)]
    # Digests are the fast check. A page from a device has none of a prefix, so
    # the lookup is repeated.
    if not _have_digests(state, hit_pages, digests):
      cached_pages = _cached_pages(state, hashed, group)[first : len(pages)]
      if cached_pages != hit_pages:
        return False
  return True


def _have_digests(
  state: HostState, pages: list[int], digests: list[bytes]
) -> bool:
  """True if pages are cached under digests, one by one."""
  content, cached = state.pool.content, state.pool.is_cached
  if not all(cached[page] for page in pages):
    return False
  return [content[page].digest for page in pages] == digests


def _cached_pages(
  state: HostState, hashed: HashedTokens, group: LayerGroup
) -> list[int]:
  """Returns the cached page of each column of a group; 0 for none."""
  pool = state.pool
  digests = hashed.digests[group.step - 1 :: group.step]
  # `map` looks digests up without a Python call for each. As in vLLM, the hit
  # is the page published first, which is the first of a tuple.
  pages = [
    page if type(page) is int else (page[0] if page else 0)
    for page in map(pool.finder(group.number), digests)
  ]
  # Keys of the device take long to compute, so only if a page needs them.
  if pool.knows_device_pages and state.device_keys is not None:
    nodes = hashed.nodes(len(hashed.digests))
    state.device_keys.compute(nodes)
    _add_device_pages(state, group, nodes, pages)
  size = group.size * TOKEN_BYTES
  for column, page in enumerate(pages):
    begin = column * size
    # Equal digests are no proof of equal tokens.
    if page:
      tokens = pool.content[page].last_tokens(group.step)
      if hashed.pages[begin : begin + size] != tokens[:size]:
        pages[column] = 0
  return pages


def _add_device_pages(
  state: HostState, group: LayerGroup, nodes: list[PrefixNode], pages: list[int]
) -> None:
  """Adds hits among the pages that are known by their key on the device."""
  pool, keys = state.pool, state.device_keys
  assert keys is not None
  for column, node in enumerate(nodes[group.step - 1 :: group.step]):
    digest = digest_of_key(keys.group_key(node, group.number))
    page = pool.find_from_device(digest)
    other = pages[column]
    # As on the device, the page published first is the hit.
    if page and (not other or pool.stamp[page] < pool.stamp[other]):
      pages[column] = page


class _KindHits(NamedTuple):
  """The groups of one kind and page size, which are looked up together."""

  group: LayerGroup
  hits: np.ndarray  # bool[1, P], columns that all these groups have cached

  @property
  def is_full(self) -> bool:
    """True if every shorter prefix of a hit is a hit too."""
    return isinstance(self.group.kind, FullAttention)

  @property
  def num_leading(self) -> int:
    """The number of columns before the first one that is no hit."""
    misses = np.flatnonzero(~self.hits[0])
    return int(misses[0]) if misses.size else self.hits.shape[1]


def _agree(
  state: HostState, pages: Sequence[list[int]], limit: int, num_hashed: int
) -> tuple[int, int]:
  """Finds the longest prefix from which all groups can continue.

  Each kind in turn shortens the candidate until all kinds agree, as in vLLM and
  in `cache/steps/find`.

  Returns:
    The tokens of the prefix, and of the longest hit of any kind in any round.
  """
  if limit < 1:
    return 0, 0
  # Equal groups are looked up together: a column is a hit if all have it.
  hits: dict[Any, np.ndarray] = {}
  first: dict[Any, LayerGroup] = {}
  for group in state.groups:
    name = group.kind, group.size
    cached = np.array(pages[group.number], np.int32)[None] > 0
    hits[name] = hits.get(name, True) & cached
    first.setdefault(name, group)
  # Full attention comes first, as in vLLM. The sort is stable, so the others
  # keep the order of the groups.
  kinds = [_KindHits(first[name], hits[name]) for name in first]
  kinds.sort(key=lambda kind: not kind.is_full)
  # No other group can have a longer hit, so the boundary is 0.
  if len(state.groups) == 1:
    return _shorten(state, kinds[0], limit, drop=True), 0
  search = _Search(state, kinds, num_hashed)
  length = search.round(limit)
  # The other kind's result is also a hit of full attention, which has all
  # shorter prefixes. So one round is enough for two kinds.
  if len(kinds) <= 2 and kinds[0].is_full:
    return length, search.longest
  before = limit
  while length < before:
    before, length = length, search.round(length)
  return length, search.longest


class _Search:
  """One lookup in several kinds of groups.

  Attributes:
    longest: the longest hit of any kind so far.
  """

  def __init__(self, state: HostState, kinds: list[_KindHits], num_hashed: int):
    self.longest = 0
    self._state = state
    self._kinds = kinds
    self._num_hashed = num_hashed
    self._full: dict[int, int] = {}
    self._dropped = [False] * len(kinds)

  def round(self, length: int) -> int:
    """Lets every kind shorten the candidate once."""
    for number, kind in enumerate(self._kinds):
      # Every shorter prefix of full attention's hit is a hit too, so one lookup
      # is enough.
      if number in self._full:
        length = min(length, self._full[number])
        continue
      bound, drop = rules.lookup_bound(
        self._state.config,
        kind.group.kind,
        kind.group.size,
        length,  # pyright: ignore
        self._num_hashed,  # pyright: ignore
        np.bool_(self._dropped[number]),  # pyright: ignore
      )
      shorter = _shorten(self._state, kind, int(bound), drop=bool(drop))
      # At the shorter length all kinds drop a page again.
      if not drop and shorter < length:
        self._dropped = [False] * len(self._kinds)
      self._dropped[number] |= bool(drop)
      if kind.is_full:
        self._full[number] = shorter
      length = shorter
      self.longest = max(self.longest, shorter)
    return length


def _shorten(
  state: HostState, kind: _KindHits, bound: int, *, drop: bool
) -> int:
  """Returns the tokens of a kind's longest prefix within a bound."""
  config, group = state.config, kind.group
  drop = drop and config.use_eagle
  if kind.is_full and type(group.kind).longest_hit is GroupKind.longest_hit:
    # The same as `longest_hit`, for which numpy would take longer.
    num_pages = min(kind.num_leading, bound // group.size) - drop
    aligned = num_pages * group.size // config.alignment * config.alignment
    return max(aligned, 0)
  # The rules of kinds take a row for each request; a lookup has one.
  pages = group.kind.longest_hit(
    kind.hits,  # pyright: ignore
    np.array([bound], np.int32),  # pyright: ignore
    np.array([drop]),  # pyright: ignore
    group.size,
    config.alignment // group.size,
  )
  return int(pages[0]) * group.size
