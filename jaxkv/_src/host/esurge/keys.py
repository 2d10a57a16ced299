"""Converts hashes of pages to keys of the prefix index, and back.

A manager hashes on the device: `PageHash.hash_value` is the page's key in the
first group, 128 bits, from which those in other groups follow. (The key of the
chain itself must stay secret, see `hashing`.)

A pool without a manager accepts any hashes. Its keys are keyed digests of them,
and it remembers the hash of each digest.
"""

import hashlib
from collections.abc import Iterable
from typing import Any
from typing import NamedTuple

import numpy as np

from jaxkv._src.cache.prefix.hashing import KEY_WORDS
from jaxkv._src.cache.prefix.hashing import key_bytes
from jaxkv._src.host import calls
from jaxkv._src.host.device_cache import DeviceCache
from jaxkv._src.host.esurge import changes
from jaxkv._src.host.esurge.hashes import PageHash
from jaxkv._src.host.esurge.hashes import PageHashWithGroupId
from jaxkv._src.host.esurge.hashes import chained
from jaxkv._src.host.esurge.hashes import extra_keys_of
from jaxkv._src.host.request import content
from jaxkv._src.host.request import int32s
from jaxkv._src.host.request import read_request
from jaxkv._src.host.request import salt_of
from jaxkv._src.host.request import tokens_of

_GROUPS = 2  # Row of a state's secret, from which on each group has one.


class IndexKey(NamedTuple):
  """The key of a page in the index."""

  words: np.ndarray  # uint32[4]
  tokens: np.ndarray  # int32[S], the tokens of a page with this key


class DigestKeys:
  """Keys of a pool without a manager; a key covers the page's tokens."""

  def __init__(self, secret: bytes):
    self._secret = secret
    self._named: dict[bytes, PageHashWithGroupId] = {}

  def key_of(self, page_hash: PageHash, group: int) -> IndexKey:
    """Returns the key of a hash."""
    value, tokens, extra = page_hash
    named = repr((value, tuple(tokens), extra, group)).encode()
    digest = hashlib.blake2b(
      named, digest_size=16, key=self._secret, person=b"jaxkv-page"
    )
    words = np.frombuffer(digest.digest(), "<u4").astype(np.uint32)
    return IndexKey(words, np.zeros((1,), np.int32))

  def remember(
    self, page_hash: PageHash, group: int, words: np.ndarray
  ) -> None:
    """Records the hash of a key, for `hash_of`."""
    named = PageHashWithGroupId(page_hash, group)
    self._named[key_bytes(words)] = named

  def remembers_many(self, num_pages: int) -> bool:
    """True if it is time to forget the hashes that no page has."""
    return len(self._named) > 2 * num_pages + 1024

  def forget_others(self, words: np.ndarray) -> None:
    """Forgets all but the keys uint32[X, 4]."""
    kept = {key_bytes(key) for key in words}
    self._named = {k: v for k, v in self._named.items() if k in kept}

  def hash_of(
    self, words: np.ndarray, tokens: np.ndarray, group: int
  ) -> PageHashWithGroupId:
    """Returns the hash of a key."""
    return self._named[key_bytes(words)]

  def missing(
    self, request: Any, parent: Any, first: int, stop: int, size: int
  ) -> list[PageHash]:
    """Returns the hashes of a request's pages `first .. stop`."""
    tokens = tokens_of(request)
    pages = (
      tokens[page * size : page * size + size] for page in range(first, stop)
    )
    return chained(hash, parent, pages, extra_keys_of(request))


class ChainKeys:
  """Keys of a manager; the index also compares the tokens of a page."""

  def __init__(self, cache: DeviceCache):
    self._cache = cache
    self._secret = cache.read(lambda state: state.secret)

  def key_of(self, page_hash: PageHash, group: int) -> IndexKey | None:
    """Returns the key of a hash in a group; None if no page can have it."""
    value, tokens, _ = page_hash
    sizes = self._cache.config.page_sizes
    if not isinstance(value, int) or not 0 <= value < 1 << 128:
      return None
    if not 0 <= group < len(sizes) or len(tokens) != sizes[group]:
      return None
    try:
      held = int32s(list(tokens))
    except (OverflowError, TypeError):
      return None
    padded = np.zeros((max(sizes),), np.int32)
    padded[: len(held)] = held
    words = np.frombuffer(value.to_bytes(16, "little"), "<u4")
    words = words.astype(np.uint32) ^ self._mask(0) ^ self._mask(group)
    return IndexKey(words, padded)

  def remember(
    self, page_hash: PageHash, group: int, words: np.ndarray
  ) -> None:
    """Does nothing: the state has all hashes."""

  def remembers_many(self, num_pages: int) -> bool:
    """False: nothing is remembered."""
    return False

  def forget_others(self, words: np.ndarray) -> None:
    """Does nothing: nothing is remembered."""

  def hash_of(
    self, words: np.ndarray, tokens: np.ndarray, group: int
  ) -> PageHashWithGroupId:
    """Returns the hash of a key."""
    size = self._cache.config.page_sizes[group]
    words = words ^ self._mask(0) ^ self._mask(group)
    page_hash = _page_hash(words, tokens[:size])
    return PageHashWithGroupId(page_hash, group)

  def missing(
    self, request: Any, parent: Any, first: int, stop: int, size: int
  ) -> list[PageHash]:
    """Returns the hashes of a request's pages `first .. stop`."""
    return self.hashes_of(request, stop, size)[first:]

  def hashes_of(self, request: Any, count: int, size: int) -> list[PageHash]:
    """Returns the hashes of a request's first `count` pages."""
    known, config = read_request(request), self._cache.config
    count = min(count, known.num_tokens // size)
    if count == 0:
      return []
    secret = self._secret.tobytes()
    tokens = content(known, 0, count * size, config.page_size, secret)
    columns = calls.width_for(len(tokens) // config.page_size)
    held = np.zeros((1, columns, config.page_size), np.int32)
    held.reshape(-1)[: len(tokens)] = tokens
    salt = np.frombuffer(salt_of(known, config.page_size), np.uint32)[None]
    chain = changes.read(self._cache, changes.chain, held, salt)
    step = size // config.page_size
    links = chain[step - 1 :: step][:count] ^ self._mask(0)
    pages = tokens.reshape(-1, size)
    return [_page_hash(*one) for one in zip(links, pages, strict=True)]

  def _mask(self, group: int) -> np.ndarray:
    return self._secret[_GROUPS + group]


Keys = DigestKeys | ChainKeys


def stacked(
  keys: Iterable[IndexKey], width: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns uint32[width, 4] and int32[width, S]: the keys, then zeros."""
  rows = list(keys)
  words = np.zeros((width, KEY_WORDS), np.uint32)
  tokens = np.zeros((width, len(rows[0].tokens)), np.int32)
  for row, key in enumerate(rows):
    words[row], tokens[row] = key
  return words, tokens


def _page_hash(words: np.ndarray, tokens: np.ndarray) -> PageHash:
  value = int.from_bytes(key_bytes(words), "little")
  return PageHash(value, tuple(tokens.tolist()))
