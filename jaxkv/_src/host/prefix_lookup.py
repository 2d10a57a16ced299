"""Finds the longest cached prefix of a request."""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.prefix import prefix_rules
from jaxkv._src.cache.steps.longest_hit import agree
from jaxkv._src.cache.steps.longest_hit import worth_restoring
from jaxkv._src.host.cache_pages import CachePages
from jaxkv._src.host.groups import LayerGroup
from jaxkv._src.host.prefix_nodes import TOKEN_BYTES
from jaxkv._src.host.prefix_nodes import PrefixNode
from jaxkv._src.host.prefix_nodes import chain_digests
from jaxkv._src.host.prefix_nodes import grow_path
from jaxkv._src.host.prefix_nodes import split
from jaxkv._src.host.request import RequestFields
from jaxkv._src.host.request import content
from jaxkv._src.host.request import first_tokens
from jaxkv._src.host.state import HostState


class HashedTokens(NamedTuple):
  """The first tokens of a request, with the digests of their whole pages.

  Attributes:
    token_ids: the tokens.
    salt, items: see `RequestFields`.
    root: the node before the first page.
    pages: masked tokens of each whole page of `page_size` tokens, as int32
      bytes.
    digests: the digest of the prefix that ends with each of these pages.
    secret: see `HostState`.
  """

  token_ids: list[int]
  salt: bytes
  items: tuple[Any, ...]
  root: PrefixNode
  pages: tuple[bytes, ...]
  digests: list[bytes]
  secret: bytes

  def serves(
    self, request: RequestFields, num_tokens: int, secret: bytes
  ) -> bool:
    """True if the digests cover the first `num_tokens` tokens of a request.

    False if the digests were computed with the secret of another manager.
    """
    # A request may change after its lookup, so its tokens are compared.
    if self.salt != request.salt or self.items != request.items:
      return False
    if self.secret != secret:
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

    The nodes up to `last_hit` are reused if they are a prefix of these pages.
    """
    # Requests with equal prefixes then share nodes, and each key is computed
    # only once.
    nodes = last_hit.path() if last_hit is not None else []
    begin = len(nodes)
    if not 0 < begin <= count or nodes[-1].digest != self.digests[begin - 1]:
      nodes = []
      begin = 0
    last_node = nodes[-1] if nodes else self.root
    pages = self.pages[begin:count]
    return nodes + grow_path(last_node, self.digests[begin:count], pages)


def hash_tokens(
  state: HostState, request: RequestFields, num_tokens: int
) -> HashedTokens:
  """Hashes the first tokens of a request.

  Raises:
    ValueError: a token is not a 32-bit integer.
  """
  page_size = state.config.page_size
  tokens = first_tokens(request, num_tokens)
  masked = content(request, 0, num_tokens, page_size, state.secret)
  pages = split(masked, page_size * TOKEN_BYTES)
  root = state.root_of(request)
  digests = chain_digests(root.digest, pages)
  return HashedTokens(
    tokens, request.salt, request.items, root, pages, digests, state.secret
  )


def find_prefix(
  state: HostState, hashed: HashedTokens, max_tokens: int | None = None
) -> tuple[CachePages, int]:
  """Finds the longest cached prefix; see `CacheManager.get_computed_pages`."""
  config = state.config
  pages = [_cached_pages(state, hashed, group) for group in state.groups]
  if config.offload_pages and config.max_restored_pages < config.num_groups:
    pages = _worth_restoring(config, pages)
  # The model computes at least the last token, whose logits give the next one.
  limit = len(hashed.token_ids) - 1
  limit = max(limit if max_tokens is None else min(limit, max_tokens), 0)
  num_tokens, longest = _agree(state, pages, limit, len(hashed.digests))
  first = [group.skipped_pages(num_tokens) for group in state.groups]
  stop = [num_tokens // group.size for group in state.groups]
  # If no group needs a page, no tokens were compared, so this is a miss. For
  # example, `ChunkedLocal` needs no page of a prefix that ends with a chunk.
  if not any(a < b for a, b in zip(first, stop, strict=True)):
    num_tokens = 0
    first = stop = [0] * len(first)
  # Columns outside of a window are null, even if their pages are cached.
  columns = tuple(
    [0] * min(begin, end) + column[begin:end]
    for column, begin, end in zip(pages, first, stop, strict=True)
  )
  boundary = 0
  if longest > num_tokens and prefix_rules.reports_boundary(config):
    boundary = longest
  return CachePages(columns, (), boundary, hashed), num_tokens


def _worth_restoring(
  config: CacheConfig, pages: list[list[int]]
) -> list[list[int]]:
  """Computes `longest_hit.worth_restoring` for lists of pages by group."""
  # Padding with 0 adds no hits, so it changes no decision.
  padded = _as_array(pages, max(map(len, pages)))
  worth: Any = worth_restoring(config, padded)
  rows = zip(worth[0].tolist(), pages, strict=True)
  return [row[: len(column)] for row, column in rows]


def _as_array(pages: list[list[int]], num_columns: int) -> Any:
  """Pads G lists with zeros to int32[1, G, num_columns]."""
  array = np.zeros((1, len(pages), num_columns), np.int32)
  for row, column in zip(array[0], pages, strict=True):
    row[: len(column)] = column
  return array


def _agree(
  state: HostState, pages: list[list[int]], limit: int, num_digests: int
) -> tuple[int, int]:
  """Computes `longest_hit.agree` for lists of pages by group."""
  config = state.config
  # Usually, all groups accept the hit of full attention, which ends before its
  # first miss. Then NumPy is avoided, which is slow for a short lookup.
  if state.has_plain_hits:
    num_tokens = limit
    for group, column in zip(state.groups, pages, strict=True):
      if isinstance(group.kind, FullAttention):
        num_tokens = min(num_tokens, [*column, 0].index(0) * group.size)
    num_tokens -= num_tokens % config.alignment
    if prefix_rules.drops_last_page(config, True):
      num_tokens = max(num_tokens - config.alignment, 0)
    needed = [
      column[group.skipped_pages(num_tokens) : num_tokens // group.size]
      for group, column in zip(state.groups, pages, strict=True)
    ]
    if all(map(all, needed)):
      return num_tokens, num_tokens
  cached = _as_array(pages, num_digests) > 0
  limits = np.array([[limit], [num_digests * config.page_size]], np.int32)
  tokens = agree(config, cached, *limits)  # pyright: ignore
  num_tokens, longest = (int(row[0]) for row in tokens)
  return num_tokens, longest


def holds_tokens(
  state: HostState,
  hits: Sequence[list[int]],
  hashed: HashedTokens | None,
  num_computed: int,
) -> bool:
  """True if the pages of a hit still hold the tokens of the request.

  After the lookup, a page may have been evicted and given to another request.
  Pages that a group skips after `num_computed` tokens are not compared.
  """
  contents = state.pool.content
  cached = state.pool.is_cached
  for group, pages in zip(state.groups, hits, strict=True):
    first = group.skipped_pages(num_computed)
    hit_pages = pages[first:]
    if not hit_pages:
      continue
    if hashed is None:
      return False
    expected = hashed.digests[group.step - 1 :: group.step][first : len(pages)]
    digests = [
      contents[page].digest if cached[page] else None for page in hit_pages
    ]
    # Most pages pass this fast check. A `DevicePage` fails it, as its digest is
    # a device key. If any page fails, the lookup is repeated.
    if digests != expected:
      cached_pages = _cached_pages(state, hashed, group)[first : len(pages)]
      # Both lists have the null page in columns of which no page is cached.
      if cached_pages != hit_pages or 0 in hit_pages:
        return False
  return True


def _cached_pages(
  state: HostState, hashed: HashedTokens, group: LayerGroup
) -> list[int]:
  """Returns the cached page of each column of a group; 0 for none."""
  pool = state.pool
  digests = hashed.digests[group.step - 1 :: group.step]
  # `map` looks digests up without a Python call for each. Of equal pages, the
  # first in `lookup_order` is the hit, as in vLLM.
  pages = [
    listed[0] if listed else 0
    for listed in map(pool.index[group.number].get, digests)
  ]
  # Device keys take long to compute. Only lookups of a `DevicePage` need them.
  if pool.knows_device_pages and state.device_keys is not None:
    nodes = hashed.nodes(len(hashed.digests))
    state.device_keys.compute(nodes)
    _add_device_pages(state, group, nodes, pages)
  if not any(pages):
    return pages
  # Equal digests are no proof of equal tokens, so the pages are compared.
  expected = hashed.pages
  step = group.step
  contents = [pool.content[page] for page in pages]
  if step == 1:
    cached = [content and content.tokens for content in contents]
  else:
    expected = split(b"".join(expected), group.size * TOKEN_BYTES)
    cached = [content and content.last_tokens(step) for content in contents]
  return [
    page if page and tokens == page_tokens[: len(tokens)] else 0
    for page, tokens, page_tokens in zip(pages, expected, cached, strict=True)
  ]


def _add_device_pages(
  state: HostState, group: LayerGroup, nodes: list[PrefixNode], pages: list[int]
) -> None:
  """Adds hits among the pages whose content is a `DevicePage`."""
  pool, keys = state.pool, state.device_keys
  assert keys is not None
  for column, node in enumerate(nodes[group.step - 1 :: group.step]):
    key = keys.group_key(node, group.number)
    candidates = (pages[column], *pool.index[-1].get(key, ()))
    hits = [page for page in candidates if page]
    pages[column] = min(hits, key=pool.lookup_order, default=0)
