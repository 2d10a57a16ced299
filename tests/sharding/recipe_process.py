"""A process that runs the examples of `jaxkv.sharding`, for tests.

| command | effect |
|---|---|
| `data FILE` | runs a data-parallel job and writes its results |
| `data FILE ADDRESS N I` | the same as process I of N |
| `save AXIS FOLDER N` | saves a rollout after N of its steps, writes its end |
| `restore AXIS FOLDER` | restores all, finishes each, compares the ends |

AXIS is "data" or "model". `tests.sharding.started` starts it.
"""

import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxkv import checkpoint
from jaxkv import rollout
from jaxkv import sharding
from tests.sharding import recipes

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def data(file: str, *process: str) -> None:
  names: dict[str, Any] = {"jax": jax}
  if process:
    address, num_processes, process_id = process
    names |= {"address": address, "num_processes": int(num_processes)}
    recipes.run("Several processes", names | {"process_id": int(process_id)})
    assert jax.process_count() == int(num_processes)
  names |= recipes.attention_alone()
  recipes.run("Data parallel", names)
  recipes.run("All four", names)
  results = names["results"]
  np.savez(file, tokens=results.tokens, lengths=results.lengths)


def save(axis: str, folder: str, count: str) -> None:
  names, axes, state = _begun(axis, jax.device_count())
  model = names["model"]
  ends = recipes.done(names, jax.tree.map(jnp.copy, state), axes)
  num_steps = int(np.asarray(ends.counters.steps).max())
  _write(ends, axes, f"{folder}/end.npz")
  random = np.random.default_rng(5)
  chosen = {*random.choice(num_steps, int(count), replace=False).tolist()}
  for step in range(num_steps):
    if step in chosen:
      checkpoint.save(f"{folder}/{step}", state)
    state = sharding.generate(
      names["params"], state, rollout.Until(steps=1), axes=axes, model=model
    )


def restore(axis: str, folder: str) -> None:
  # All devices of this process hold as many shards as were saved.
  names, axes, target = _begun(axis, jax.device_count())
  expected = np.load(f"{folder}/end.npz")
  steps = [path for path in pathlib.Path(folder).iterdir() if path.is_dir()]
  assert steps
  for path in steps:
    state = checkpoint.restore(path, target)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(
      lambda leaf: leaf.sharding, target
    )
    _write(recipes.done(names, state, axes), axes, f"{folder}/results.npz")
    results = np.load(f"{folder}/results.npz")
    for name in expected.files:
      is_sum = name == "log_probs" and axis == "model"
      np.testing.assert_allclose(
        results[name], expected[name], rtol=0, atol=1e-5 if is_sum else 0
      )


def _begun(axis: str, count: int) -> tuple[dict[str, Any], Any, Any]:
  """Returns the names, the axes and the state of a job on all devices."""
  names = recipes.attention_alone() if axis == "data" else recipes.llama()
  axes = recipes.axes_of(**{axis: count}, axis_type=AxisType.Explicit)
  if axis == "model":
    return names, axes, recipes.begun_on(names, axes)
  requests = names["requests"]
  # Enough prompts for many steps of each of eight shards.
  names["requests"] = rollout.Requests(
    np.tile(requests.tokens, (8, 1)), np.tile(requests.lengths, 8)
  )
  return names, axes, recipes.begun_on(names, axes, num_shards=8)


def _write(state: rollout.RolloutState, axes: Any, file: str) -> None:
  results = sharding.generated(state, axes=axes)
  names = ("ids", "tokens", "lengths", "finish", "versions", "log_probs")
  np.savez(file, **{name: getattr(results, name) for name in names})


if __name__ == "__main__":
  # Printed first, to identify a process that hangs.
  print(os.getpid(), pathlib.Path(__file__).name, *sys.argv[1:], flush=True)
  {"data": data, "save": save, "restore": restore}[sys.argv[1]](*sys.argv[2:])
