"""The lookup of one request: its hashed tokens, and the prefix found."""

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
  """The tokens that a request begins with, hashed."""

  tokens: Array  # int32[1, T]
  keys: Array  # uint32[1, P, 4], the chain's key after each page
  root: Array  # uint32[1, 4], the key before the first page


@query
def look_up(state: CacheState, packed: Array) -> tuple[Array, Prompt]:
  """The longest cached prefix of one request, and the keys of all its pages.

  Args:
    state: a cache with prefix caching.
    packed: int32[5 + T]: the number of tokens, 0 to look for nothing; the words
      of the salt; the tokens.

  Returns:
    For `found_in`, int32[X]; and what `begin` takes.
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
  """What `look_up` found: tokens, the boundary of `SlotHashes`, and pages."""
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
  """An array on the host.

  Polls for a while before it blocks: waking a thread that sleeps costs as much
  as a decode step takes on a CPU.
  """
  for _ in range(_POLLS):
    if array.is_ready():  # pyright: ignore[reportAttributeAccessIssue]
      break
  return np.asarray(array)
