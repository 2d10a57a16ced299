"""vLLM's scheduler over the facade and over its own manager, side by side.

Needs vLLM 0.33 in the environment; a GPU is not needed.
"""

# pyright: reportMissingImports=false

import dataclasses
import json
import math
import random
import unittest.mock
import warnings
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

pytestmark = pytest.mark.filterwarnings("ignore")

BLOCK = 4
LONGEST = 96
STEPS = 500
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


def full(size=BLOCK):
  return FullAttentionSpec(block_size=size, **_HEADS)


def window(tokens, size=BLOCK):
  return SlidingWindowSpec(block_size=size, sliding_window=tokens, **_HEADS)


def states(mode="align", size=BLOCK):
  return MambaSpec(
    block_size=size,
    shapes=((1, 1),),
    dtypes=(torch.float32,),
    mamba_cache_mode=mode,
  )


@dataclasses.dataclass(frozen=True)
class Setup:
  """A model, and how its requests are scheduled."""

  specs: tuple[Any, ...]
  num_blocks: int = 48
  caching: bool = True
  policy: str = "fcfs"
  retention: int | None = None
  asynchronous: bool = False
  in_flight: int = 1  # steps scheduled before the output of the first
  events: bool = True
  watermark: float = 0.0
  mamba_cache_mode: str = "none"


SETUPS = {
  "full": Setup((full(),)),
  "full-priority": Setup((full(),), policy="priority", watermark=0.1),
  "full-uncached": Setup((full(),), caching=False, policy="priority"),
  "full-asynchronous": Setup((full(),), asynchronous=True, in_flight=2),
  "window": Setup((window(9),), 20, retention=0),
  "hybrid": Setup((full(), window(9)), num_blocks=72, policy="priority"),
  "hybrid-kept": Setup((full(), window(9), window(17)), 100, retention=0),
  "hybrid-asynchronous": Setup(
    (full(), window(9)), 72, asynchronous=True, in_flight=2
  ),
  "states": Setup(
    (full(), states()), 52, mamba_cache_mode="align", retention=0
  ),
  "states-dense": Setup((full(), states()), 52, mamba_cache_mode="align"),
  "states-uncached": Setup(
    (full(), states("none", LONGEST)), 40, caching=False
  ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  folder = tmp_path_factory.mktemp("model")
  (folder / "config.json").write_text(json.dumps(_MODEL))
  init_none_hash(sha256)
  # Without a GPU vLLM knows its platform only where it was built for CPUs.
  before = vllm.platforms._current_platform
  vllm.platforms._current_platform = CpuPlatform()
  yield str(folder)
  vllm.platforms._current_platform = before


class Side:
  """One scheduler, and the events that it published."""

  def __init__(self, setup, model, manager):
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
    kind = AsyncScheduler if setup.asynchronous else Scheduler
    with unittest.mock.patch.object(
      scheduler_module, "KVCacheManager", manager
    ):
      self.scheduler = kind(
        vllm_config=config,
        kv_cache_config=blocks,
        block_size=math.lcm(*[spec.block_size for spec in setup.specs]),
        hash_block_size=BLOCK,
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

  def add(self, name, tokens, most, priority):
    sampling = SamplingParams(max_tokens=most, ignore_eos=True)
    sampling.update_from_generation_config({}, 1)
    hasher = get_request_block_hasher(BLOCK, sha256)
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

  def taken_events(self):
    events, self.events = self.events, []
    names = [field.name for field in dataclasses.fields(ours.BlockStored)]
    return [
      (type(one).__name__, [getattr(one, name, None) for name in names[:-1]])
      for one in events
    ]

  def free_ids(self):
    queue = self.manager.block_pool.free_block_queue
    return [block.block_id for block in queue.get_all_free_blocks()]


def _config(setup, model):
  return VllmConfig(
    model_config=ModelConfig(
      model=model,
      dtype="float32",
      skip_tokenizer_init=True,
      max_model_len=LONGEST,
    ),
    scheduler_config=SchedulerConfig(
      max_num_seqs=6,
      max_num_batched_tokens=32,
      max_model_len=LONGEST,
      enable_chunked_prefill=True,
      is_encoder_decoder=False,
      policy=setup.policy,
      watermark=setup.watermark,
      async_scheduling=setup.asynchronous,
    ),
    cache_config=CacheConfig(
      block_size=BLOCK,
      enable_prefix_caching=setup.caching,
      mamba_cache_mode=setup.mamba_cache_mode,
    ),
    kv_events_config=KVEventsConfig(
      enable_kv_cache_events=setup.events and setup.caching, publisher="null"
    ),
  )


def told(output):
  """Returns a scheduler's output for its workers, as data."""
  fields = {
    field.name: getattr(output, field.name)
    for field in dataclasses.fields(output)
  }
  for name, value in fields.items():
    if name == "scheduled_new_reqs":
      fields[name] = [
        (
          one.req_id,
          one.prompt_token_ids,
          one.block_ids,
          one.num_computed_tokens,
        )
        for one in value
      ]
    elif dataclasses.is_dataclass(value):
      fields[name] = dataclasses.asdict(value)
  return fields


class Load:
  """Requests that come and go, and what a model samples for them."""

  def __init__(self, seed):
    self.random = random.Random(seed)
    self.prefixes = [self._tokens(length) for length in (8, 20, 33, 48)]
    self.number = 0

  def _tokens(self, length):
    return [self.random.randrange(2, 100) for _ in range(length)]

  def arrivals(self):
    for _ in range(self.random.choice((0, 0, 0, 1, 1, 2))):
      shared = self.random.choice(self.prefixes)
      cut = self.random.randint(0, len(shared))
      tokens = shared[:cut] + self._tokens(self.random.randint(1, 12))
      most = self.random.randint(1, 24)
      yield str(self.number), tokens, most, self.random.randrange(3)
      self.number += 1


def run(setup, model, seed, steps):
  """Both schedulers through one load; counts of what happened."""
  sides = [
    Side(setup, model, manager)
    for manager in (KVCacheManager, ours.KVCacheManager)
  ]
  load, flying = Load(seed), []
  seen = dict.fromkeys(("new", "hits", "preempted", "aborted", "events"), 0)
  for _ in range(steps):
    for arrival in load.arrivals():
      for side in sides:
        side.add(*arrival)
    alive = sorted(sides[0].scheduler.requests, key=int)
    if alive and load.random.random() < 0.05:
      name = load.random.choice(alive)
      seen["aborted"] += 1
      for side in sides:
        side.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    outputs = [side.scheduler.schedule() for side in sides]
    expected, got = map(told, outputs)
    assert got == expected
    seen["new"] += len(outputs[0].scheduled_new_reqs)
    seen["preempted"] += len(outputs[0].preempted_req_ids or ())
    seen["hits"] += sum(
      one.num_computed_tokens > 0 for one in outputs[0].scheduled_new_reqs
    )
    flying.append(outputs)
    if len(flying) == setup.in_flight:
      seen["events"] += finish(sides, flying.pop(0), load)
    assert sides[1].free_ids() == sides[0].free_ids()
    if load.random.random() < 0.02 and not flying:
      answers = [side.scheduler.reset_prefix_cache() for side in sides]
      assert answers[0] == answers[1]
  return seen


def finish(sides, outputs, load):
  """Gives both schedulers the output of one step; events published."""
  sampled = {}
  for name in outputs[0].num_scheduled_tokens:
    request = sides[0].scheduler.requests.get(name)
    ends = request is not None and _reaches_end(request)
    sampled[name] = [load.random.randrange(2, 100)] if ends else []
  answers = [
    side.update(output, sampled)
    for side, output in zip(sides, outputs, strict=True)
  ]
  stats = [answer[0].scheduler_stats for answer in answers if 0 in answer]
  if stats:
    expected, got = (one and one.prefix_cache_stats for one in stats)
    for name in ("requests", "queries", "hits", "preempted_hits", "reset"):
      assert getattr(got, name, None) == getattr(expected, name, None)
    assert (
      stats[0] is None or stats[0].kv_cache_usage == stats[1].kv_cache_usage
    )
  events = [side.taken_events() for side in sides]
  assert events[1] == events[0]
  return len(events[0])


def _reaches_end(request):
  """True if a step computed the last known token of a request."""
  return request.num_computed_tokens >= request.num_tokens


@pytest.mark.parametrize("name", SETUPS)
def test_equals_vllm(name, model):
  seen = run(SETUPS[name], model, seed=0, steps=STEPS)
  assert seen["new"] > 100 and seen["preempted"] > 0 and seen["aborted"] > 0
  assert (seen["hits"] > 0) == SETUPS[name].caching
