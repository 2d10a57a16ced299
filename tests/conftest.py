"""Configures jax, hypothesis and pytest for all tests.

pytest reads it before any test file, and so before jax creates its devices.

| environment | effect |
|---|---|
| `JAXKV_TEST_PLATFORM` | `cuda`: run on a GPU; default `cpu`, 8 devices |
| `JAXKV_TEST_OPTIMIZED` | `1`: compile for a CPU as users do; by default
  with the fastest compilation, which is most of a test's time |
| `JAXKV_TEST_CACHE` | a folder in which jax keeps compiled programs between
  runs; by default the processes of a run share one, which is then removed |
"""

import gc
import importlib.metadata
import os
import shutil
import tempfile

_PLATFORM = os.environ.get("JAXKV_TEST_PLATFORM", "cpu")
_OPTIMIZED = os.environ.get("JAXKV_TEST_OPTIMIZED") == "1"
_PROGRAMS = os.environ.get("JAXKV_TEST_CACHE")
# The folder of this run. The other processes of the run inherit its name.
_OWN_PROGRAMS = None if _PROGRAMS else tempfile.mkdtemp(prefix="jaxkv-tests-")
_LEVEL_FLAG = "--xla_backend_optimization_level"
# XLA's older code generator for fusions compiles in less than half of the time.
# Later versions of jaxlib lack the flag, and abort at an unknown one.
_EMITTER_FLAG = "--xla_cpu_use_fusion_emitters"
_HAS_EMITTER_FLAG = importlib.metadata.version("jaxlib").startswith("0.10.")
_DEVICE_FLAG = "--xla_force_host_platform_device_count"
# One part per program: splitting costs more than it saves for small programs.
_SPLIT_FLAG = "--xla_cpu_parallel_codegen_split_count"


def _set_environment() -> None:
  """Sets the environment of this process and of those that tests start."""
  flags = os.environ.get("XLA_FLAGS", "")
  if _DEVICE_FLAG not in flags:
    flags += f" {_DEVICE_FLAG}=8"
  if _PLATFORM == "cpu" and not _OPTIMIZED and _LEVEL_FLAG not in flags:
    flags += f" {_LEVEL_FLAG}=0"
    flags += f" {_SPLIT_FLAG}=1"
    if _HAS_EMITTER_FLAG:
      flags += f" {_EMITTER_FLAG}=false"
  os.environ["XLA_FLAGS"] = flags.strip()
  # Tests on a GPU need the CPU too, for comparisons.
  with_cpu = _PLATFORM if _PLATFORM == "cpu" else f"{_PLATFORM},cpu"
  os.environ["JAX_PLATFORMS"] = with_cpu
  # Several test processes share one GPU.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  # A new folder, because programs of an earlier run could hide a compilation
  # that fails now.
  os.environ.setdefault("JAXKV_TEST_CACHE", str(_OWN_PROGRAMS))
  os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["JAXKV_TEST_CACHE"]
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"


_set_environment()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

from tests.tools import compiled_programs  # noqa: E402

# Set again in jax, which a plugin may have imported before this file.
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_compilation_cache_dir", os.environ["JAXKV_TEST_CACHE"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# A first example includes compilation, so deadlines would be exceeded.
hypothesis.settings.register_profile(
  "default",
  deadline=None,
  # The same tree gets the same examples; only --deep looks for new ones.
  derandomize=True,
  # A database would leave files in the checkout; a failure prints its example.
  database=None,
  print_blob=True,
)
# 100,000 steps of a state machine.
hypothesis.settings.register_profile(
  "deep",
  hypothesis.settings.get_profile("default"),
  max_examples=1000,
  stateful_step_count=100,
  derandomize=False,
)
hypothesis.settings.load_profile("default")

# Tracing makes many objects and few cycles, so collections are rare here.
gc.set_threshold(50_000, 20, 20)


_MANY_MAPS = 48_000
"""Memory maps. Linux allows 65,530 a process, and each program takes some."""
_MANY_BYTES = 2 * 2**30
"""Resident bytes. A test adds at most 1 GB, for a limit of 3 GB."""
_counted = [0]


@pytest.fixture(autouse=True)
def _few_programs():
  """Drops compiled programs before there are too many."""
  yield
  # Counting memory maps is slow, so it is done after ten compilations.
  if compiled_programs.num_compiled() - _counted[0] >= 10:
    _counted[0] = compiled_programs.num_compiled()
    if (
      compiled_programs.resident_bytes() > _MANY_BYTES
      or compiled_programs.memory_maps() > _MANY_MAPS
    ):
      compiled_programs.drop()


@pytest.fixture
def compiled_here():
  """Compiles all programs: loaded ones with collectives can wait forever.

  Devices then take the collectives in different orders.
  """
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()
  yield
  jax.config.update("jax_enable_compilation_cache", True)
  compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
  """Returns a character model of 25 steps, trained once for all tests."""
  from tests.models import small_model

  return small_model.trained_in(tmp_path_factory.mktemp("models"))


_SLOW_EXAMPLES = {"grouped.py", "grouped_log_probs.py", "score.py"}
"""Files whose examples compile a rollout or a gradient."""


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption(
    "--all",
    action="store_true",
    help="also run tests marked slow: minutes, not hours",
  )
  parser.addoption(
    "--deep",
    action="store_true",
    help="also run tests marked slow or deep, and hypothesis' profile deep",
  )


def pytest_configure(config: pytest.Config) -> None:
  if config.getoption("--deep"):
    hypothesis.settings.load_profile("deep")


def pytest_unconfigure() -> None:
  if _OWN_PROGRAMS:
    shutil.rmtree(_OWN_PROGRAMS, ignore_errors=True)


def pytest_collection_modifyitems(
  config: pytest.Config, items: list[pytest.Item]
) -> None:
  """Skips tests that this run or this machine cannot run, with the reason."""
  deep = config.getoption("--deep")
  slow = deep or config.getoption("--all")
  for item in items:
    if (
      isinstance(item, pytest.DoctestItem) and item.path.name in _SLOW_EXAMPLES
    ):
      item.add_marker(pytest.mark.slow)
    if not _is_named(item):
      if not deep and item.get_closest_marker("deep"):
        item.add_marker(pytest.mark.skip(reason="deep: runs with --deep"))
      elif not slow and _is_slow(item):
        item.add_marker(pytest.mark.skip(reason="slow: runs with --all"))
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
      reason = "gpu: runs with JAXKV_TEST_PLATFORM=cuda, where there is a GPU"
      item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
  """Exempts modules and tests from garbage collection: they stay to the end."""
  gc.collect()
  gc.freeze()


def _is_slow(item: pytest.Item) -> bool:
  """True if a test is marked slow for its parameters; see `tools/tiers.py`.

  A mark `fast` is stronger than a mark `slow` of its class or file.
  """
  is_fast = item.get_closest_marker("fast") is not None
  return any(
    str(item.callspec.params[marker.args[0]]) not in marker.kwargs["fast"]
    if marker.args
    else not is_fast
    for marker in item.iter_markers("slow")
  )


def _is_named(item: pytest.Item) -> bool:
  """True if the command line names a test, or its function or class."""
  folder = item.config.invocation_params.dir
  name = item.nodeid.partition("::")[2]
  for word in item.config.args:
    file, _, words = word.partition("::")
    if words and item.path == (folder / file).resolve():
      if name == words or name.startswith((f"{words}[", f"{words}::")):
        return True
  return False
