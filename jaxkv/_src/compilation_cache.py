"""Keeps compiled programs on disk."""

import os
import pathlib

import jax
from jax.experimental.compilation_cache import compilation_cache

_LEAST_SECONDS = 0.1
"""The compilation time of a program that is worth a file."""


def enable_compilation_cache(
  folder: str | os.PathLike[str] | None = None,
) -> pathlib.Path:
  """Keeps compiled programs in a folder, for later processes.

  A rollout then compiles in about 2 s in place of 15. Sets options of JAX, so
  all programs of this process are kept, and an entry is used only by the same
  version of jaxlib on an equal machine.

  Args:
    folder: the folder, which may not exist yet. None for the folder that JAX
      already has, else `programs` in the folder of the environment variable
      JAXKV_CACHE, else `jaxkv/programs` in the user's cache.

  Returns:
    The folder.

  Examples:
    >>> import jaxkv
    >>> jaxkv.enable_compilation_cache("/tmp/programs")  # doctest: +SKIP
    PosixPath('/tmp/programs')
  """
  chosen = folder or jax.config.values["jax_compilation_cache_dir"]
  path = pathlib.Path(chosen) if chosen else cache_folder() / "programs"
  jax.config.update("jax_compilation_cache_dir", str(path))
  jax.config.update(
    "jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS
  )
  # JAX reads the folder at the first compilation only.
  compilation_cache.reset_cache()
  return path


def cache_folder() -> pathlib.Path:
  """Returns the folder for files that can be made again."""
  configured = os.environ.get("JAXKV_CACHE")
  if configured:
    return pathlib.Path(configured)
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(home) / "jaxkv"
