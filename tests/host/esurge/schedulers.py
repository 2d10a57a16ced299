"""eSurge's scheduler over its own cache manager or another one."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from tests.host.esurge import easydel

PAGE, LONGEST = 4, 64


def _spec(spec_name: str, **fields: Any) -> Any:
  interface = easydel.module("core.interface")
  common = {
    "page_size": PAGE,
    "num_kv_heads": 1,
    "head_size": 4,
    "dtype": jnp.float32,
    "use_mla": False,
  }
  if spec_name == "MambaSpec":
    common = {"shapes": ((4,),), "dtype": jnp.float32}
  spec = getattr(interface, spec_name)
  return interface.CacheGroupSpec(spec(**common | fields))


def full(**fields: Any) -> Any:
  return _spec("FullAttentionSpec", **fields)


def window(num_tokens: int, **fields: Any) -> Any:
  return _spec("SlidingWindowSpec", sliding_window=num_tokens, **fields)


def chunk(num_tokens: int) -> Any:
  return _spec("ChunkedLocalAttentionSpec", attention_chunk_size=num_tokens)


def states() -> Any:
  return _spec("MambaSpec", page_size=LONGEST)


@dataclasses.dataclass
class Load:
  """A scheduler's options, and its groups.

  Attributes:
    groups: makes them.
    num_pages: pages of the pool; few, so that requests are preempted.
    policy, caching, chunked: of the scheduler.
    ahead: whether each step is scheduled before the last one's tokens are
      known.
    drafts: tokens of a draft model that must have room.
    page_size, max_model_len, max_num_seqs, max_num_batched_tokens: the sizes of
      the scheduler.
    longest_chunk: the most tokens of a prompt in one step; None for all.
  """

  groups: Any
  num_pages: int = 36
  policy: str = "fcfs"
  caching: bool = True
  chunked: bool = True
  ahead: bool = False
  drafts: int = 0
  page_size: int = PAGE
  max_model_len: int = LONGEST
  max_num_seqs: int = 8
  max_num_batched_tokens: int = 40
  longest_chunk: int | None = 13


class Run:
  """One scheduler, and the requests that it was given."""

  def __init__(self, load: Load, manager: Any):
    config = easydel.module("config")
    name = "async_scheduler" if load.ahead else "scheduler"
    made = easydel.module("scheduler." + name)
    parent = easydel.module("scheduler.scheduler")
    interface = easydel.module("core.interface")
    own_class = parent.CacheManager
    parent.CacheManager = manager or own_class
    try:
      make = made.AsyncScheduler if load.ahead else made.Scheduler
      self.scheduler = make(
        config=config.Config(
          scheduler_config=config.SchedulerConfig(
            max_num_seqs=load.max_num_seqs,
            max_num_batched_tokens=load.max_num_batched_tokens,
            max_model_len=load.max_model_len,
            policy=load.policy,
            chunked_prefill_enabled=load.chunked,
            long_prefill_token_threshold=load.longest_chunk,
            async_scheduling=load.ahead,
          ),
          cache_config=config.CacheConfig(
            num_pages=load.num_pages,
            page_size=load.page_size,
            enable_prefix_caching=load.caching,
          ),
          speculative_config=(
            config.SpeculativeConfig(load.drafts, "a draft model")
            if load.drafts
            else None
          ),
        ),
        kv_cache_config=interface.CacheGroupsConfig(
          load.num_pages, load.groups()
        ),
      )
    finally:
      parent.CacheManager = own_class
    self.cache = self.scheduler.kv_cache_manager

  def add(self, name: str, prompt: list[int], **fields: Any) -> None:
    request = easydel.module("request").EngineRequest(
      name,
      list(prompt),
      easydel.SamplingParams(
        max_tokens=fields.pop("max_tokens"),
        prompt_logprobs=fields.pop("prompt_logprobs", None),
      ),
      eos_token_id=1,
      **fields,
    )
    self.scheduler.add_request(request)

  def abort(self, name: str) -> None:
    request = easydel.module("request")
    status = request.EngineRequestStatus.FINISHED_ABORTED
    self.scheduler.finish_requests(name, status)

  def schedule(self) -> Any:
    """Runs a step; returns None if the scheduler finds its own mistake.

    With priorities it may preempt a request that it has scheduled in the same
    step, which it only notices later.
    """
    try:
      return self.scheduler.schedule()
    except (AssertionError, RuntimeError, ValueError) as error:
      notices = "total scheduled requests", "must be RUNNING"
      if str(error) and not any(notice in str(error) for notice in notices):
        raise
      return None

  def update(self, scheduled: Any, sampled: dict[str, list[int]]) -> Any:
    names = list(scheduled.num_scheduled_tokens)
    outputs = easydel.module("outputs")
    by_client = self.scheduler.update_from_output(
      scheduled,
      outputs.ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: row for row, name in enumerate(names)},
        sampled_token_ids=[list(sampled[name]) for name in names],
        spec_token_ids=None,
        logprobs=None,
        prompt_logprobs_dict={},
      ),
    )
    return {
      client: [dataclasses.asdict(output) for output in outs.outputs]
      for client, outs in by_client.items()
    }


def plain(value: Any) -> Any:
  """A `SchedulerOutput` as lists and dicts."""
  if dataclasses.is_dataclass(value):
    names = [field.name for field in dataclasses.fields(value)]
    return {name: plain(getattr(value, name)) for name in names}
  if isinstance(value, dict):
    return {key: plain(item) for key, item in value.items()}
  if isinstance(value, list | tuple) or hasattr(value, "_x"):
    return [plain(item) for item in value]
  return value


def emitting(run: Run, scheduled: Any, num_awaited: dict[str, int]) -> set[str]:
  """Returns the scheduled requests whose tokens are all computed.

  Args:
    run: the scheduler.
    scheduled: its output.
    num_awaited: output tokens that were in flight before, by request.
  """
  requests = run.scheduler.requests
  names = set()
  for name in scheduled.num_scheduled_tokens:
    request = requests[name]
    awaited = request.num_output_placeholders > num_awaited.get(name, 0)
    if awaited or request.num_computed_tokens == request.num_tokens:
      names.add(name)
  return names
