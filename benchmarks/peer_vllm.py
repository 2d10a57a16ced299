"""vLLM's `KVCacheManager` as a side of `peers.py`; requires vllm.

The calls are those of vLLM's scheduler, with vLLM's defaults. So each full page
gets a SHA-256 hash, which is computed when a request gets its tokens.
"""

# pyright: reportMissingImports=false

import importlib.metadata

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import Request
from vllm.v1.request import RequestStatus

VERSION = importlib.metadata.version("vllm")
_PARAMS = SamplingParams(max_tokens=1 << 20)


class Manager:
  """Implements `peers.Peer`, which documents the methods."""

  def __init__(self, num_pages, page_size, windows, max_tokens):
    init_none_hash(sha256)
    shape = {
      "block_size": page_size,
      "num_kv_heads": 1,
      "head_size": 64,
      "dtype": torch.bfloat16,
    }
    specs = [
      SlidingWindowSpec(**shape, sliding_window=window)
      if window
      else FullAttentionSpec(**shape)
      for window in windows
    ]
    groups = [
      KVCacheGroupSpec([f"layer {index}"], spec)
      for index, spec in enumerate(specs)
    ]
    self._manager = KVCacheManager(
      KVCacheConfig(num_pages, [], groups),
      max_model_len=max_tokens,
      scheduler_block_size=page_size,
      hash_block_size=page_size,
    )
    self._hasher = get_request_block_hasher(page_size, sha256)
    self._count = 0

  def new(self, tokens):
    self._count += 1
    return Request(
      str(self._count), tokens, _PARAMS, None, block_hasher=self._hasher
    )

  def start(self, request):
    pages, num_hit, _ = self._manager.get_computed_blocks(request)
    count = request.num_tokens - num_hit
    new_pages = self._manager.allocate_slots(request, count, num_hit, pages)
    assert new_pages is not None
    request.num_computed_tokens = request.num_tokens
    request.status = RequestStatus.RUNNING
    return num_hit

  def extend(self, request, tokens):
    request.append_output_token_ids(tokens)
    assert self._manager.allocate_slots(request, len(tokens)) is not None
    request.num_computed_tokens += len(tokens)

  def free(self, request):
    self._manager.free(request)
