"""Recipes for rollouts on several devices, and functions that they use.

The recipes use these names. The cache sizes, memory and options are those of
one shard:

| name | value |
|---|---|
| `params` | the model's parameters |
| `generate` | `(params, state) -> state`: `rollout.generate` with a model |
| `sizes`, `config` | the `jaxkv.CacheConfig`, the `RolloutConfig` |
| `memory` | makes the pages: `functools.partial(jaxkv.kv.init, sizes, ...)` |
| `job` | `(prompts, lengths, key, secret)`: all N prompts, int32[N, L]; their |
| | lengths, int32[N]; the random keys of the samples and of the cache |
| `P` | `jax.sharding.PartitionSpec` |
| `AxisType`, `NamedSharding` | from `jax.sharding` too |

Data parallel. Each device has a separate cache, memory and queue, and runs
until its sequences end. Devices do not communicate. These recipes do not place
pages in host memory (`rollout.init(host=)`) yet.

  def begin_one(prompts, lengths, key, secret):
    first = jax.lax.axis_index("data") * len(prompts) * config.num_samples
    cache = jaxkv.init(sizes, secret)
    requests = rollout.Requests(prompts, lengths)
    state = rollout.init(
      cache, memory(), requests, key, config, first_sequence=first
    )
    return devices.stacked(state)

  def run_one(params, shards):
    return devices.stacked(generate(params, devices.local(shards)))

`jax.shard_map` calls these two functions for each shard:

  auto = AxisType.Auto
  mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(auto,))
  one_each = functools.partial(jax.shard_map, mesh=mesh, out_specs=P("data"))
  begin = jax.jit(
    one_each(begin_one, in_specs=(P("data"), P("data"), P(), P())),
    out_shardings=NamedSharding(mesh, P("data")),
  )
  run = jax.jit(
    one_each(run_one, in_specs=(P(), P("data"))), donate_argnums=1
  )
  params = jax.device_put(params, NamedSharding(mesh, P()))
  state = run(params, begin(*job))
  results = devices.merged(jax.vmap(rollout.generated)(state))

The results, [N * G, ...] with G = `RolloutConfig.num_samples`, are in the order
of the prompts. Samples depend only on `key` and on the sequence's id among all
shards, so they equal those of a single device. N must be a multiple of the
number of devices. Pad with prompts whose `Requests.num_samples` is 0.

Tensor parallel. One cache, whose pages are split by K/V heads; all other arrays
of the state are replicated. The compiler partitions the model by the shardings
of its parameters, with two all-reduces of activations for each layer, and moves
no page. The number of devices must divide the number of K/V heads. On a mesh
with an axis "model", this splits the parameters of `jaxkv.models`:

  split = {"output": P(None, "model"), "down": P(None, "model")}
  for name in ("query", "key", "value", "gate", "up"):
    split[name] = P(None, None, "model")

  def placed(params):
    def place(path, leaf):
      where = NamedSharding(mesh, split.get(path[-1].key, P()))
      return jax.device_put(leaf, where)

    return jax.tree_util.tree_map_with_path(place, params)

Then:

  auto = AxisType.Auto
  mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(auto,))
  params = placed(params)

  def begin(prompts, lengths, key, secret):
    requests = rollout.Requests(prompts, lengths)
    cache = jaxkv.init(sizes, secret)
    return rollout.init(cache, memory(), requests, key, config)

  places = devices.shardings(jax.eval_shape(begin, *job), mesh, heads="model")
  begin = jax.jit(begin, out_shardings=places)
  run = jax.jit(generate, donate_argnums=1, out_shardings=places)
  state = run(params, begin(*job))

On a GPU or TPU, the compiler partitions attention with `backend="xla"`, but not
the kernels of other backends. They need
`head_sharding=NamedSharding(mesh, P("model"))`, an argument of
`jaxkv.models.forward` and `jaxkv.kv.attend`. If the output layer is split by
vocabulary, gather the logits in the model:
`jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, P()))`. Otherwise
the sampler communicates about twenty times in each step.

Data and tensor parallel, with the functions above. `shard_map` splits the first
mesh axis, and the compiler the second one. JAX does not support `check_vma` for
such a `shard_map` yet.

  mesh = jax.make_mesh(
    (2, jax.device_count() // 2),
    ("data", "model"),
    axis_types=(AxisType.Auto, AxisType.Auto),
  )
  one_each = functools.partial(
    jax.shard_map,
    mesh=mesh,
    axis_names={"data"},
    out_specs=P("data"),
    check_vma=False,
  )
  params = placed(params)
  begin = one_each(begin_one, in_specs=(P("data"), P("data"), P(), P()))
  places = devices.shardings(
    jax.eval_shape(begin, *job), mesh, heads="model", shards="data"
  )
  begin = jax.jit(begin, out_shardings=places)
  run = jax.jit(
    one_each(run_one, in_specs=(P(), P("data"))),
    donate_argnums=1,
    out_shardings=places,
  )
  state = run(params, begin(*job))

Several processes. Each begins as follows (gloo is for CPUs), and then runs a
recipe unchanged, with the same `job`. `jax.device_count()` counts the devices
of all processes.

  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(address, num_processes, process_id)

A process sees only the sequences of its devices. This gathers all of them:

  tokens, lengths = multihost_utils.process_allgather(
    (results.tokens, results.lengths), tiled=True
  )

Checkpoints. `run` returns an unfinished state if `generate` has a limit, see
`rollout.Until`.

  jaxkv.checkpoint.save(folder, state)

A new process with the same `sizes` and `config` defines `begin` and `run` as in
the recipes, or with `jax.jit` for one device. It does not call `begin`, because
restoring needs only its shapes and shardings. All later results are
bit-identical to those of an uninterrupted run. The pages of a tensor-parallel
rollout can go to another number of devices.

  state = jaxkv.checkpoint.restore(folder, begin.eval_shape(*job))
  state = run(params, state)

`run` compiles once. Later calls reuse its program if their state comes from
`begin`, from `run`, from a checkpoint, or from `rollout.init` with pages that
are sharded over the mesh.
"""

import dataclasses
from typing import Any
from typing import TypeVar

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv._src.engine.state import RolloutState
from jaxkv._src.kv.host_memory import HOST
from jaxkv._src.kv.host_memory import HostMemory
from jaxkv._src.kv.memory import KVPages
from jaxkv._src.kv.pools import Pool

Tree = TypeVar("Tree")


def stacked(tree: Tree) -> Tree:
  """Adds a leading axis to each array, so that `jax.shard_map` stacks shards.

  With `out_specs=P("data")`, X shards of [1, ...] become one [X, ...].

  Args:
    tree: any pytree of arrays, such as a `RolloutState`.

  Examples:
    >>> import jax.numpy as jnp
    >>> stacked({"steps": jnp.int32(3)})["steps"].shape
    (1,)
  """
  return jax.tree.map(lambda leaf: leaf[None], tree)


def local(tree: Tree) -> Tree:
  """Removes the axis that `stacked` added: [1, ...] becomes [...].

  Args:
    tree: any pytree of arrays.

  Raises:
    ValueError: a shard has more than one entry.

  Examples:
    >>> import jax.numpy as jnp
    >>> local({"steps": jnp.ones((1,), jnp.int32)})["steps"].shape
    ()
  """
  for leaf in jax.tree.leaves(tree):
    if leaf.shape[:1] != (1,):
      raise ValueError(
        f"`tree` must have arrays [1, ...] in a shard, got {leaf.shape}; make "
        "one state for each device of the mesh axis, and call `local` inside "
        "of `jax.shard_map`."
      )
  return jax.tree.map(lambda leaf: leaf[0], tree)


def merged(tree: Tree) -> Tree:
  """Concatenates the rows of all shards: [X, Q, ...] becomes [X * Q, ...].

  Args:
    tree: a pytree of arrays with an entry for each of X shards, such as the
      results of a stacked `RolloutState`.

  Raises:
    ValueError: an array has fewer than two axes.

  Examples:
    >>> import jax.numpy as jnp
    >>> merged({"length": jnp.ones((8, 3), jnp.int32)})["length"].shape
    (24,)
  """
  for leaf in jax.tree.leaves(tree):
    if len(leaf.shape) < 2:
      raise ValueError(
        f"`tree` must have arrays [X, Q, ...], got {leaf.shape}; counters and "
        "other numbers of a shard cannot be merged."
      )
  return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)


def shardings(
  state: RolloutState, mesh: Mesh, *, heads: str, shards: str | None = None
) -> RolloutState:
  """Returns the shardings of a tensor-parallel rollout.

  K/V pages are split by heads. All other arrays, including latents, recurrent
  states and token counts, are replicated. Pass the shardings to
  `jax.device_put`, `jax.jit(out_shardings=)` or `jax.ShapeDtypeStruct`.

  Args:
    state: the state, or its shapes from `jax.eval_shape`.
    mesh: the devices.
    heads: the mesh axis over which the heads are split.
    shards: the mesh axis of the shards, if the state is `stacked`.

  Returns:
    A `NamedSharding` for each array, in a tree like `state`.

  Raises:
    ValueError: an axis is not in the mesh, or the size of `heads` does not
      divide the number of K/V heads.

  Examples:
    >>> import jaxkv, jax.numpy as jnp
    >>> from jaxkv import rollout
    >>> sizes = jaxkv.CacheConfig(
    ...   num_pages=9, page_size=4, num_slots=2, pages_per_slot=4
    ... )
    >>> kv = jaxkv.kv.init(sizes, num_layers=1, num_kv_heads=2, head_dim=8)
    >>> state = rollout.init(
    ...   jaxkv.init(sizes), kv, rollout.Requests([[5, 7]], [2]),
    ...   jax.random.key(0), rollout.RolloutConfig(max_new_tokens=4),
    ... )
    >>> mesh = jax.make_mesh((1,), ("model",))
    >>> places = shardings(state, mesh, heads="model")
    >>> places.memory.kv.k.spec == P(None, "model"), places.key.spec == P()
    (True, True)
  """
  for name, axis in (("heads", heads), ("shards", shards)):
    if axis is not None and axis not in mesh.axis_names:
      raise ValueError(
        f"`{name}` must be an axis of the mesh, one of {mesh.axis_names}, got "
        f"{axis!r}."
      )
  first = () if shards is None else (shards,)
  by_shard = NamedSharding(mesh, P(*first))
  pages = NamedSharding(mesh, P(*first, None, heads))
  places = jax.tree.map(lambda _: by_shard, state)

  def pool_places(pool: Pool) -> Pool:
    if not isinstance(pool, KVPages) or pool.v is None:
      return jax.tree.map(lambda _: by_shard, pool)
    _check_heads(pool, mesh.shape[heads], heads)
    return jax.tree.map(lambda _: pages, pool)

  kv = state.memory.kv
  kv = tuple(map(pool_places, kv)) if isinstance(kv, tuple) else pool_places(kv)
  memory = dataclasses.replace(places.memory, kv=kv)
  if memory.host is not None:
    # Pages in host memory are split along the same axis as those in `kv`.
    on_host: Any = tuple(
      NamedSharding(mesh, place.spec, memory_kind=HOST)
      for place in jax.tree.leaves(kv)
    )
    memory = dataclasses.replace(memory, host=HostMemory(pages=on_host))
  return dataclasses.replace(places, memory=memory)


def _check_heads(pool: KVPages, size: int, heads: str) -> None:
  """Raises unless the size of an axis divides the number of K/V heads."""
  number = pool.k.shape[-3]
  if number % size:
    raise ValueError(
      f"`heads` must be an axis whose size divides {number} K/V heads, got "
      f"{heads!r} of {size} devices; use fewer, and shards for the rest."
    )
