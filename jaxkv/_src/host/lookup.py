"""The lookup of one request: hashes its tokens and finds a cached prefix."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax

from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import roots
from jaxkv._src.cache.steps.find import find_prefix
from jaxkv._src.host.atomic import query

_POLLS = 2000


class Prompt(NamedTuple):
  """The hashed first tokens of a request."""

  tokens: Array  # int32[1, T]
  keys: Array  # uint32[1, P, 4], the chain's key after each page
  root: Array  # uint32[1, 4], the key before the first page


@query
def look_up(state: CacheState, packed: Array) -> tuple[Array, Prompt]:
  """Finds one request's longest cached prefix and hashes all its pages.

  `packed` is int32[5 + T]: the number of tokens (0 hashes without a search),
  the words of the salt, and the tokens. Returns int32[X] for `found_in`, and
  the prompt for `step.begin`.
  """
  config, secret = state.config, state.secret
  assert secret is not None
  length, salt, tokens = jnp.split(packed, [1, 1 + hashing.KEY_WORDS])
  salt, tokens = lax.bitcast_convert_type(salt, jnp.uint32)[None], tokens[None]
  columns = tokens.shape[1] // config.page_size
  held = tokens[:, : columns * config.page_size]
  held = held.reshape(1, columns, config.page_size)
  root = jnp.broadcast_to(roots(state, salt), salt.shape)
  keys = hashing.row_keys(secret, root, held)
  found = find_prefix(state, tokens, length, length > 0, hashed=(root, keys))
  pages = found.attached_pages(config, columns)[0]
  pages = jnp.where(pages < config.no_page, pages, 0)
  numbers = (found.num_cached_tokens, found.boundary, found.stop[0])
  answer = jnp.concatenate([*numbers, pages.reshape(-1)])
  return answer, Prompt(tokens, keys, root)


def found_in(
  answer: Array, num_groups: int
) -> tuple[int, int, tuple[list[int], ...]]:
  """Unpacks a lookup: its tokens, the boundary of `SlotHashes`, its pages."""
  numbers = fetched(answer).tolist()
  num_tokens, boundary, *rest = numbers
  stop, pages = rest[:num_groups], rest[num_groups:]
  width = len(pages) // num_groups
  rows = [
    pages[group * width : group * width + count]
    for group, count in enumerate(stop)
  ]
  return num_tokens, boundary, tuple(rows)


def fetched(array: Array) -> np.ndarray:
  """Copies an array to the host.

  Polls for a while before it blocks: waking a sleeping thread costs as much as
  a decode step takes on a CPU.
  """
  for _ in range(_POLLS):
    if array.is_ready():  # pyright: ignore[reportAttributeAccessIssue]
      break
  return np.asarray(array)
