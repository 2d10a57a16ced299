"""The state of a rollout: a queue, slots and memory."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv._src.arrays import arguments
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import check_shape
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import check_cache
from jaxkv._src.engine import schedule
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.config import check_config
from jaxkv._src.engine.counters import Counters
from jaxkv._src.engine.counters import init_counters
from jaxkv._src.engine.expert_records import check_experts
from jaxkv._src.engine.memory import Memory
from jaxkv._src.engine.memory import check_pools
from jaxkv._src.engine.memory import check_slots_unused
from jaxkv._src.engine.memory import has_version
from jaxkv._src.engine.queue.enqueue import new_queue
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import fail
from jaxkv._src.engine.queue.requests import Requests
from jaxkv._src.engine.queue.requests import as_requests
from jaxkv._src.engine.queue.requests import check_fits
from jaxkv._src.engine.queue.requests import check_num_samples
from jaxkv._src.engine.queue.requests import check_tokens
from jaxkv._src.engine.queue.requests import width_of
from jaxkv._src.engine.schedule import Width
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.slots import init_slots
from jaxkv._src.kv.offload_memory import OffloadMemory
from jaxkv._src.kv.pools import Pools


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutState:
  """The state of a rollout; it can be saved and resumed.

  Attributes:
    config: static options.
    queue: the sequences: `ids`, `tokens`, `length`, `status`, `finish`, `code`,
      other results, and their settings; see `help(type(state.queue))`.
    slots: the sequence in each slot.
    memory: the cache and the K/V memory.
    key: the key from which the sequences' keys are derived.  # key[]
    counters: totals since `init`, see `Counters`.
    log: the sequence id, the kind of work and the number of tokens of each slot
      in the last `RolloutConfig.timeline` calls of the model; None if this
      option is 0.  # int32[X, 3, B]
  """

  config: RolloutConfig = dataclasses.field(metadata={"static": True})
  queue: Queue
  slots: Slots
  memory: Memory
  key: Array
  counters: Counters
  log: Array | None = None


def widths_of(state: RolloutState) -> tuple[Width, ...]:
  """Returns the widths that a call of the model can have."""
  records = state.queue.log_probs_from is not None
  return schedule.widths(state.config, records=records)


def replaced(state: RolloutState, **fields: Any) -> RolloutState:
  """Returns a state with other fields, or with another `cache` or `kv`."""
  memory = fields.get("memory", state.memory)
  parts = {name: fields.pop(name) for name in ("cache", "kv") if name in fields}
  if parts:
    fields["memory"] = dataclasses.replace(memory, **parts)
  return dataclasses.replace(state, **fields)


def check_rollout(state: Any) -> None:
  """Raises unless `state` is a rollout, or a stack of them, and not donated."""
  is_pair = isinstance(state, tuple)
  hint = "make one with jaxkv.rollout.init"
  if is_pair:
    hint = "unpack what a function returned: `state, out = ...`"
  arguments.check_type("state", state, RolloutState, "a RolloutState", hint)
  arguments.check_not_donated("state", state.queue.tokens)


def check_single(state: Any) -> None:
  """Raises unless `state` is a single rollout that was not donated."""
  check_rollout(state)
  if state.queue.ids.ndim != 1:
    raise ValueError(
      "`state` must be a single rollout, got a stack of shape "
      f"{state.queue.ids.shape[:-1]}; call the function of jaxkv.sharding, or "
      "this one with jaxkv.sharding.each_shard."
    )


def init(
  cache: CacheState,
  kv: Pools,
  requests: Requests,
  key: Array,
  config: RolloutConfig,
  *,
  first_sequence: Array | int = 0,
  version: Array | int | None = None,
  offload: OffloadMemory | None = None,
) -> RolloutState:
  """Returns the initial state of a rollout.

  Args:
    cache: a cache without slots in use. It may hold prefixes of earlier
      rollouts.
    kv: the K/V memory of the cache's pages, a pool or a tuple of pools (see
      `jaxkv.kv`). The model receives it in the same form. Recurrent groups need
      `StatePages`, and limit a call of the model to one page of tokens of each
      sequence, all in `PackedView.decode` or all in `PackedView.prefill`.
      `RolloutConfig.record_experts` needs `ExpertIdPages` as the last pool.
    requests: P prompts, with the settings of their samples. The queue has
      `RolloutConfig.num_samples` rows for each prompt. If
      `Requests.num_samples` is lower, the other rows are EMPTY. Set each field
      of `sampling` that a later `submit` needs, because fields that are None
      here are not compiled.
    key: key[], from `jax.random.key`; equal keys give equal samples.
    config: static options.
    first_sequence: int32[], the id of the first sequence of this state. Ids
      must be unique over all shards of a job, see `jaxkv.sharding`. Without
      `Sampling.seed`, a sample's random key depends only on `key` and the id.
    version: int32[], the version of the weights: the number of updates since
      the cache was made, see `update_weights` and `jaxkv.new_epoch`. Required
      if the cache holds pages, because other weights may have computed them.
    offload: the offloaded pages, from `jaxkv.kv.init_offload`; None without
      `CacheConfig.offload_pages`.

  Returns:
    The state for `generate`, on the devices of `kv`. Donating it deletes
    `cache`, `kv` and `offload`, but no other argument.

  Raises:
    ValueError: an argument is out of range; the cache has slots in use, several
      page sizes or pages of another version; `kv` or `offload` does not fit the
      cache, or lacks a pool; a recurrent group is combined with `draft_tokens`;
      or the longest sequence exceeds a slot or the pool. If lengths or the
      version are traced and invalid, the sequences fail instead, see
      `queue.code`. A traced cache is not checked for slots in use: if all are,
      no sequence can run, and `generate` returns only at a limit of steps.
  """
  _check_key(key)
  check_config(config)
  call_args = key, requests, version
  check_cache(cache, "cache")
  requests = as_requests(requests, config)
  memory = Memory(cache=cache, kv=kv, offload=offload)
  check_pools(memory, config)
  check_experts(cache.config, kv, config)
  check_slots_unused(cache)
  check_num_samples(requests, config)
  check_fits(requests, cache.config, config)
  check_tokens("requests.tokens", requests.tokens, requests.lengths)
  first_id = as_first(first_sequence, requests, config)
  is_current = has_version(cache, version)
  state = _init(cache, kv, requests, key, first_id, is_current, config=config)
  # The pages may fill a device, so they are not copied.
  state = dataclasses.replace(state, memory=memory, key=key)
  state = _without_shared_arrays(state, call_args)
  return _beside(state, jax.tree.leaves(kv)[0])


# Jitted as a whole, because compiling each operation alone takes seconds. It
# reads only the shapes of `kv`, and does not return the memory: a program
# copies an argument that it returns and that is not donated.
@functools.partial(jax.jit, static_argnames="config")
def _init(
  cache: CacheState,
  kv: Pools,
  requests: Requests,
  key: Array,
  first_id: Array,
  is_current: Array,
  *,
  config: RolloutConfig,
) -> Any:
  """Returns the state without its memory and key."""
  num_prompts, columns = requests.tokens.shape
  width = width_of(columns, config)
  ids = first_id + jnp.arange(num_prompts, dtype=jnp.int32) * config.num_samples
  queue = new_queue(requests, ids, key, width, cache, kv, config)
  # With another version, prompts could hit pages that other weights computed.
  rows = jnp.arange(queue.size, dtype=jnp.int32)
  is_stale = ~is_current & (queue.status == SequenceStatus.WAITING)
  queue = fail(queue, rows, is_stale, jnp.full_like(rows, Status.STALE))
  queue = dataclasses.replace(queue, next_id=_next_id(queue, first_id, config))
  num_slots = cache.config.num_slots
  records = queue.log_probs_from is not None
  num_widths = len(schedule.widths(config, records=records))
  log = None
  if config.timeline:
    log = jnp.zeros((config.timeline, 3, num_slots), jnp.int32)
  absent: Any = None
  return RolloutState(
    config=config,
    queue=queue,
    slots=init_slots(num_slots, queue),
    memory=absent,
    key=absent,
    counters=init_counters(num_widths, cache.config.num_pools),
    log=log,
  )


def _check_key(key: Any) -> None:
  """Raises TypeError unless `key` is a key[] of `jax.random.key`."""
  dtype = getattr(key, "dtype", None)
  if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
    type_name = type(key).__name__ if dtype is None else dtype
    raise TypeError(
      f"`key` must be a jax.random.key, got {type_name}; make it with "
      "jax.random.key(seed)."
    )
  check_shape("key", key, ())


def as_first(first_id: Any, requests: Requests, config: RolloutConfig) -> Array:
  """Returns `first_sequence` as int32[]; raises if it is out of range."""
  first_id = as_int32("first_sequence", first_id, ())
  maximum = 2**31 - 1 - requests.tokens.shape[0] * config.num_samples
  if not isinstance(first_id, Tracer) and not 0 <= int(first_id) <= maximum:
    raise ValueError(
      f"`first_sequence` must be 0 .. {maximum}, so that all ids fit int32, "
      f"got {int(first_id)}."
    )
  return jnp.asarray(first_id)


def _next_id(queue: Queue, first_id: Array, config: RolloutConfig) -> Array:
  """Returns the id after those of all prompts with samples, int32[]."""
  exists = queue.status != SequenceStatus.EMPTY
  exists = exists.reshape(-1, config.num_samples)
  end_ids = queue.ids.reshape(exists.shape)[:, -1] + 1
  used = jnp.where(jnp.any(exists, axis=1), end_ids, jnp.int32(0))
  return jnp.maximum(jnp.max(used, initial=0), first_id)


def _beside(tree: Any, memory: Array) -> Any:
  """Commits uncommitted arrays to the device or all devices of `memory`.

  Otherwise, the first call of a jitted function would return committed arrays,
  so the second call would compile again. Committed arrays stay on their
  devices. Nothing moves if `memory` is traced, uncommitted, or on several
  devices without a mesh.
  """
  if isinstance(memory, Tracer) or not memory.committed:
    return tree
  where = memory.sharding
  if isinstance(where, NamedSharding):
    where = NamedSharding(where.mesh, P())
  elif len(where.device_set) > 1:
    return tree
  leaves, structure = jax.tree.flatten(tree)
  free = [
    index
    for index, leaf in enumerate(leaves)
    if not isinstance(leaf, Tracer) and not leaf.committed
  ]
  moved = jax.device_put([leaves[index] for index in free], where)
  for index, leaf in zip(free, moved, strict=True):
    leaves[index] = leaf
  return jax.tree.unflatten(structure, leaves)


def _without_shared_arrays(tree: Any, arguments: Any) -> Any:
  """Copies the arrays that `tree` shares with the caller's arguments.

  Otherwise, donating the tree would delete arrays that the caller may use
  again. Traced arrays cannot be donated and are not copied.
  """
  shared = {
    id(leaf)
    for leaf in jax.tree.leaves(arguments)
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
  }
  return jax.tree.map(
    lambda leaf: jnp.copy(leaf) if id(leaf) in shared else leaf, tree
  )


def is_done(state: RolloutState) -> Array:
  """Returns bool[], True if no sequence is waiting or running."""
  check_rollout(state)
  return jnp.all(state.queue.status >= SequenceStatus.DONE)
