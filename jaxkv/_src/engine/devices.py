"""Rollouts on several devices: examples with `jaxkv.sharding`.

The examples use these names; sizes are those of one shard:

| name | value |
|---|---|
| `params`, `model` | the parameters, and the model, as for `rollout.generate` |
| `memory` | makes the cache and its pages: `lambda: (jaxkv.init(sizes, |
| | secret), jaxkv.models.init_kv(decoder, sizes))` |
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

All three continue as follows; `rebalance` needs `axes.data`.

  params = jax.device_put(params, sharding.param_shardings(params, axes=axes))
  cache, kv = sharding.init_memory(memory, axes=axes)
  state = sharding.init(cache, kv, requests, key, config, axes=axes)
  generate = functools.partial(sharding.generate, axes=axes, model=model)
  rebalance = functools.partial(sharding.rebalance, axes=axes)
  run = jax.jit(lambda *x: rebalance(generate(*x)), donate_argnums=1)
  while not rollout.is_done(state):
    state = run(params, state, rollout.Until(steps=64))
  results = sharding.generated(state, axes=axes)

What depends on the devices. Samples depend on `key` and the id of a sequence,
not on its shard. In data-parallel rollouts, sequences equal those of one
device, bit for bit with exact numerics. In tensor-parallel ones the devices add
partial sums, so logits differ by rounding: in float32 tokens are rarely
different, in bfloat16 often, and exact numerics are refused.

Attention. With `axes.model`, XLA partitions the backend "xla" alone. Other
backends, and all with latents, need an argument of `jaxkv.models.forward` or
`jaxkv.kv.attend`: `head_sharding=NamedSharding(mesh, P("model"))`.

Several processes. Each begins as follows (gloo is for CPUs), and then runs the
same program. All devices get all results.

  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(address, num_processes, process_id)

Snapshots, in the middle of generation. A target needs as many shards as were
saved; a device can have several, which run one after another.

  jaxkv.checkpoint.save(folder, state)

  cache, kv = sharding.init_memory(memory, axes=axes, num_shards=8)
  target = sharding.init(cache, kv, requests, key, config, axes=axes)
  state = jaxkv.checkpoint.restore(folder, target)
"""
