"""Rollouts on several devices: examples with `jaxkv.sharding`.

The examples use these names:

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
axis, as for DeepSeek's models. All shards step together, so each step takes as
long as on the slowest shard:

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
