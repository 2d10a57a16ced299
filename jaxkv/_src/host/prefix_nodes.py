"""Prefixes on the host: their digests, and their keys on the device.

A lookup on the host compares digests (BLAKE2b, chained page by page from a
secret) and then the tokens of the page. The 128-bit keys of the device
(`cache/prefix/hashing`) take longer to compute in Python. They are computed
only to convert to or from a `CacheState`, for events, for methods of `Pages`,
and to look up pages that a loop on the device filled (`DevicePage`).
"""

import dataclasses
import hashlib
import itertools
import struct
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import ClassVar

import numpy as np

from jaxkv._src.cache.prefix.hashing import KEY_WORDS
from jaxkv._src.cache.prefix.hashing import NUM_ROUNDS
from jaxkv._src.cache.prefix.hashing import SECRET_OF_DIGESTS
from jaxkv._src.cache.prefix.hashing import SECRET_OF_GROUPS
from jaxkv._src.cache.prefix.hashing import SECRET_OF_ROOTS
from jaxkv._src.cache.prefix.hashing import secret_purposes

Key = tuple[int, int, int, int]
"""The words of a key of the device."""

TOKEN_BYTES = 4
_MASK = 0xFFFFFFFF
# Below this number of rows, Python numbers are faster than NumPy.
_FEW_ROWS = 8


@dataclasses.dataclass(slots=True, eq=False)
class PrefixNode:
  """A prefix of whole pages: the last page's tokens, and a parent node.

  Attributes:
    digest: 16 bytes, equal for equal prefixes; the key in the host's index.
    parent: the node of the prefix without the last page; None for a root.
    tokens: the last page's tokens as int32 bytes; for a root, its salt.
    root: the node before the first page; None for a root.
    key: the key on the device, before `group_key` adapts it to a group; None
      until `DeviceKeys.compute`.
  """

  digest: bytes
  parent: "PrefixNode | None"
  tokens: bytes
  root: "PrefixNode | None" = None
  key: Key | None = None
  is_from_device: ClassVar[bool] = False

  def last_tokens(self, count: int) -> bytes:
    """Returns the tokens of the last `count` nodes."""
    if count == 1:
      return self.tokens
    parts, node = [], self
    for _ in range(count):
      assert node is not None
      parts.append(node.tokens)
      node = node.parent
    return b"".join(reversed(parts))

  def path(self) -> list["PrefixNode"]:
    """Returns the nodes from the first page to this one, without the root."""
    nodes, node = [], self
    while node.parent is not None:
      nodes.append(node)
      node = node.parent
    nodes.reverse()
    return nodes


@dataclasses.dataclass(slots=True, eq=False)
class DevicePage:
  """The content of a page that a device loop filled, without its prefix.

  Attributes:
    digest: the key on the device, in the group of the page.
    tokens: the tokens of the page as int32 bytes.
  """

  digest: Key
  tokens: bytes
  is_from_device: ClassVar[bool] = True

  def last_tokens(self, count: int) -> bytes:
    """Returns the tokens of the page, and ignores `count`.

    If other groups have larger pages, zeros follow the tokens.
    """
    return self.tokens


def split(tokens: bytes, page_bytes: int) -> tuple[bytes, ...]:
  """Splits tokens into whole pages; ignores an incomplete page."""
  # `struct` splits all pages in one call.
  pages = struct.Struct(f"{page_bytes}s" * (len(tokens) // page_bytes))
  return pages.unpack_from(tokens)


def chain_digests(root: bytes, pages: Iterable[bytes]) -> list[bytes]:
  """Returns the digest of the prefix that ends with each page of tokens."""
  # Looked up once, because a long prompt has hundreds of pages.
  blake2b = hashlib.blake2b
  digest = root
  digests = []
  for page in pages:
    # Digests have a fixed size, so the concatenation is unambiguous.
    digest = blake2b(digest + page, digest_size=16).digest()
    digests.append(digest)
  return digests


def grow_path(
  node: PrefixNode, digests: Iterable[bytes], pages: Iterable[bytes]
) -> list[PrefixNode]:
  """Returns the nodes after `node`, one for each digest and page of tokens."""
  nodes = []
  root = node.root or node
  for digest, page in zip(digests, pages, strict=True):
    node = PrefixNode(digest, node, page, root)
    nodes.append(node)
  return nodes


class DeviceKeys:
  """Computes the same keys as the device.

  Attributes:
    secret: uint32[2 + G, 4], as `hashing.make_secret` computes it.
    epoch: always 0; see `CacheState.epoch`.
  """

  epoch = 0

  def __init__(self, key: np.ndarray, num_groups: int, page_size: int):
    self.secret = make_secret(key, num_groups)
    self._page_size = page_size
    rows = [tuple(row) for row in self.secret.tolist()]
    self._digest = rows[SECRET_OF_DIGESTS]
    self._root = rows[SECRET_OF_ROOTS]
    self._groups = rows[SECRET_OF_GROUPS:]

  def root_key(self, salt: bytes) -> Key:
    """Computes `hashing.root_key` of a salt of 16 bytes."""
    # The epoch is permuted before the salt, as in `hashing.root_key`.
    root = _permute(_xor(self._root, (self.epoch, 0, 0, 0)))
    return _permute(_xor(root, struct.unpack("<4I", salt)))

  def group_key(self, node: PrefixNode | DevicePage, group: int) -> Key:
    """Returns the key of a page in its group; `compute` must have run."""
    if isinstance(node, DevicePage):
      return node.digest
    assert node.key is not None
    return _xor(node.key, self._groups[group])

  def compute(self, nodes: Iterable[PrefixNode | DevicePage]) -> None:
    """Computes the missing keys of nodes and of all their ancestors."""
    levels = self._levels_without_key(nodes)
    pages = list(itertools.chain.from_iterable(levels))
    if not pages:
      return
    # A digest of `hashing.page_digests` does not depend on the parent, so one
    # pass of NumPy computes all of them. The chain needs a pass for each level.
    digests = self._page_digests(pages)
    first_node = 0
    for level in levels:
      parents = [node.parent.key for node in level if node.parent]
      keys = _chained(parents, digests[first_node : first_node + len(level)])
      first_node += len(level)
      for node, key in zip(level, keys, strict=True):
        node.key = key

  def _levels_without_key(
    self, nodes: Iterable[PrefixNode | DevicePage]
  ) -> list[list[PrefixNode]]:
    """Returns nodes without a key by level, parents first; sets roots' keys."""
    # Paths share nodes, so a walk towards the root stops early at a node that
    # an earlier walk has visited.
    depth_of: dict[int, int] = {}
    levels: list[list[PrefixNode]] = []
    for node in nodes:
      path: list[PrefixNode] = []
      while not isinstance(node, DevicePage) and node.key is None:
        if node.parent is None:
          node.key = self.root_key(node.tokens)
          break
        if id(node) in depth_of:
          break
        path.append(node)
        node = node.parent
      depth = depth_of.get(id(node), -1)
      for ancestor in reversed(path):
        depth += 1
        depth_of[id(ancestor)] = depth
        if depth == len(levels):
          levels.append([])
        levels[depth].append(ancestor)
    return levels

  def _page_digests(self, pages: Sequence[PrefixNode]) -> np.ndarray:
    """Computes `hashing.page_digests` of nodes: uint32[X, 4]."""
    page_size = self._page_size
    words = np.frombuffer(b"".join(page.tokens for page in pages), "<u4")
    words = words.reshape(len(pages), page_size)
    # Zeros fill the last block of words, as on the device.
    words = np.pad(words, ((0, 0), (0, -page_size % KEY_WORDS)))
    state: Any = tuple(
      np.full(len(pages), word, np.uint32) for word in self._digest
    )
    for column in range(0, words.shape[1], KEY_WORDS):
      block = words[:, column : column + KEY_WORDS].T
      state = _permute(_xor(state, tuple(block)))
    return np.stack(state, axis=1)


def make_secret(key: np.ndarray, num_groups: int) -> np.ndarray:
  """Computes `hashing.make_secret` without a device."""
  words = tuple(key.tolist())
  # The key masks input and output, because the permutation can be inverted.
  rows = [
    _xor(words, _permute(_xor(words, tuple(purpose.tolist()))))
    for purpose in secret_purposes(num_groups)
  ]
  return np.array(rows, np.uint32)


def _chained(parents: list[Any], digests: np.ndarray) -> list[Key]:
  """Computes one link of `hashing.chain_keys` for several chains."""
  if len(parents) < _FEW_ROWS:
    pairs = zip(parents, digests.tolist(), strict=True)
    return [_permute(_xor(parent, digest)) for parent, digest in pairs]
  words = np.array(parents, np.uint32) ^ digests
  keys = np.stack(_permute(tuple(words.T)), axis=1)
  return [tuple(key) for key in keys.tolist()]


def _xor(a: Any, b: Any) -> Any:
  return a[0] ^ b[0], a[1] ^ b[1], a[2] ^ b[2], a[3] ^ b[3]


def _permute(words: Any) -> Any:
  """Applies the rounds of `hashing` to Python numbers or numpy arrays."""
  # Python's numbers do not wrap, so each sum and shift is cut to 32 bits.
  v0, v1, v2, v3 = words
  for _ in range(NUM_ROUNDS):
    v0 = (v0 + v1) & _MASK
    v1 = ((v1 << 5 | v1 >> 27) & _MASK) ^ v0
    v0 = (v0 << 16 | v0 >> 16) & _MASK
    v2 = (v2 + v3) & _MASK
    v3 = ((v3 << 8 | v3 >> 24) & _MASK) ^ v2
    v0 = (v0 + v3) & _MASK
    v3 = ((v3 << 13 | v3 >> 19) & _MASK) ^ v0
    v2 = (v2 + v1) & _MASK
    v1 = ((v1 << 7 | v1 >> 25) & _MASK) ^ v2
    v2 = (v2 << 16 | v2 >> 16) & _MASK
  return v0, v1, v2, v3
