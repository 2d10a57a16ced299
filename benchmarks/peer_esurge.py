"""eSurge's `CacheManager` as a side of `peers.py`; requires EasyDeL's sources.

They are read from a checkout at the path JAXKV_EASYDEL. The calls are those of
eSurge's scheduler.
"""

import pathlib
import sys
import tomllib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tests.host.esurge import easydel
from tests.host.esurge import schedulers

_SOURCES = easydel.sources()
if _SOURCES is None:
  raise ImportError(f"{easydel.VARIABLE} is not set")
_PROJECT = tomllib.loads((_SOURCES.parent / "pyproject.toml").read_text())
VERSION = _PROJECT["project"]["version"]


class Manager:
  """Implements `peers.Peer`, which documents the methods."""

  def __init__(self, num_pages, page_size, windows, max_tokens):
    self._manager = easydel.module("core.manager").CacheManager(
      num_pages,
      [
        schedulers.window(window, page_size=page_size)
        if window
        else schedulers.full(page_size=page_size)
        for window in windows
      ],
      max_tokens,
    )
    self._requests = easydel.module("request")
    self._count = 0

  def new(self, tokens):
    self._count += 1
    return self._requests.EngineRequest(
      str(self._count), tokens, easydel.SamplingParams(1 << 20), 1
    )

  def start(self, request):
    pages, num_hit = self._manager.get_computed_pages(request)
    count = request.num_tokens - num_hit
    new_pages = self._manager.allocate_slots(request, count, num_hit, pages)
    assert new_pages is not None
    request.num_computed_tokens = request.num_tokens
    request.status = self._requests.EngineRequestStatus.RUNNING
    return num_hit

  def extend(self, request, tokens):
    request.append_output_token_ids(tokens)
    assert self._manager.allocate_slots(request, len(tokens)) is not None
    request.num_computed_tokens += len(tokens)

  def free(self, request):
    self._manager.free(request)
    self._manager.free_page_hashes(request)
