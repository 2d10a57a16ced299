"""The cache on the device, the slots of requests, and the calls on them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxkv._src.cache import state as cache_state
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.telemetry import NUM_BINS
from jaxkv._src.host import calls
from jaxkv._src.host import lookup
from jaxkv._src.host import step
from jaxkv._src.host.atomic import Atomic
from jaxkv._src.host.calls import Limits
from jaxkv._src.host.lookup import Prompt
from jaxkv._src.host.request import KnownRequest
from jaxkv._src.host.slots import RequestSlots
from jaxkv._src.host.step import Advanced
from jaxkv._src.host.types import CachePages
from jaxkv._src.host.types import Lookup
from jaxkv._src.host.types import PoppedPages
from jaxkv._src.host.types import PrefixCacheStats


class DeviceCache(Atomic):
  """A cache and the slots of its requests. Callers validate the arguments.

  Attributes:
    config: sizes of the state.
    state: the cache. The next call donates its arrays: copy what you keep.
  """

  def __init__(self, limits: Limits, max_requests: int, key: Any):
    state = cache_state.init(limits.config, key)
    super().__init__(state)
    secret = b""
    if state.secret is not None:
      secret = np.asarray(state.secret).tobytes()
    self._limits = limits
    self._slots = RequestSlots(self.config, max_requests, secret)
    # And the ages of pages evicted before.
    self._statistics = PrefixCacheStats(), np.zeros((2, NUM_BINS), np.uint32)
    self._popped: dict[int, PoppedPages] = {}

  def holds_pages(self, request_id: str) -> bool:
    """True if a request holds pages."""
    return request_id in self._slots.by_name

  def _newest(self) -> CacheState:
    return self.state

  def _look_up(
    self, known: KnownRequest, stop: int, *, finds: bool
  ) -> tuple[jax.Array, Prompt]:
    """Runs `lookup.look_up` for a request's first tokens."""
    packed = calls.pack_lookup(self._slots, known, stop, finds=finds)
    return self.ask(lookup.look_up, packed)

  def _prompt(
    self, known: KnownRequest, hashed: Lookup | None, stop: int
  ) -> Prompt | None:
    """Returns a request's hashed first tokens, those of its lookup if valid."""
    if not self.config.prefix_caching:
      return None
    if hashed is not None and hashed.serves(known, stop):
      return hashed.prompt
    return self._look_up(known, stop, finds=False)[1]

  def _begin(
    self,
    known: KnownRequest,
    slot: int,
    hit: CachePages | None,
    silent: Sequence[int],
    **fields: int,
  ) -> Advanced:
    """Gives a request a vacant slot and its first pages, if all are free."""
    hashed = hit.lookup if hit is not None else None
    prompt = self._prompt(known, hashed, fields["publish"])
    call = calls.pack_begin(self._slots, hit, silent, slots=slot, **fields)
    stats, ages = self._statistics
    if self.config.prefix_caching:
      found = fields["behind"] - fields["external"]
      stats = stats.counting(known, found)

    def then(out: jax.Array) -> Advanced:
      advanced = step.fetch(out, 1, self.config.num_groups)
      if advanced.ok[0]:
        self._slots.sent[slot] = advanced.length[0]
        self._slots.hold(known, slot)
        self._statistics = stats, ages
      return advanced

    caps = self._limits.most_pages
    return self.run(step.begin, call, prompt, then=then, caps=caps)

  def _advance_one(
    self,
    known: KnownRequest,
    slot: int,
    silent: Sequence[int] = (),
    **fields: int,
  ) -> CachePages | None:
    """Allocates for a request with a slot; None if too few pages are free."""
    fields["slots"] = slot
    call = calls.pack_one(self._slots, known, silent, **fields)
    whole = fields.get("whole", 0) > 0
    out = self._advance(np.asarray([slot]), call, num_rows=1, whole=whole)
    return calls.answers([slot], out, self._newest)[0]

  def _advance(
    self,
    slots: np.ndarray,
    call: np.ndarray,
    *,
    num_rows: int,
    whole: bool = False,
  ) -> Advanced:
    """Runs `step.advance` for slots int32[R] of requests."""

    def then(out: jax.Array) -> Advanced:
      advanced = step.fetch(out, num_rows, self.config.num_groups)
      self._slots.sent[slots] = advanced.length[: len(slots)]
      return advanced

    caps = self._limits.most_pages if whole else ()
    return self.run(step.advance, call, then=then, num_rows=num_rows, caps=caps)

  def _release(self, slot: int, name: str | None = None) -> None:
    """Frees the pages of a slot and, if named, forgets its request."""

    def then(_: None) -> None:
      if name is not None and self._slots.by_name.get(name) == slot:
        self._slots.forget(name)
      self._popped.pop(slot, None)
      self._slots.release(slot)

    self.run(step.release, np.asarray([slot], np.int32), then=then)
