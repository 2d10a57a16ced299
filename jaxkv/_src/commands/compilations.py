"""The programs that commands compile, kept from one start to the next.

jax keeps them, in `compilations` in the folder of the trained model. Its key of
a program has the versions, the options and the machine type in it. Nothing is
kept

- if the user has named a folder of their own, by JAX_COMPILATION_CACHE_DIR or
  in jax's configuration, or has switched jax's cache off;
- if our folder cannot be written, or if others can write to it: whoever can
  change these files can run code as the user;
- on a CPU before jax 0.10.2, which logs errors for each program that it finds,
  although the program is right.
"""

import contextlib
import os
import pathlib
import stat
import tempfile
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxkv._src.models.characters import cache_folder

_QUIET_ON_CPU = (0, 10, 2)
_ENABLED = "jax_enable_compilation_cache"
_FOLDER = "jax_compilation_cache_dir"


@contextlib.contextmanager
def kept() -> Iterator[None]:
  """For a command: what it compiles is kept, and found when it starts again."""
  folder = cache_folder() / "compilations"
  if not (_wanted() and _is_usable(folder)):
    yield
    return
  _use(str(folder))
  try:
    yield
  finally:
    _use(None)


def _wanted() -> bool:
  enabled, chosen = (getattr(jax.config, name) for name in (_ENABLED, _FOLDER))
  if not enabled or chosen is not None:
    return False
  # The version first: to ask for the backend is to start it.
  return jax.__version_info__ >= _QUIET_ON_CPU or jax.default_backend() != "cpu"


def _is_usable(folder: pathlib.Path) -> bool:
  """Whether the folder, made if need be, is written by this user alone."""
  try:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      pass
    status = folder.stat()
  except OSError:
    return False
  if os.name != "posix":
    return True
  others = stat.S_IWGRP | stat.S_IWOTH
  return status.st_uid == os.geteuid() and not status.st_mode & others


def _use(folder: str | None) -> None:
  """The reset is needed because jax opens one folder in a process."""
  jax.config.update(_FOLDER, folder)
  compilation_cache.reset_cache()
