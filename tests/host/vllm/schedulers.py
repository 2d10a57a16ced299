"""vLLM's scheduler over its own manager or another one; needs vLLM 0.33.

A GPU is not needed.
"""

# pyright: reportMissingImports=false

import contextlib
import dataclasses
import json
import math
import pathlib
import tempfile
import unittest.mock
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from jaxkv.host import vllm as ours

with warnings.catch_warnings():
  warnings.simplefilter("ignore")
  pytest.importorskip("vllm", reason="vLLM is not installed")
  pytest.importorskip("torch", reason="vLLM needs torch")
  import torch
  import vllm.platforms
  import vllm.v1.core.sched.scheduler as scheduler_module
  from vllm import SamplingParams
  from vllm.config import CacheConfig
  from vllm.config import KVEventsConfig
  from vllm.config import ModelConfig
  from vllm.config import SchedulerConfig
  from vllm.config import VllmConfig
  from vllm.platforms.cpu import CpuPlatform
  from vllm.utils.hashing import sha256
  from vllm.v1.core.kv_cache_manager import KVCacheManager
  from vllm.v1.core.kv_cache_utils import get_request_block_hasher
  from vllm.v1.core.kv_cache_utils import init_none_hash
  from vllm.v1.core.sched.async_scheduler import AsyncScheduler
  from vllm.v1.core.sched.scheduler import Scheduler
  from vllm.v1.kv_cache_interface import FullAttentionSpec
  from vllm.v1.kv_cache_interface import KVCacheConfig
  from vllm.v1.kv_cache_interface import KVCacheGroupSpec
  from vllm.v1.kv_cache_interface import MambaSpec
  from vllm.v1.kv_cache_interface import SlidingWindowSpec
  from vllm.v1.outputs import ModelRunnerOutput
  from vllm.v1.request import Request
  from vllm.v1.request import RequestStatus
  from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 4
LONGEST = 96
_HEADS = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
_MODEL = {
  "architectures": ["OPTForCausalLM"],
  "model_type": "opt",
  "hidden_size": 64,
  "ffn_dim": 64,
  "num_attention_heads": 1,
  "num_hidden_layers": 1,
  "max_position_embeddings": 2048,
  "vocab_size": 128,
  "word_embed_proj_dim": 64,
}


def full(block_size=BLOCK):
  return FullAttentionSpec(block_size=block_size, **_HEADS)


def window(tokens, block_size=BLOCK):
  return SlidingWindowSpec(
    block_size=block_size, sliding_window=tokens, **_HEADS
  )


def states(mode="align", block_size=BLOCK):
  return MambaSpec(
    block_size=block_size,
    shapes=((1, 1),),
    dtypes=(torch.float32,),
    mamba_cache_mode=mode,
  )


@dataclasses.dataclass(frozen=True)
class Setup:
  """A model, and how its requests are scheduled."""

  specs: tuple[Any, ...]
  num_blocks: int = 48
  hash_block_size: int = BLOCK
  max_model_len: int = LONGEST
  max_num_seqs: int = 6
  max_num_batched_tokens: int = 32
  caching: bool = True
  policy: str = "fcfs"
  retention: int | None = None
  asynchronous: bool = False
  in_flight: int = 1  # steps scheduled before the output of the first
  events: bool = True
  watermark: float = 0.0
  mamba_cache_mode: str = "none"


@contextlib.contextmanager
def model_folder() -> Iterator[str]:
  """Makes a model's folder, and lets vLLM run without a GPU."""
  init_none_hash(sha256)
  # Without a GPU vLLM knows its platform only where it was built for CPUs.
  old_platform = vllm.platforms._current_platform
  vllm.platforms._current_platform = CpuPlatform()
  try:
    with tempfile.TemporaryDirectory() as folder:
      (pathlib.Path(folder) / "config.json").write_text(json.dumps(_MODEL))
      yield folder
  finally:
    vllm.platforms._current_platform = old_platform


class Side:
  """One scheduler, and the events that it published."""

  def __init__(self, setup, model, manager):
    self.setup = setup
    config = _config(setup, model)
    groups = [
      KVCacheGroupSpec([f"layer {n}"], spec)
      for n, spec in enumerate(setup.specs)
    ]
    blocks = KVCacheConfig(
      num_blocks=setup.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
    )
    blocks.prefix_cache_retention_interval = setup.retention
    config.cache_config.num_gpu_blocks = setup.num_blocks
    scheduler_class = AsyncScheduler if setup.asynchronous else Scheduler
    with unittest.mock.patch.object(
      scheduler_module, "KVCacheManager", manager
    ):
      self.scheduler = scheduler_class(
        vllm_config=config,
        kv_cache_config=blocks,
        block_size=math.lcm(*[spec.block_size for spec in setup.specs]),
        hash_block_size=setup.hash_block_size,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
      )
    self.manager = self.scheduler.kv_cache_manager
    assert isinstance(self.manager, manager)
    if setup.in_flight > 1:
      # As with a connector that writes blocks out of order.
      self.scheduler.defer_block_free = True
    self.events = []
    self.scheduler.kv_event_publisher = unittest.mock.Mock(
      publish=lambda batch: self.events.extend(batch.events)
    )

  def add(self, name, tokens, max_tokens, priority):
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    sampling.update_from_generation_config({}, 1)
    hasher = get_request_block_hasher(self.setup.hash_block_size, sha256)
    self.scheduler.add_request(
      Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=float(name),
        priority=priority,
        block_hasher=hasher,
      )
    )

  def abort(self, name):
    self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

  def update(self, output, sampled):
    names = list(output.num_scheduled_tokens)
    return self.scheduler.update_from_output(
      output,
      ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: n for n, name in enumerate(names)},
        sampled_token_ids=[sampled[name] for name in names],
      ),
    )

  def free_ids(self):
    queue = self.manager.block_pool.free_block_queue
    return [block.block_id for block in queue.get_all_free_blocks()]


def both_sides(setup, model):
  """Makes the scheduler over vLLM's manager, and over that of the facade."""
  managers = KVCacheManager, ours.KVCacheManager
  return [Side(setup, model, manager) for manager in managers]


def _config(setup, model):
  return VllmConfig(
    model_config=ModelConfig(
      model=model,
      dtype="float32",
      skip_tokenizer_init=True,
      max_model_len=setup.max_model_len,
    ),
    scheduler_config=SchedulerConfig(
      max_num_seqs=setup.max_num_seqs,
      max_num_batched_tokens=setup.max_num_batched_tokens,
      max_model_len=setup.max_model_len,
      enable_chunked_prefill=True,
      is_encoder_decoder=False,
      policy=setup.policy,
      watermark=setup.watermark,
      async_scheduling=setup.asynchronous,
    ),
    cache_config=CacheConfig(
      block_size=setup.hash_block_size,
      enable_prefix_caching=setup.caching,
      mamba_cache_mode=setup.mamba_cache_mode,
    ),
    kv_events_config=KVEventsConfig(
      enable_kv_cache_events=setup.events and setup.caching, publisher="null"
    ),
  )


def as_data(output):
  """Returns a scheduler's output for its workers, as data."""
  fields = {
    field.name: getattr(output, field.name)
    for field in dataclasses.fields(output)
  }
  for name, value in fields.items():
    if name == "scheduled_new_reqs":
      fields[name] = [
        (
          new_request.req_id,
          new_request.prompt_token_ids,
          new_request.block_ids,
          new_request.num_computed_tokens,
        )
        for new_request in value
      ]
    elif dataclasses.is_dataclass(value):
      fields[name] = dataclasses.asdict(value)
  return fields


def reaches_end(request):
  """Returns True if a step computed the last known token of a request."""
  return request.num_computed_tokens >= request.num_tokens
