"""`enable_compilation_cache`: a later process finds the programs."""

import os
import subprocess
import sys

_PROGRAM = """
import sys
import jax, jaxkv
jax.jit(lambda x: x + 1)(1.0)  # Before the cache is enabled.
folder = jaxkv.enable_compilation_cache(*sys.argv[1:])
# A fast machine compiles each program here in less than the default.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
hits = []
jax.monitoring.register_event_listener(
  lambda name, **_: hits.append(name.endswith("cache_hits"))
)
jaxkv.init(jaxkv.CacheConfig(
  num_pages=8, page_size=2, num_slots=2, pages_per_slot=3))
print(folder, sum(hits))
"""


def _run(*words: str, **environment: str) -> list[str]:
  """Returns the folder, and the number of programs found there."""
  own = {"JAX_COMPILATION_CACHE_DIR", "JAXKV_CACHE"}
  inherited = {k: v for k, v in os.environ.items() if k not in own}
  paths = os.pathsep.join(sys.path)
  done = subprocess.run(
    [sys.executable, "-c", _PROGRAM, *words],
    env={**inherited, "PYTHONPATH": paths, **environment},
    capture_output=True,
    text=True,
    check=True,
  )
  return done.stdout.split()


def test_later_processes_find_the_programs(tmp_path):
  folder = str(tmp_path / "programs")
  assert _run(folder) == [folder, "0"]
  found_folder, num_hits = _run(folder)
  assert found_folder == folder and int(num_hits) > 0


def test_the_default_folder(tmp_path):
  """JAX's folder comes first, then one of this library."""
  chosen = str(tmp_path / "chosen")
  assert _run(JAX_COMPILATION_CACHE_DIR=chosen)[0] == chosen
  folder = str(tmp_path / "programs")
  assert _run(JAXKV_CACHE=str(tmp_path))[0] == folder
