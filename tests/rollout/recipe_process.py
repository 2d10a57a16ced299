"""A process that runs a recipe of `jaxkv.rollout.devices`, for tests.

| command | effect |
|---|---|
| `data FILE` | runs a data-parallel job and writes its results |
| `data FILE ADDRESS N I` | the same as process I of N |
| `save RECIPE FOLDER` | stops in the middle, saves, finishes, writes the end |
| `restore RECIPE FOLDER` | restores, finishes, writes the end |

`tests.rollout.started` starts it, with two devices.
"""

import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import rollout
from tests.rollout import recipes

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def data(file: str, *process: str) -> None:
  names: dict[str, Any] = {"jax": jax}
  if process:
    address, number, process_id = process
    names |= {"address": address, "num_processes": int(number)}
    recipes.run("Several processes", names | {"process_id": int(process_id)})
    assert jax.process_count() == int(number)
  names |= recipes.attention_alone()
  for piece in (0, 1):
    recipes.run("Data parallel", names, piece)
  state = names["state"]
  while not _is_done(state):
    state = names["run"](names["params"], state)
  generated = jax.vmap(rollout.generated)(state)
  names["results"] = rollout.devices.merged(generated)
  recipes.run("Several processes", names, 1)
  np.savez(file, tokens=names["tokens"], lengths=names["lengths"])


def _is_done(state: rollout.RolloutState) -> bool:
  # Each process reads its own copy of a replicated result.
  return bool(jax.jit(rollout.is_done)(state).addressable_data(0))


def save(recipe: str, folder: str) -> None:
  names = _begun(recipe)
  names["state"] = state = names["run"](names["params"], names["start"]())
  assert not _is_done(state)
  names["folder"] = f"{folder}/checkpoint"
  recipes.run("Checkpoints", names)
  _write(names, f"{folder}/saved.npz")


def restore(recipe: str, folder: str) -> None:
  names = _begun(recipe)
  names["folder"] = f"{folder}/checkpoint"
  recipes.run("Checkpoints", names, 1)
  _write(names, f"{folder}/restored.npz")


def _begun(recipe: str) -> dict[str, Any]:
  """Returns the names of a recipe, which provides functions only."""
  llama = recipe == "Tensor parallel"
  names = recipes.llama() if llama else recipes.attention_alone()
  if recipe == "one device":
    names["begin"] = jax.jit(lambda *job: recipes.begun(names | {"job": job}))
    names["run"] = jax.jit(names["generate"], donate_argnums=1)
  else:
    for piece in (0, 1):
      recipes.run(recipe, names, piece)
  names["start"] = lambda: names["begin"](*names["job"])
  return names


def _write(names: dict[str, Any], file: str) -> None:
  """Finishes the rollout and writes all arrays by their paths."""
  state = names["state"]
  where = jax.tree.map(lambda leaf: leaf.sharding, state)
  while not _is_done(state):
    state = names["run"](names["params"], state)
  assert jax.tree.map(lambda leaf: leaf.sharding, state) == where
  arrays = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(state):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.random.key_data(leaf)
    arrays[jax.tree_util.keystr(path)] = np.asarray(leaf)
  np.savez(file, **arrays)


if __name__ == "__main__":
  # Printed first, to identify a process that hangs.
  print(os.getpid(), pathlib.Path(__file__).name, *sys.argv[1:], flush=True)
  {"data": data, "save": save, "restore": restore}[sys.argv[1]](*sys.argv[2:])
