"""Keeps a process that runs many tests small: compiled programs are dropped.

jax keeps every program that it has compiled, some 30 MB for the verbs of one
cache, and the C library keeps the memory of those that were dropped.
"""

import ctypes
import gc
import sys

import jax

_compiled: list[str] = []


def _note(event: str, _: float, **__: object) -> None:
  if "backend_compile" in event:
    _compiled.append(event)


jax.monitoring.register_event_duration_secs_listener(_note)


def num_compiled() -> int:
  """How many programs this process has compiled so far."""
  return len(_compiled)


def resident_bytes() -> int:
  """Memory that this process holds; 0 where the system does not tell."""
  try:
    with open("/proc/self/statm", encoding="ascii") as sizes:
      return int(sizes.read().split()[1]) * 4096
  except OSError:
    return 0


def memory_maps() -> int:
  """Memory maps of this process; 0 where the system does not tell."""
  try:
    with open("/proc/self/maps", "rb") as maps:
      return maps.read().count(b"\n")
  except OSError:
    return 0


def drop() -> None:
  """Drops all compiled programs, and gives their memory back."""
  jax.clear_caches()
  gc.collect()
  if sys.platform == "linux":
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # Of glibc.
      trim(0)
