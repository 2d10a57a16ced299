"""Hashes of pages as eSurge computes them."""

import os
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from jaxkv._src.host.request import tokens_of


class PageHash(NamedTuple):
  """The hash of a page, with the data that was hashed.

  Attributes:
    hash_value: the hash of this page and of all pages before it.
    token_ids: the tokens of the page.
    extra_keys: data besides the tokens, such as images; None for nothing.
  """

  hash_value: Any
  token_ids: tuple[int, ...]
  extra_keys: Any = None


class PageHashWithGroupId(NamedTuple):
  """The hash of a page in one group.

  Attributes:
    page_hash: the hash.
    group_id: the index of the group.
  """

  page_hash: PageHash
  group_id: int

  def get_hash_value(self) -> Any:
    """Returns the hash of this page and of all pages before it."""
    return self.page_hash.hash_value


def _first_parent() -> int:
  """Returns the hash of a numeric PYTHONHASHSEED, else 256 random bits."""
  # Python hashes integers without the seed, so equal seeds give equal parents.
  seed = os.environ.get("PYTHONHASHSEED", "")
  if seed.isdecimal():
    return hash(int(seed))
  return int.from_bytes(os.urandom(32), "big")


NONE_HASH = _first_parent()
"""The parent of a sequence's first page."""


def init_none_hash() -> None:
  """Does nothing: `NONE_HASH` is set at import and never changes."""


def hash_page_tokens(
  hash_function: Callable[[Any], Any],
  parent_page_hash: Any,
  curr_page_token_ids: Sequence[int],
  extra_keys: tuple[Any, ...] | None = None,
) -> PageHash:
  """Returns the hash of one page.

  Args:
    hash_function: a function of a tuple of the parent's hash, the tokens and
      the extra keys, such as `hash`.
    parent_page_hash: the `hash_value` of the page before; None for the first.
    curr_page_token_ids: the tokens of the page.
    extra_keys: data besides the tokens.

  Examples:
    >>> first = hash_page_tokens(hash, None, [1, 2])
    >>> first == hash_page_tokens(hash, NONE_HASH, (1, 2))
    True
    >>> hash_page_tokens(hash, first.hash_value, [1, 2]) == first
    False
  """
  parent = NONE_HASH if parent_page_hash is None else parent_page_hash
  # Python cannot hash lists.
  tokens = tuple(curr_page_token_ids)
  return PageHash(
    hash_function((parent, tokens, extra_keys)), tokens, extra_keys
  )


def hash_request_tokens(
  hash_function: Callable[[Any], Any], page_size: int, request: Any
) -> list[PageHash]:
  """Returns the hashes of a request's full pages.

  Args:
    hash_function: as for `hash_page_tokens`.
    page_size: tokens a page.
    request: the tokens and, with `has_vision`, the `modality` and `mm_hash` of
      its `mm_features`, which are extra keys of every page.
  """
  tokens = tokens_of(request)
  full = len(tokens) // page_size
  pages = (
    tokens[page * page_size : (page + 1) * page_size] for page in range(full)
  )
  return chain_hashes(hash_function, None, pages, extra_keys_of(request))


def chain_hashes(
  hash_function: Callable[[Any], Any],
  parent: Any,
  pages: Iterable[Sequence[int]],
  extra_keys: tuple[Any, ...] | None,
) -> list[PageHash]:
  """Returns the hashes of consecutive pages after a parent."""
  hashes = []
  for tokens in pages:
    hashes.append(hash_page_tokens(hash_function, parent, tokens, extra_keys))
    parent = hashes[-1].hash_value
  return hashes


def extra_keys_of(request: Any) -> tuple[Any, ...] | None:
  """Returns a request's data besides its tokens; None for nothing."""
  # eSurge's requests have `has_vision` set if there are images.
  features = getattr(request, "mm_features", None)
  if not features or not getattr(request, "has_vision", False):
    return None
  return tuple(
    (str(getattr(item, "modality", "mm")), str(getattr(item, "mm_hash", "")))
    for item in features
  )
