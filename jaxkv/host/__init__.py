"""For schedulers in Python: the reference systems' managers, on the device."""

from jaxkv.host.driver import PoppedPages
from jaxkv.host.manager import CacheManager
from jaxkv.host.pages import CachePages
from jaxkv.host.requests import MultimodalItem
from jaxkv.host.requests import Request
from jaxkv.host.statistics import PrefixCacheStats
from jaxkv.host.views import FreeCachePageQueue
from jaxkv.host.views import PageHash
from jaxkv.host.views import PagePool
from jaxkv.host.views import hash_page_tokens
from jaxkv.host.views import hash_request_tokens

__all__ = [
  "CacheManager",
  "CachePages",
  "FreeCachePageQueue",
  "MultimodalItem",
  "PageHash",
  "PagePool",
  "PoppedPages",
  "PrefixCacheStats",
  "Request",
  "hash_page_tokens",
  "hash_request_tokens",
]
