"""Groups and requests with the attributes that `jaxkv.host.esurge` reads."""

import dataclasses
import enum
import types
from collections.abc import Sequence
from typing import Any

from jaxkv.host import esurge

PAGE, LONGEST = 4, 64


class Status(enum.IntEnum):
  """The members of `EngineRequestStatus` that a manager reads."""

  WAITING = 1
  RUNNING = 4
  PREEMPTED = 5


class ConstantList(Sequence):
  """A read-only view of a list."""

  def __init__(self, items: list[int]):
    self._items = items

  def __getitem__(self, item: Any) -> Any:
    return self._items[item]

  def __len__(self) -> int:
    return len(self._items)


@dataclasses.dataclass
class Place:
  offset: int
  length: int


@dataclasses.dataclass
class Feature:
  mm_hash: str
  placeholder_range: Place | None = None
  modality: str = "image"


class EngineRequest:
  """A request with the attributes that a manager reads."""

  def __init__(self, request_id: str, tokens: Any, **fields: Any):
    self.request_id = request_id
    self._all_token_ids = list(tokens)
    self.all_token_ids = ConstantList(self._all_token_ids)
    self.num_prompt_tokens = len(self._all_token_ids)
    self.num_computed_tokens = 0
    self.status = Status.WAITING
    self.sampling_params = types.SimpleNamespace(prompt_logprobs=None)
    self.mm_features: list[Feature] = []
    self.pixel_values = None
    vars(self).update(fields)

  @property
  def num_tokens(self) -> int:
    return len(self._all_token_ids)

  @property
  def has_vision(self) -> bool:
    return self.pixel_values is not None or bool(self.mm_features)

  def append(self, tokens: Any) -> None:
    self._all_token_ids.extend(tokens)


def group(**fields: Any) -> Any:
  """Makes a `CacheGroupSpec`."""
  spec = types.SimpleNamespace(**{"page_size": PAGE} | fields)
  return types.SimpleNamespace(kv_cache_spec=spec, layer_names=None)


def full(**fields: Any) -> Any:
  return group(sliding_window=None, attention_chunk_size=None, **fields)


def window(num_tokens: int, **fields: Any) -> Any:
  return group(sliding_window=num_tokens, **fields)


def chunk(num_tokens: int, **fields: Any) -> Any:
  return group(attention_chunk_size=num_tokens, **fields)


def states(**fields: Any) -> Any:
  return group(shapes=((2, 2),), **{"page_size": LONGEST} | fields)


def manager(*groups: Any, num_pages: int = 40, **options: Any) -> Any:
  return esurge.CacheManager(
    num_pages, list(groups) or [full()], LONGEST, **options
  )


def admit(cache: Any, request: Any, new: int | None = None) -> Any:
  """Looks up and allocates; returns hit ids, hit tokens, new ids or None."""
  pages, num_hit = cache.get_computed_pages(request)
  new = request.num_tokens - num_hit if new is None else new
  out = cache.allocate_slots(request, new, num_hit, pages)
  if out is None:
    return pages.get_page_ids(), num_hit, None
  request.num_computed_tokens += num_hit + new
  request.status = Status.RUNNING
  return pages.get_page_ids(), num_hit, out.get_page_ids()


def decode(cache: Any, request: Any, tokens: Any) -> Any:
  """Appends tokens and allocates pages for them; returns new ids or None."""
  request.append(tokens)
  new = request.num_tokens - request.num_computed_tokens
  out = cache.allocate_slots(request, new)
  if out is None:
    return None
  request.num_computed_tokens += new
  return out.get_page_ids()


def leave(cache: Any, request: Any) -> None:
  """Frees a finished request."""
  cache.free(request)
  cache.free_page_hashes(request)
