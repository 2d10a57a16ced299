"""Telemetry of a cache: events, ages of evicted pages, newly used pages."""

from jaxkv._src.cache.telemetry import Cleared
from jaxkv._src.cache.telemetry import Drained
from jaxkv._src.cache.telemetry import Removed
from jaxkv._src.cache.telemetry import Stored
from jaxkv._src.cache.verbs.inspect import drain_events
from jaxkv._src.cache.verbs.inspect import residency
from jaxkv._src.cache.verbs.inspect import take_new_pages

__all__ = [
  "Cleared",
  "Drained",
  "Removed",
  "Stored",
  "drain_events",
  "residency",
  "take_new_pages",
]
