"""Converts hashes of pages to keys of cached pages, and back."""

import hashlib
from collections.abc import Sequence
from typing import Any

from jaxkv._src.host.esurge.hashes import PageHash
from jaxkv._src.host.esurge.hashes import PageHashWithGroupId
from jaxkv._src.host.esurge.hashes import chain_hashes
from jaxkv._src.host.esurge.hashes import extra_keys_of
from jaxkv._src.host.pages import Pages
from jaxkv._src.host.request import int32s
from jaxkv._src.host.request import tokens_of


class DigestKeys:
  """Keys of a pool without a manager: digests of hashes of any form."""

  def __init__(self, pages: Pages):
    self._pages = pages
    # The hash that each page got last, which a digest does not contain. Only
    # hashes of cached pages are read, so neither eviction nor undo removes any.
    self._hashes: dict[int, PageHashWithGroupId] = {}

  def find(self, page_hash: PageHash, group: int) -> list[int]:
    """Returns the pages with a hash, in the order of publication."""
    return self._pages.find(_digest(page_hash, group))

  def publish(self, page: int, page_hash: PageHash, group: int) -> None:
    """Gives a page without a hash its hash."""
    self._hashes[page] = PageHashWithGroupId(page_hash, group)
    # The digest covers the tokens, so a constant takes their place.
    self._pages.publish(page, _digest(page_hash, group), (0,))

  def hashes_of(self, page_ids: Sequence[int]) -> list[PageHashWithGroupId]:
    """Returns the hashes of cached pages."""
    return [self._hashes[page] for page in page_ids]

  def request_hashes(
    self, request: Any, hashes: Sequence[PageHash], num_pages: int, size: int
  ) -> list[PageHash]:
    """Returns the hashes of a request's pages that follow those in `hashes`."""
    tokens = tokens_of(request)
    starts = range(len(hashes) * size, num_pages * size, size)
    pages = (tokens[start : start + size] for start in starts)
    parent = hashes[-1].hash_value if hashes else None
    return chain_hashes(hash, parent, pages, extra_keys_of(request))


class ManagerKeys:
  """Keys of a manager.

  `PageHash.hash_value` is the key of a page in the first group, 128 bits, from
  which the keys in the other groups follow. So equal pages of several groups
  have one `PageHash`, as in eSurge.
  """

  def __init__(self, pages: Pages, page_sizes: Sequence[int]):
    self._pages, self._page_sizes = pages, page_sizes

  def find(self, page_hash: PageHash, group: int) -> list[int]:
    """Returns the pages with a hash, in the order of publication."""
    key = self._key_of(page_hash, group)
    if key is None:
      return []
    return self._pages.find(key, page_hash.token_ids)

  def publish(self, page: int, page_hash: PageHash, group: int) -> None:
    """Gives a page without a hash its hash.

    Raises:
      ValueError: no page of the group can have this hash.
    """
    key = self._key_of(page_hash, group)
    if key is None:
      raise ValueError(
        f"{page_hash} must be a hash of this manager's group {group}; take it "
        "from req_to_page_hashes."
      )
    self._pages.publish(page, key, page_hash.token_ids)

  def hashes_of(self, page_ids: Sequence[int]) -> list[PageHashWithGroupId]:
    """Returns the hashes of cached pages."""
    # The keys of all pages together cost little more than that of one.
    keys, groups = self._pages.keys(page_ids), self._pages.groups(page_ids)
    tokens, hashes = self._pages.tokens(page_ids), []
    for key, group, page_tokens in zip(keys, groups, tokens, strict=True):
      assert key is not None
      page_hash = _page_hash(
        self._pages.in_first_group(key, group), page_tokens
      )
      hashes.append(PageHashWithGroupId(page_hash, group))
    return hashes

  def request_hashes(
    self, request: Any, hashes: Sequence[PageHash], num_pages: int, size: int
  ) -> list[PageHash]:
    """Returns the hashes of a request's pages that follow those in `hashes`."""
    pages = self._pages.keys_of_request(request, num_pages, size)
    return [_page_hash(key, tokens) for key, tokens in pages[len(hashes) :]]

  def _key_of(self, page_hash: PageHash, group: int) -> bytes | None:
    """Returns the key of a hash in a group; None if no page can have it."""
    # Hashes of a pool without a manager have other forms.
    value, tokens, _ = page_hash
    if not isinstance(value, int) or not 0 <= value < 1 << 128:
      return None
    sizes = self._page_sizes
    if not 0 <= group < len(sizes) or len(tokens) != sizes[group]:
      return None
    # numpy would round and wrap such tokens to those of another page.
    try:
      int32s(list(tokens))
    except (OverflowError, TypeError):
      return None
    return self._pages.in_first_group(value.to_bytes(16, "little"), group)


def _digest(page_hash: PageHash, group: int) -> bytes:
  value, tokens, extra_keys = page_hash
  # Hash values may have any type, and all types have a `repr`.
  text = repr((value, tuple(tokens), extra_keys, group))
  return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _page_hash(key: bytes, tokens: tuple[int, ...]) -> PageHash:
  return PageHash(int.from_bytes(key, "little"), tokens)
