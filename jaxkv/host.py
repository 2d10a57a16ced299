"""For schedulers in Python: the reference systems' managers, on the device."""

from jaxkv._src.host.driver import PoppedPages
from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.pages import CachePages
from jaxkv._src.host.requests import MultimodalItem
from jaxkv._src.host.requests import Request
from jaxkv._src.host.statistics import PrefixCacheStats
from jaxkv._src.host.views import FreeCachePageQueue
from jaxkv._src.host.views import PageHash
from jaxkv._src.host.views import PagePool
from jaxkv._src.host.views import hash_page_tokens
from jaxkv._src.host.views import hash_request_tokens

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
