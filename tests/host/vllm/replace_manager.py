"""A pytest plugin that runs vLLM's own tests over `jaxkv.host.vllm`.

It replaces the names in vLLM's modules before its tests import them:

  PYTHONPATH=tests/host/vllm pytest -p replace_manager VLLM/tests/v1/core/FILE

By this path, because vLLM's tests are a package of the name `tests` too.
"""

# pyright: reportMissingImports=false

from jaxkv.host import vllm as ours


def pytest_configure() -> None:
  """Replaces the manager, its blocks and its events."""
  import vllm.distributed.kv_events as kv_events

  for name in ("AllBlocksCleared", "BlockRemoved", "BlockStored"):
    setattr(kv_events, name, getattr(ours, name))
  # It takes the classes of events by name, so it is imported after them.
  import vllm.v1.core.kv_cache_manager as kv_cache_manager

  for name in ("KVCacheBlocks", "KVCacheManager"):
    setattr(kv_cache_manager, name, getattr(ours, name))
