"""The kernels' public names; see `jaxkv_kernels`."""

from jaxkv_kernels import BACKENDS
from jaxkv_kernels import append_kv
from jaxkv_kernels import copy_pages
from jaxkv_kernels import gather_pages
from jaxkv_kernels import load
from jaxkv_kernels import logical_dtype
from jaxkv_kernels import paged_attention
from jaxkv_kernels import paged_attention_padded
from jaxkv_kernels import paged_decode
from jaxkv_kernels import store

__all__ = [
  "BACKENDS",
  "append_kv",
  "copy_pages",
  "gather_pages",
  "load",
  "logical_dtype",
  "paged_attention",
  "paged_attention_padded",
  "paged_decode",
  "store",
]
