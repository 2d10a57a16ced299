"""Group kinds for the reference model, also before jaxkv exports them."""

import dataclasses

import jaxkv


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Full:
  page_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Window:
  window: int
  page_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunk:
  chunk: int
  page_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Recurrent:
  page_size: int
  num_speculative: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cross:
  page_size: int


def _kind(name: str, stand_in: type) -> type:
  """What jaxkv calls by this name; a stand-in while there is no such thing."""
  stand_in.__name__ = name
  return getattr(jaxkv, name, stand_in)


FullAttention = _kind("FullAttention", _Full)
SlidingWindow = _kind("SlidingWindow", _Window)
ChunkedLocal = _kind("ChunkedLocal", _Chunk)
Recurrent = _kind("Recurrent", _Recurrent)
CrossAttention = _kind("CrossAttention", _Cross)
