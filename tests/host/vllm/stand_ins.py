"""Objects with the attributes of vLLM's that `jaxkv.host.vllm` reads."""

import dataclasses
import enum
import hashlib
from typing import Any

from jaxkv.host.vllm import KVCacheManager

BLOCK = 4
LONGEST = 64


@dataclasses.dataclass(frozen=True)
class KVCacheSpec:
  block_size: int = BLOCK


class AttentionSpec(KVCacheSpec):
  pass


class FullAttentionSpec(AttentionSpec):
  pass


class MLAAttentionSpec(FullAttentionSpec):
  pass


class RSWASpec(FullAttentionSpec):
  pass


class CrossAttentionSpec(AttentionSpec):
  pass


@dataclasses.dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
  sliding_window: int = 9
  extra_retained_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
  attention_chunk_size: int = 8


@dataclasses.dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
  mamba_cache_mode: str = "align"
  num_speculative_blocks: int = 0
  num_prefill_checkpoint_blocks: int = 0


@dataclasses.dataclass(frozen=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
  kv_cache_specs: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Group:
  kv_cache_spec: Any
  is_eagle_group: bool = False
  role: Any = "default"


@dataclasses.dataclass
class Config:
  num_blocks: int
  kv_cache_groups: list[Group]
  prefix_cache_retention_interval: int | None = None
  needs_kv_cache_zeroing: bool = False


class Status(enum.Enum):
  WAITING = 1
  RUNNING = 2
  PREEMPTED = 3


@dataclasses.dataclass
class Request:
  request_id: str
  all_token_ids: list[int]
  hashes: list[bytes] | None = None
  num_computed_tokens: int = 0
  num_in_flight_tokens: int = 0
  num_preemptions: int = 0
  status: Status = Status.WAITING
  skip_reading_prefix_cache: bool = False
  lora_request: Any = None
  mm_features: Any = None
  prompt_embeds: Any = None
  cache_salt: str | None = None
  session_id: str | None = None
  shared_prefix_boundary: int = 0
  kv_cache_report_mode: str = "incremental"

  def __post_init__(self):
    self.num_prompt_tokens = len(self.all_token_ids)

  @property
  def num_tokens(self):
    return len(self.all_token_ids)

  @property
  def block_hashes(self):
    if self.hashes is not None:
      return self.hashes
    ends = range(BLOCK, self.num_tokens + 1, BLOCK)
    prefixes = (repr(self.all_token_ids[:count]) for count in ends)
    return [hashlib.sha256(text.encode()).digest() for text in prefixes]


def request(name, tokens, **fields):
  return Request(name, list(tokens), **fields)


def manager(*specs, num_blocks=11, **options):
  """Makes a manager with blocks of four tokens; default: one full attention."""
  groups = [Group(spec) for spec in specs or (FullAttentionSpec(),)]
  config = Config(num_blocks, groups)
  for name in ("needs_kv_cache_zeroing", "prefix_cache_retention_interval"):
    if name in options:
      setattr(config, name, options.pop(name))
  return KVCacheManager(config, LONGEST, BLOCK, BLOCK, **options)


def admit(cache, request, new=None, **options):
  """Looks up and allocates; returns the new ids, or None."""
  blocks, num_hit, junction = cache.get_computed_blocks(request)
  request.shared_prefix_boundary = junction
  external = options.get("num_external_computed_tokens", 0)
  new = request.num_tokens - num_hit - external if new is None else new
  out = cache.allocate_slots(request, new, num_hit, blocks, **options)
  if out is None:
    return None
  request.num_computed_tokens = num_hit + external + new
  request.status = Status.RUNNING
  return out.get_block_ids()


def decode(cache, request, tokens):
  """Appends tokens and allocates blocks for them; returns the new ids."""
  request.all_token_ids.extend(tokens)
  new = request.num_tokens - request.num_computed_tokens
  out = cache.allocate_slots(request, new)
  request.num_computed_tokens += new
  return None if out is None else out.get_block_ids()


def free_ids(cache):
  queue = cache.block_pool.free_block_queue
  return [block.block_id for block in queue.get_all_free_blocks()]
