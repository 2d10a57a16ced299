"""The main functions of `jaxkv.rollout`, for a rollout on a mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import check_cache
from jaxkv._src.engine import generate as loop
from jaxkv._src.engine import state as rollout
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.config import check_config
from jaxkv._src.engine.generate import Until
from jaxkv._src.engine.hooks import Draft
from jaxkv._src.engine.hooks import Model
from jaxkv._src.engine.hooks import Process
from jaxkv._src.engine.hooks import StaticFunction
from jaxkv._src.engine.hooks import is_exact
from jaxkv._src.engine.memory import Memory
from jaxkv._src.engine.memory import check_slots_unused
from jaxkv._src.engine.memory import has_version
from jaxkv._src.engine.queue.requests import Requests
from jaxkv._src.engine.queue.requests import as_requests
from jaxkv._src.engine.queue.requests import check_fits
from jaxkv._src.engine.queue.requests import check_num_samples
from jaxkv._src.engine.queue.requests import check_tokens
from jaxkv._src.engine.queue.requests import map_rows
from jaxkv._src.engine.results import generated as results
from jaxkv._src.engine.results.generated import Generated
from jaxkv._src.engine.results.generated import Harvested
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import check_rollout
from jaxkv._src.kv.pools import Pools
from jaxkv._src.sharding.mesh_axes import MeshAxes
from jaxkv._src.sharding.mesh_axes import check_axes
from jaxkv._src.sharding.param_shardings import param_shardings
from jaxkv._src.sharding.shards import each_shard
from jaxkv._src.sharding.shards import placed
from jaxkv._src.sharding.shards import run_shards


def init_memory(
  make: Callable[[], tuple[CacheState, Pools]],
  *,
  axes: MeshAxes,
  num_shards: int | None = None,
) -> tuple[CacheState, Pools]:
  """Makes the cache and the K/V memory of each shard, on its devices.

  Args:
    make: returns the cache and the memory of one shard, for example `lambda:
      (jaxkv.init(sizes, secret), jaxkv.models.init_kv(model, sizes))`. All
      shards get the same secret, so that pages can move between them.
    axes: the mesh.
    num_shards: X, a multiple of the size of `axes.data`, or 1 without this
      axis; None for one shard on each device along `axes.data`.

  Returns:
    The cache and the pools; with `axes.data`, each array is [X, ...].

  Raises:
    TypeError: `num_shards` is not an int.
    ValueError: `num_shards` is not such a multiple, or the pools cannot be
      split, see `state_shardings`.
  """
  check_axes(axes)
  if num_shards is None:
    num_shards = axes.num_shards
  num_shards = as_count("num_shards", num_shards, 1)
  if num_shards % axes.num_shards or (axes.data is None and num_shards > 1):
    raise ValueError(
      f"`num_shards` must be 1 without `axes.data`, or else a multiple of "
      f"{axes.num_shards}, the size of the axis {axes.data!r}, got "
      f"{num_shards}."
    )

  # The sharding of the argument makes the program run on all devices.
  @functools.partial(jax.jit, keep_unused=True)
  def make_all(shards: Array) -> tuple[CacheState, Pools]:
    return each_shard(lambda _: make(), shards, axes=axes)

  shards = np.arange(num_shards, dtype=np.int32)
  return make_all(jax.device_put(shards, axes.by_shard()))


def init(
  cache: CacheState,
  kv: Pools,
  requests: Requests,
  key: Array,
  config: RolloutConfig,
  *,
  axes: MeshAxes,
  first_sequence: Array | int = 0,
  version: Array | int | None = None,
) -> RolloutState:
  """Returns the initial state of a rollout on a mesh.

  Each shard gets an equal part of the prompts, in order. If the number of
  shards does not divide P, the last shards get fewer prompts, and EMPTY rows.
  A sequence has the same id, and so the same samples, as on one device.

  Args:
    cache: the caches of all shards, from `init_memory` or an earlier rollout.
    kv: the K/V memory of all shards.
    requests: P prompts, see `jaxkv.rollout.init`.
    key: key[]; equal keys give equal samples.
    config: static options.
    axes: the mesh.
    first_sequence: int32[], see `jaxkv.rollout.init`.
    version: int32[], see `jaxkv.rollout.init`.

  Returns:
    The state; with `axes.data`, each array is [X, ...] for X shards.

  Raises:
    TypeError: see `jaxkv.rollout.init`.
    ValueError: see `jaxkv.rollout.init`; or the pools cannot be split, see
      `state_shardings`; or `CacheConfig.offload_pages` is set.
  """
  check_axes(axes)
  check_config(config)
  check_cache(cache, "cache")
  if cache.config.offload_pages:
    raise ValueError(
      "`cache` must have no offloaded pages, got "
      f"{cache.config.offload_pages}: pages are offloaded only "
      "without a mesh."
    )
  requests = as_requests(requests, config)
  check_num_samples(requests, config)
  check_fits(requests, cache.config, config)
  check_tokens("requests.tokens", requests.tokens, requests.lengths)
  if getattr(cache.epoch, "is_fully_addressable", False):
    # Checked here, because in `_init` the cache is traced.
    check_slots_unused(cache)
    has_version(dataclasses.replace(cache, epoch=jnp.max(cache.epoch)), version)
  first_id = rollout.as_first(first_sequence, requests, config)
  state = _init(
    cache, kv, requests, key, first_id, version, config=config, axes=axes
  )
  return dataclasses.replace(state, memory=Memory(cache=cache, kv=kv))


@functools.partial(jax.jit, static_argnames=("config", "axes"))
def _init(cache, kv, requests, key, first_id, version, *, config, axes):
  num_shards = cache.epoch.size
  num_prompts = -(-requests.tokens.shape[0] // num_shards)

  def init_shard(split, requests, key, first_id, version):
    cache, kv, shard = split
    rows = shard * num_prompts + jnp.arange(num_prompts, dtype=jnp.int32)
    first_id += shard * num_prompts * config.num_samples
    part = _select(requests, rows, config)
    state = rollout.init(
      cache, kv, part, key, config, first_sequence=first_id, version=version
    )
    # The program does not return the memory, because that would copy the pages.
    return dataclasses.replace(state, memory=None)

  shards = jnp.arange(num_shards, dtype=jnp.int32)
  index = shards if axes.data else shards[0]
  return each_shard(
    init_shard, (cache, kv, index), requests, key, first_id, version, axes=axes
  )


def _select(requests: Requests, rows: Array, config: RolloutConfig) -> Requests:
  """Returns the prompts of rows int32[R]; rows out of range get no samples."""
  sample = jnp.arange(config.num_samples, dtype=jnp.int32)
  samples = (rows[:, None] * config.num_samples + sample[None]).reshape(-1)
  if requests.num_samples is None:
    counts = jnp.full(requests.lengths.shape, config.num_samples, jnp.int32)
    requests = dataclasses.replace(requests, num_samples=counts)
  return map_rows(
    lambda array: indexing.take(jnp.asarray(array), rows),
    lambda array: indexing.take(jnp.asarray(array), samples),
    requests,
  )


def generate(
  params: Any,
  state: RolloutState,
  until: Until | None = None,
  *,
  axes: MeshAxes,
  model: Model,
  process: Process | None = None,
  draft: Draft | None = None,
) -> RolloutState:
  """Generates tokens on all shards, see `jaxkv.rollout.generate`.

  A shard stops when its own sequences have ended, or at `until`, without
  communication. But with `axes.experts`, the shards step together, until the
  last of them can stop. Jit this function with the state donated, as
  `jax.jit(functools.partial(generate, axes=axes, model=model),
  donate_argnums=1)`, so that the K/V memory is updated in place.

  Args:
    params: the model's parameters, on the devices of the mesh. For
      `axes.model` and `axes.experts`, place those of `jaxkv.models` with
      `param_shardings`.
    state: from `init`, or from an earlier call.
    until: a limit for each shard; None to run until all sequences have ended.
    axes: the mesh.
    model: see `jaxkv.rollout.generate`. With `axes.experts`, give
      `models.forward` the same axis as `expert_axis`.
    process: see `jaxkv.rollout.generate`.
    draft: see `jaxkv.rollout.generate`.

  Returns:
    The state.

  Raises:
    TypeError: see `jaxkv.rollout.generate`.
    ValueError: see `jaxkv.rollout.generate`; or a parameter is not on the
      devices of the mesh, or is split along `axes.data` where `axes` does not
      say so, or the reverse; or `model` has exact numerics with several devices
      along `axes.model`, or with `axes.experts`. Inside `jit`, only the devices
      of parameters are checked, and for Explicit axes only.
  """
  check_axes(axes)
  check_rollout(state)
  if is_exact(model) and (axes.num_parts > 1 or axes.experts):
    raise ValueError(
      '`model` must have numerics="fast" with `axes.model` or `axes.experts`, '
      'got "exact": the last bits of a sum would depend on the number of '
      "devices, or on the tokens of other shards; use `axes.data` alone."
    )
  check_placed(params, axes)
  functions = tuple(map(StaticFunction, (model, process, draft)))
  return _generate(params, state, until, axes, functions)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _generate(params, state, until, axes, functions):
  model, process, draft = (static.function for static in functions)

  def of_shard(state, params, until):
    config = state.config
    on_mesh = dataclasses.replace(
      config,
      lockstep_axis=axes.experts or config.lockstep_axis,
      vocab_parts=axes.num_parts if axes.model else config.vocab_parts,
    )
    state = dataclasses.replace(state, config=on_mesh)
    state = loop.generate(
      params, state, until, model=model, process=process, draft=draft
    )
    return dataclasses.replace(state, config=config)

  specs = jax.tree.map(lambda place: place.spec, _along_data(params, axes))
  return run_shards(
    of_shard, state, params, until, axes=axes, specs=(specs, P())
  )


def _along_data(params: Any, axes: MeshAxes) -> Any:
  """Returns the shardings of parameters along `axes.data`, for `shard_map`."""
  if axes.experts is None:
    return jax.tree.map(lambda _: axes.everywhere(), params)
  # XLA splits the arrays along `axes.model`.
  return param_shardings(params, axes=dataclasses.replace(axes, model=None))


def check_placed(params: Any, axes: MeshAxes) -> None:
  """Raises ValueError if a parameter is known to have a wrong sharding."""
  devices = set(axes.mesh.devices.flat)
  shardings = jax.tree.leaves(_along_data(params, axes))
  is_explicit = AxisType.Explicit in axes.mesh.axis_types

  def is_split(sharding: Any) -> bool:
    names = jax.tree.leaves(tuple(getattr(sharding, "spec", ())))
    return axes.data in names

  leaves = jax.tree_util.tree_leaves_with_path(params)
  for (path, leaf), expected in zip(leaves, shardings, strict=True):
    if isinstance(leaf, Tracer):
      is_placed = not is_explicit or not jax.typeof(leaf).sharding.mesh.empty
    else:
      is_placed = isinstance(leaf, Array) and leaf.devices() == devices
      is_placed = is_placed and is_split(leaf.sharding) == is_split(expected)
    if not is_placed:
      raise ValueError(
        f"`params{jax.tree_util.keystr(path)}` must be on all devices of the "
        "mesh, split as `axes` says, or it would move there in each call; call "
        "jax.device_put("
        "params, jaxkv.sharding.param_shardings(params, axes=axes)) once."
      )


def generated(state: RolloutState, *, axes: MeshAxes) -> Generated:
  """Returns the sequences of all shards, see `jaxkv.rollout.generated`.

  Groups of G samples are sorted by id, so they keep the order of the prompts
  after `rebalance`. Groups without a sequence come last. The results are
  replicated on all devices, and so in all processes.
  """
  check_axes(axes)
  check_rollout(state)
  return _generated(state, axes)


@functools.partial(jax.jit, static_argnums=1)
def _generated(state, axes):
  rows = each_shard(results.generated, state, axes=axes)
  return _in_order(rows, rows, axes)


def harvest(
  state: RolloutState, *, axes: MeshAxes, whole_prompts: bool = False
) -> tuple[RolloutState, Harvested]:
  """Removes ended sequences from all shards, see `jaxkv.rollout.harvest`.

  Args:
    state: the rollout.
    axes: the mesh.
    whole_prompts: static; True to keep sequences until all samples of their
      prompt have ended.

  Returns:
    The rollout, and the sequences in the order of `generated`.
  """
  check_axes(axes)
  check_rollout(state)
  return _harvest(state, axes, bool(whole_prompts))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _harvest(state, axes, whole_prompts):
  remove = functools.partial(results.harvest, whole_prompts=whole_prompts)
  state, out = each_shard(remove, state, axes=axes)
  return state, _in_order(out, out.results, axes)


def _in_order(tree: Any, rows: Generated, axes: MeshAxes) -> Any:
  """Concatenates arrays [X, Q, ...] of X shards, with groups sorted by id."""
  # Replicated first, because Explicit axes do not allow the gather below.
  tree, rows = placed((tree, rows), axes.everywhere())
  if axes.data is None:
    return tree
  samples = rows.config.num_samples
  ids = jnp.where(rows.valid, rows.ids, 2**31 - 1).reshape(-1, samples)
  order = jnp.argsort(jnp.min(ids, axis=1))

  def sort(leaf: Array) -> Array:
    leaf = leaf.reshape(-1, samples, *leaf.shape[2:])[order]
    return leaf.reshape(-1, *leaf.shape[2:])

  return jax.tree.map(sort, tree)
