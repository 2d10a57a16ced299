"""Publishes the full pages of a request's final tokens."""

import itertools

from jaxkv._src.host.groups import LayerGroup
from jaxkv._src.host.prefix_lookup import HashedTokens
from jaxkv._src.host.prefix_nodes import TOKEN_BYTES
from jaxkv._src.host.prefix_nodes import PrefixNode
from jaxkv._src.host.prefix_nodes import chain_digests
from jaxkv._src.host.prefix_nodes import grow_path
from jaxkv._src.host.prefix_nodes import split
from jaxkv._src.host.request import RequestFields
from jaxkv._src.host.request import content
from jaxkv._src.host.request import read_request
from jaxkv._src.host.state import HeldSequence
from jaxkv._src.host.state import HostState


def publish(
  state: HostState,
  held: HeldSequence,
  num_tokens: int,
  hashed: HashedTokens | None = None,
  first: list[int] | None = None,
) -> None:
  """Makes a request's first tokens final, and publishes their full pages.

  For a new request, `hashed` has its hashed tokens, and `first` each group's
  first column after the hit. A running request is read only if a page became
  full. If at least `num_tokens` tokens were final before, nothing changes.
  """
  # Tokens beyond the tables have no page yet.
  length = held.length
  num_tokens = min(num_tokens, held.room)
  if num_tokens <= length:
    return
  state.undo_log.replace(held, length=num_tokens)
  page_size = state.config.page_size
  # Every page of every group ends at a multiple of `size` tokens. Most steps
  # fill no page, and return before the request is read.
  is_filled = num_tokens // page_size > length // page_size
  if not state.config.prefix_caching or not is_filled:
    return
  if hashed is None:
    new_nodes = more_nodes(state, held, read_request(held.request), num_tokens)
    state.undo_log.save_length(held.nodes)
    held.nodes += new_nodes
  else:
    # A new request is dropped if the call fails, so no undo is recorded.
    held.nodes = hashed.nodes(num_tokens // page_size, _last_hit(state, held))
  for group in state.groups:
    stop_column = group.final_pages(num_tokens)
    start = group.final_pages(length) if first is None else first[group.number]
    if stop_column > start:
      _publish_group(state, held, group, range(start, stop_column))


def _last_hit(state: HostState, held: HeldSequence) -> PrefixNode | None:
  """Returns the node of the last page of a request's hit; None without one."""
  # New pages are not cached yet, so the cached ones are those of the hit.
  for table in held.tables:
    for page in reversed(table):
      if page and state.pool.is_cached[page]:
        node = state.pool.content[page]
        return None if node.is_from_device else node
  return None


def more_nodes(
  state: HostState, held: HeldSequence, request: RequestFields, num_tokens: int
) -> list[PrefixNode]:
  """Returns nodes for full pages of `num_tokens` tokens, after `held.nodes`."""
  page_size, nodes = state.config.page_size, held.nodes
  first_token = len(nodes) * page_size
  stop_token = num_tokens // page_size * page_size
  tokens = content(request, first_token, stop_token, page_size, state.secret)
  pages = split(tokens, page_size * TOKEN_BYTES)
  last_node = nodes[-1] if nodes else held.root
  assert last_node is not None
  return grow_path(last_node, chain_digests(last_node.digest, pages), pages)


def _publish_group(
  state: HostState, held: HeldSequence, group: LayerGroup, columns: range
) -> None:
  pool = state.pool
  table = held.tables[group.number]
  is_listed = group.published(columns, held.prompt_length, held.boundary)
  step = group.step
  # A page of the group has `step` nodes. The last one has the page's digest.
  nodes = held.nodes[
    columns.start * step + step - 1 : columns.stop * step : step
  ]
  pages = table[columns.start : columns.stop]
  # Pages outside windows are null. A page may be cached already, because forks
  # can share a full page without a key, which the first of them publishes.
  is_fresh = [page > 0 and not pool.is_cached[page] for page in pages]
  pool.fill(
    list(itertools.compress(pages, is_fresh)),
    list(itertools.compress(nodes, is_fresh)),
    group.number,
    list(itertools.compress(is_listed, is_fresh)),
  )
  if pool.listeners:
    # Listeners get every column, so that they can count tokens.
    flags = zip(pages, is_fresh, is_listed, strict=True)
    stored = [page if fresh and listed else 0 for page, fresh, listed in flags]
    for listener in pool.listeners:
      listener.stored(held.request, group.number, columns.start, stored)
