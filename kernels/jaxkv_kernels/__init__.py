"""Paged attention and page operations on plain arrays.

The functions work on pools of pages, tables of page ids and vectors of lengths.
The package does not depend on caches, requests or slots. `jaxkv` imports it,
never the reverse.

An argument whose type or dtype is not supported raises TypeError, one whose
shape, value or device is not supported ValueError, and a backend that is
unknown or does not support the call NotImplementedError.
"""

from jaxkv_kernels._src.append import append_pages
from jaxkv_kernels._src.attention.api import paged_attention
from jaxkv_kernels._src.attention.api import paged_attention_padded
from jaxkv_kernels._src.attention.api import paged_decode
from jaxkv_kernels._src.attention.cascade import cascade_decode
from jaxkv_kernels._src.attention.choose import BACKENDS
from jaxkv_kernels._src.attention.merge import merge_states
from jaxkv_kernels._src.attention.options import AttentionOptions
from jaxkv_kernels._src.attention.query_packing import tile_queries
from jaxkv_kernels._src.attention.shared_prefix import SharedPrefix
from jaxkv_kernels._src.attention.shared_prefix import plan_shared_prefix
from jaxkv_kernels._src.attention.xla.backend import BLOCK_TOKENS
from jaxkv_kernels._src.pages import copy_pages
from jaxkv_kernels._src.quantization import load
from jaxkv_kernels._src.quantization import logical_dtype
from jaxkv_kernels._src.quantization import quantize
from jaxkv_kernels._src.quantization import store

__all__ = [
  "BACKENDS",
  "BLOCK_TOKENS",
  "AttentionOptions",
  "SharedPrefix",
  "append_pages",
  "cascade_decode",
  "copy_pages",
  "load",
  "logical_dtype",
  "merge_states",
  "paged_attention",
  "paged_attention_padded",
  "paged_decode",
  "plan_shared_prefix",
  "quantize",
  "store",
  "tile_queries",
]
