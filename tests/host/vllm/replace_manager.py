"""A pytest plugin that runs vLLM's own tests with `jaxkv.host.vllm`.

It replaces names in vLLM's modules before other modules import them:

  PYTHONPATH=tests/host/vllm pytest -p replace_manager VLLM/tests/v1/core/FILE

The plugin is named by this path, because vLLM's tests are also a package named
`tests`.
"""

# pyright: reportMissingImports=false

import pytest

from jaxkv.host import vllm as ours


# Later, vLLM's conftest.py imports the scheduler, which binds names.
@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
  """Replaces the manager, its blocks and its events."""
  import vllm.distributed.kv_events as kv_events
  import vllm.v1.core.block_pool as block_pool
  import vllm.v1.core.kv_cache_manager as kv_cache_manager

  # These modules have imported the classes of events by name.
  for name in ("AllBlocksCleared", "BlockRemoved", "BlockStored"):
    for module in (kv_events, block_pool, kv_cache_manager):
      if hasattr(module, name):
        setattr(module, name, getattr(ours, name))
  for name in ("KVCacheBlocks", "KVCacheManager"):
    setattr(kv_cache_manager, name, getattr(ours, name))
