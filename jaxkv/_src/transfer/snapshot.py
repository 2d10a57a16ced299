"""Snapshots of rollouts on disk, written and read by orbax."""

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding
from jax.sharding import SingleDeviceSharding

from jaxkv._src.arrays.arguments import check_type
from jaxkv._src.cache.prefix.hashing import KEY_WORDS
from jaxkv._src.cache.state import init as init_cache
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import check_rollout
from jaxkv._src.extras import extra_package
from jaxkv._src.kv.offload_memory import PINNED_HOST

FORMAT = 1
"""The version of the snapshot format; `restore` reads no later version."""

# A snapshot without pages has only these arrays of the memory.
_IDENTITY = tuple(
  f".memory.cache.{name}" for name in ("secret", "root", "epoch", "counts")
)


def save(
  folder: str | pathlib.Path, state: RolloutState, *, pages: bool = True
) -> None:
  """Saves a rollout, between calls of `generate`.

  The folder appears only when it is complete. All processes of a job must call
  `save` together.

  Args:
    folder: the path of a new folder.
    state: the rollout, on any devices, sharded or not.
    pages: True to save the cache and its K/V memory. If False, the snapshot has
      about 16 bytes for each token of the queue, plus optional records; running
      sequences are saved as waiting, and their tokens are computed again. Until
      then, the experts of `RolloutConfig.record_experts` are -1.

  Raises:
    TypeError: `state` is not a RolloutState.
    ValueError: `folder` exists, or is a URL.
    ImportError: orbax is not installed (extra `checkpoints`).
  """
  ocp, folder = _orbax(), _path(folder)
  check_rollout(state)
  if folder.exists():
    raise ValueError(f"`folder` must not exist, got {str(folder)!r}.")
  if not pages:
    state = _all_wait(state)
  leaves = _nonempty(_arrays(state, pages))
  data = {
    name: jax.random.key_data(leaf) if _is_key(leaf) else leaf
    for name, leaf in leaves.items()
  }
  facts = {
    "format": FORMAT,
    "pages": pages,
    "settings": _settings(state, pages),
    "dtypes": {name: str(array.dtype) for name, array in data.items()},
    "key_impls": {
      name: str(jax.random.key_impl(leaf))
      for name, leaf in leaves.items()
      if _is_key(leaf)
    },
    "sums": _checksums(data),
  }
  facts["digest"] = _digest(facts)
  with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
    items = ocp.args.Composite(
      facts=ocp.args.JsonSave(facts), arrays=ocp.args.StandardSave(data)
    )
    checkpointer.save(folder, items)


def restore(folder: str | pathlib.Path, target: RolloutState) -> RolloutState:
  """Restores a rollout that `save` wrote.

  The restored rollout generates the same results as an uninterrupted one, up to
  rounding. They are bit-identical with exact numerics, or if the snapshot has
  pages and the number of devices is the same.

  Args:
    folder: the path that was given to `save`.
    target: a rollout of the same sizes and options, or its shapes from
      `jax.eval_shape`. Each restored array gets the sharding of the array in
      `target`, or is on the first device of this process if that array has no
      sharding. The number of devices may have changed, but not the number of
      shards: a device can have several shards. Values of `target` are not read.

  Returns:
    The rollout.

  Raises:
    TypeError: `target` is not a RolloutState.
    ValueError: `folder` is a URL or has no snapshot; the snapshot is damaged or
      of a newer format; or its options, shapes or dtypes differ from those of
      `target`.
    MemoryError: the host is out of memory.
    JaxRuntimeError: a device is out of memory.
    ImportError: orbax is not installed (extra `checkpoints`).
  """
  ocp, folder = _orbax(), _path(folder)
  check_type("target", target, RolloutState, "a RolloutState")
  with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
    facts = _read(
      checkpointer, folder, ocp.args.Composite(facts=ocp.args.JsonRestore())
    ).facts
    _check_facts(facts, folder)
    _check_settings(facts["settings"], _settings(target, facts["pages"]))
    targets = _arrays(target, facts["pages"])
    stored = _nonempty(targets)
    shapes = {
      name: _stored_shape(name, leaf, facts["dtypes"][name])
      for name, leaf in stored.items()
    }
    data = _read(
      checkpointer,
      folder,
      ocp.args.Composite(arrays=ocp.args.StandardRestore(shapes)),
    ).arrays
  # The storage of orbax does not check all bytes of an array.
  for name, checksum in _checksums(data).items():
    if checksum != facts["sums"][name]:
      raise _incomplete(folder, f"`{name[1:]}` is damaged.")
  arrays = {
    name: _restored(name, data[name], leaf, facts["key_impls"].get(name))
    for name, leaf in stored.items()
  }
  for name in targets.keys() - stored.keys():
    empty = np.zeros(targets[name].shape, targets[name].dtype)
    arrays[name] = jax.device_put(empty, _sharding(name, targets[name]))
  if not facts["pages"]:
    arrays |= _empty_memory(target)
  leaves = [arrays[name] for name in _arrays(target)]
  return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _orbax() -> Any:
  return extra_package(
    "orbax.checkpoint",
    install="jaxkv[checkpoints]",
    task="To save or restore a rollout",
  )


def _path(folder: str | pathlib.Path) -> pathlib.Path:
  # `Path` turns a URL into a local path, with one slash. A single letter in
  # front of the colon is a drive.
  if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(folder)):
    raise ValueError(
      f"`folder` must be the path of a local folder, got {folder!r}; mount the "
      "storage."
    )
  # Orbax accepts only absolute paths.
  return pathlib.Path(folder).absolute()


def _arrays(tree: Any, pages: bool = True) -> dict[str, Any]:
  """Returns the arrays of a snapshot with or without pages, by their names."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  arrays = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
  return {
    name: leaf
    for name, leaf in arrays.items()
    if pages or not name.startswith(".memory.") or name.startswith(_IDENTITY)
  }


def _nonempty(arrays: dict[str, Any]) -> dict[str, Any]:
  """Returns the arrays that have elements; orbax refuses other arrays."""
  return {name: leaf for name, leaf in arrays.items() if leaf.size}


def _settings(state: RolloutState, pages: bool) -> dict[str, str]:
  """Returns static options, and dtypes and shapes of arrays, by their names."""
  settings = {
    name: value
    for name, value in _static(state, "")
    # It only says how `kv.init` was called; `dtype` is compared.
    if not name.endswith(".has_default_dtype")
  }
  for name, leaf in _arrays(state, pages).items():
    kind = str(leaf.dtype)
    # On a CPU, pools store bfloat16 and 8-bit floats as integers of that size.
    # Their number format is a static option.
    if name.startswith((".memory.kv", ".memory.offload")):
      kind = f"{8 * leaf.dtype.itemsize} bits "
    settings[name] = f"{kind}{[*leaf.shape]}"
  return settings


def _static(tree: Any, path: str) -> Iterator[tuple[str, str]]:
  """Yields the static fields of dataclasses in a tree, with their paths."""
  if isinstance(tree, tuple):
    for index, item in enumerate(tree):
      yield from _static(item, f"{path}[{index}]")
  if not dataclasses.is_dataclass(tree):
    return
  for field in dataclasses.fields(tree):
    value, name = getattr(tree, field.name), f"{path}.{field.name}"
    if not field.metadata.get("static"):
      yield from _static(value, name)
    elif dataclasses.is_dataclass(value):
      for option in dataclasses.fields(value):
        yield f"{name}.{option.name}", repr(getattr(value, option.name))
    else:
      yield name, repr(value)


def _is_key(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _all_wait(state: RolloutState) -> RolloutState:
  """Puts running sequences back into the queue; does not free their pages."""
  queue, slots = state.queue, state.slots
  runs = queue.status == SequenceStatus.RUNNING
  status = jnp.where(runs, jnp.int32(SequenceStatus.WAITING), queue.status)
  # The last axes, because the rollout can be a stack.
  slots = Slots(
    row=jnp.full_like(slots.row, queue.ids.shape[-1]),
    leader=jnp.full_like(slots.leader, slots.leader.shape[-1]),
  )
  queue = dataclasses.replace(queue, status=status)
  return dataclasses.replace(state, queue=queue, slots=slots)


def _read(checkpointer: Any, folder: pathlib.Path, items: Any) -> Any:
  try:
    return checkpointer.restore(folder, items)
  # Without memory, a complete snapshot fails too.
  except (MemoryError, jax.errors.JaxRuntimeError):
    raise
  # Orbax and its storage raise errors of many types for damaged files.
  except Exception as error:
    raise _incomplete(folder, str(error)) from error


def _incomplete(folder: pathlib.Path, reason: str) -> ValueError:
  return ValueError(
    "`folder` must hold a complete snapshot of a rollout, got "
    f"{str(folder)!r}: {reason}"
  )


def _digest(facts: dict[str, Any]) -> str:
  """Returns a checksum of all facts but the checksum itself."""
  rest = {name: facts[name] for name in facts.keys() - {"digest"}}
  text = json.dumps(rest, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _check_facts(facts: Any, folder: pathlib.Path) -> None:
  facts = facts if isinstance(facts, dict) else {}
  number = facts.get("format")
  if isinstance(number, int) and number > FORMAT:
    raise ValueError(
      f"`folder` must have format {FORMAT} or less, got {number} in "
      f"{str(folder)!r}; install the version of jaxkv that wrote it."
    )
  if facts.get("digest") != _digest(facts):
    raise _incomplete(
      folder,
      "its facts are damaged, or not written by jaxkv.checkpoint.save.",
    )


def _check_settings(saved: dict[str, str], settings: dict[str, str]) -> None:
  # The shape is [X] for X shards, and [] for a rollout without shards.
  shapes = [facts[".key"].partition("[")[2] for facts in (saved, settings)]
  num_shards = [shape.strip("]") or "none" for shape in shapes]
  if num_shards[0] != num_shards[1]:
    raise ValueError(
      "`target` must have as many shards as the saved rollout, "
      f"{num_shards[0]}, got {num_shards[1]}. A device can have several "
      "shards: make the target with jaxkv.sharding.init_memory(num_shards="
      f"{num_shards[0]}) on a mesh of any size that divides it."
    )
  for name in sorted(saved.keys() | settings.keys()):
    if saved.get(name) != settings.get(name):
      raise ValueError(
        "`target` must have the options, sizes and dtypes of the saved "
        f"rollout: `{name[1:]}` was {saved.get(name)}, got "
        f"{settings.get(name)}."
      )


def _sharding(name: str, leaf: Any) -> Sharding:
  """Returns the sharding of a target; by default, one device of this process.

  Orbax would use the devices of the saved array, which may not exist.
  """
  where = getattr(leaf, "sharding", None)
  if where is not None:
    return where
  kind = PINNED_HOST if name.startswith(".memory.offload.pages") else None
  return SingleDeviceSharding(jax.local_devices()[0], memory_kind=kind)


def _stored_shape(name: str, leaf: Any, dtype: str) -> jax.ShapeDtypeStruct:
  """Returns the shape, dtype and sharding with which orbax restores `leaf`."""
  data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
  return jax.ShapeDtypeStruct(
    data.shape, jnp.dtype(dtype), sharding=_sharding(name, leaf)
  )


def _checksums(data: dict[str, Array]) -> dict[str, int]:
  """Returns a checksum of the bits of each array."""
  # `int` waits for each program, because two programs with collectives can
  # block each other on a CPU with more devices than cores.
  return {name: int(_checksum(array)) for name, array in data.items()}


@jax.jit
def _checksum(array: Array) -> Array:
  """Returns uint32[], a sum of the bits of elements, weighted by position."""
  if jax.typeof(array).memory_space != jax.memory.Space.Host:
    return _weighted_sum(array)

  # Page by page, because the whole array may not fit on a device.
  def add(page: Array, total: Array) -> Array:
    part = jax.lax.dynamic_index_in_dim(array, page, keepdims=False)
    part = jax.device_put(part, jax.memory.Space.Device)
    return total * jnp.uint32(0x9E3779B1) + _weighted_sum(part)

  return jax.lax.fori_loop(0, array.shape[0], add, jnp.uint32(0))


def _weighted_sum(array: Array) -> Array:
  if array.dtype == bool:
    array = array.astype(jnp.uint8)
  if jnp.iscomplexobj(array):
    array = jnp.stack([array.real, array.imag], axis=-1)
  # Elements of 64 bits become two words, in another axis.
  bits = jnp.dtype(f"uint{min(8 * array.dtype.itemsize, 32)}")
  words = jax.lax.bitcast_convert_type(array, bits).astype(jnp.uint32)
  # Flattening a sharded array would gather it on each device.
  index = jnp.zeros(words.shape, jnp.uint32)
  for axis in range(words.ndim):
    place = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    index = (index + place + 1) * jnp.uint32(0x9E3779B1)
  return jnp.sum(words * (2 * index + 1), dtype=jnp.uint32)


def _restored(name: str, data: Array, leaf: Any, key_impl: str | None) -> Array:
  if key_impl is not None:
    return jax.random.wrap_key_data(data, impl=key_impl)
  where = _sharding(name, leaf)
  if where.memory_kind == PINNED_HOST:
    # Orbax restores to offload memory, but the array's type does not show this.
    return jax.device_put(np.asarray(data).view(leaf.dtype), where)
  if data.dtype != leaf.dtype:
    data = jax.lax.bitcast_convert_type(data, leaf.dtype)
  return data


def _empty_memory(target: RolloutState) -> dict[str, Array]:
  """Returns the arrays that a snapshot without pages does not have."""
  # The key does not matter: the snapshot has the secret and the root.
  key = jnp.zeros((KEY_WORDS,), jnp.uint32)
  cache = _arrays(init_cache(target.memory.cache.config, key))
  saved, memory = _arrays(target, pages=False), {}
  for name, leaf in _arrays(target).items():
    if name not in saved:
      # A new K/V memory is zero.
      zero = np.zeros((), leaf.dtype)
      value = cache.get(name.removeprefix(".memory.cache"), zero)
      value = np.broadcast_to(value, leaf.shape)
      memory[name] = jax.device_put(value, _sharding(name, leaf))
  return memory
