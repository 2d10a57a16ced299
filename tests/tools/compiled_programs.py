"""Drops compiled programs to bound the memory of a test process.

jax keeps every program that it has compiled, about 30 MB for the verbs of one
cache, and the C library keeps the memory of dropped programs.
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
  """Returns the number of programs that this process has compiled."""
  return len(_compiled)


def resident_bytes() -> int:
  """Returns the resident memory of this process; 0 if unknown."""
  try:
    with open("/proc/self/statm", encoding="ascii") as file:
      return int(file.read().split()[1]) * 4096
  except OSError:
    return 0


def memory_maps() -> int:
  """Returns the number of this process's memory maps; 0 if unknown."""
  try:
    with open("/proc/self/maps", "rb") as maps:
      return maps.read().count(b"\n")
  except OSError:
    return 0


def drop() -> None:
  """Drops all compiled programs and returns their memory to the system."""
  jax.clear_caches()
  gc.collect()
  if sys.platform == "linux":
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    # Only glibc has it.
    if trim is not None:
      trim(0)
