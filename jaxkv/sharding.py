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
|           | the shards step together, until all of them have ended           |

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

`help(jaxkv.rollout.devices)` has examples. The caller makes the mesh, and calls
`jax.distributed.initialize` if there are several processes.
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
