"""Rollouts on several devices.

A mesh and the names of its axes decide how a rollout is split:

| axis      | what is split                                                    |
|-----------|------------------------------------------------------------------|
| `data`    | the sequences: each shard has its own cache, memory and queue,   |
|           | and runs until its sequences end. Without `experts`, shards do   |
|           | not communicate in `generate`                                    |
| `model`   | K/V heads and the model's parameters, with two all-reduces of    |
|           | activations in each layer. Logits are split by vocabulary, and   |
|           | sampled from without a gather                                    |
| `experts` | the experts of each layer, along `data`. Each layer with experts |
|           | gathers the inputs of all shards and scatters the outputs, so    |
|           | the shards step together, as fast as the slowest, until all end  |

| function | purpose |
|---|---|
| `MeshAxes` | names the axes of a mesh |
| `param_shardings`, `state_shardings` | return the shardings of arrays |
| `init_memory`, `init` | make caches and memory, and the rollout of prompts |
| `generate` | runs the loop of each shard |
| `submit`, `harvest` | add prompts, and remove finished sequences |
| `generated` | returns the sequences of all shards in order |
| `rebalance` | moves sequences to shards with less work |
| `each_shard` | applies another function of `jaxkv.rollout` to each shard |

The caller makes the mesh. The examples use these names:

| name | value |
|---|---|
| `params`, `model` | the parameters, and the model, as for `rollout.generate` |
| `memory` | a function, the argument `make` of `sharding.init_memory` |
| `requests`, `key`, `config` | as for `rollout.init` |

Data parallel. Each device has its own cache, memory and queue:

  mesh = jax.make_mesh((jax.device_count(),), ("data",))
  axes = sharding.MeshAxes(mesh, data="data")

Tensor parallel. The devices share one cache, and split its pages by K/V heads:

  mesh = jax.make_mesh((2,), ("model",))
  axes = sharding.MeshAxes(mesh, model="model")

Both:

  mesh = jax.make_mesh((4, 2), ("data", "model"))
  axes = sharding.MeshAxes(mesh, data="data", model="model")

Data parallel attention, with the experts of each layer split over the same
axis, as for DeepSeek's models:

  mesh = jax.make_mesh((8,), ("data",))
  axes = sharding.MeshAxes(mesh, data="data", experts="data")
  model = functools.partial(model, expert_axis="data")

All four continue as follows, without `rebalance` if `axes.data` is None:

  params = jax.device_put(params, sharding.param_shardings(params, axes=axes))
  cache, kv = sharding.init_memory(memory, axes=axes)
  state = sharding.init(cache, kv, requests, key, config, axes=axes)
  generate = functools.partial(sharding.generate, axes=axes, model=model)
  rebalance = functools.partial(sharding.rebalance, axes=axes)
  run = jax.jit(lambda *x: rebalance(generate(*x)), donate_argnums=1)
  while not rollout.is_done(state):
    state = run(params, state, rollout.Until(steps=64))
  results = sharding.generated(state, axes=axes)

For the first three, `rollout.Engine(params, model, cache, axes=axes)` does all
of this but `rebalance`.

Results: the random key of a sequence does not depend on its shard. So in
data-parallel rollouts, logits equal those of one device up to rounding, and bit
for bit with exact numerics. In tensor-parallel rollouts, or if experts are
split, sums are added in another order. Tokens then differ rarely in float32,
and often in bfloat16; exact numerics are not supported. `score` and
`forward_uncached` need all experts on each device.

Attention: with `axes.model`, XLA can partition only the backend "xla". For
other backends, and always for latents, set the argument `head_sharding` of
`models.forward` or `kv.attend` to `NamedSharding(mesh, P("model"))`.

Several processes: each process begins as follows, and then runs the same
program. Only CPUs need the first line. All processes get all results.

  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(address, num_processes, process_id)

Snapshots: save between calls of `generate`. The target of `restore` must have
as many shards as the saved state. Several shards on one device run in turn.

  jaxkv.checkpoint.save(folder, state)

  cache, kv = sharding.init_memory(memory, axes=axes, num_shards=8)
  target = sharding.init(cache, kv, requests, key, config, axes=axes)
  state = jaxkv.checkpoint.restore(folder, target)
"""

from jaxkv._src.sharding.mesh_axes import MeshAxes
from jaxkv._src.sharding.param_shardings import param_shardings
from jaxkv._src.sharding.rebalance import rebalance
from jaxkv._src.sharding.rollouts import generate
from jaxkv._src.sharding.rollouts import generated
from jaxkv._src.sharding.rollouts import harvest
from jaxkv._src.sharding.rollouts import init
from jaxkv._src.sharding.rollouts import init_memory
from jaxkv._src.sharding.shards import each_shard
from jaxkv._src.sharding.state_shardings import state_shardings
from jaxkv._src.sharding.submit import submit

__all__ = [
  "MeshAxes",
  "each_shard",
  "generate",
  "generated",
  "harvest",
  "init",
  "init_memory",
  "param_shardings",
  "rebalance",
  "state_shardings",
  "submit",
]
