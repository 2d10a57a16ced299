"""Snapshots of rollouts on disk, written and read by orbax."""

import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import NamedSharding

from jaxkv._src.arrays.sharding import auto_mesh
from jaxkv._src.cache.prefix.hashing import KEY_WORDS
from jaxkv._src.cache.state import init as init_cache
from jaxkv._src.engine.queue import SequenceStatus
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.verbs.abort import requeue
from jaxkv._src.extras import extra_package
from jaxkv._src.kv.host_memory import HOST

FORMAT = 1
"""The version of the snapshot format; `restore` reads no later version."""

_FACTS = ("pages", "static", "shapes", "dtypes", "keys", "sums")
_MEMORY = ".memory."
# A snapshot without pages has only these arrays of the memory.
_IDENTITY = tuple(
  f".memory.cache.{name}" for name in ("secret", "root", "epoch", "stats")
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
      sequences are saved as waiting, and their tokens are computed again.

  Raises:
    TypeError: `state` is not a RolloutState.
    ValueError: `folder` exists, or is a URL.
    ImportError: orbax is not installed (extra `checkpoints`).
  """
  ocp, folder = _orbax(), _path(folder)
  if not isinstance(state, RolloutState):
    raise TypeError(
      f"`state` must be a RolloutState, got {type(state).__name__}."
    )
  if folder.exists():
    raise ValueError(f"`folder` must not exist, got {str(folder)!r}.")
  if not pages:
    state = _all_wait(state)
  arrays = {
    name: leaf for name, leaf in _named(state) if pages or _is_kept(name)
  }
  facts = {
    "format": FORMAT,
    "pages": pages,
    "static": dict(_static(state, "")),
    "shapes": {name: list(leaf.shape) for name, leaf in arrays.items()},
    "dtypes": {name: str(leaf.dtype) for name, leaf in arrays.items()},
    "keys": {
      name: str(jax.random.key_impl(leaf))
      for name, leaf in arrays.items()
      if _is_key(leaf)
    },
  }
  data = {
    name: jax.random.key_data(leaf) if _is_key(leaf) else leaf
    for name, leaf in arrays.items()
  }
  facts["sums"] = _checksums(data)
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
      sharding. The number of devices may have changed. Values of `target` are
      not read.

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
  if not isinstance(target, RolloutState):
    raise TypeError(
      f"`target` must be a RolloutState, got {type(target).__name__}."
    )
  with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
    facts = _read(
      checkpointer, folder, ocp.args.Composite(facts=ocp.args.JsonRestore())
    ).facts
    _check_facts(facts, folder)
    _check_static(facts, target)
    targets = dict(_named(target))
    if not facts["pages"]:
      targets = {name: x for name, x in targets.items() if _is_kept(name)}
    _check_arrays(facts, targets)
    shapes = {
      name: _stored_shape(leaf, facts["dtypes"][name])
      for name, leaf in targets.items()
    }
    data = _read(
      checkpointer,
      folder,
      ocp.args.Composite(arrays=ocp.args.StandardRestore(shapes)),
    ).arrays
  # The storage of orbax does not check all bytes of an array.
  sums = _checksums(data)
  changed = [name for name in sorted(sums) if sums[name] != facts["sums"][name]]
  if changed:
    raise ValueError(
      f"`folder` must hold a complete snapshot of a rollout, got "
      f"{str(folder)!r}: `{changed[0][1:]}` is damaged."
    )
  arrays = {
    name: _restored(data[name], leaf, facts["keys"].get(name))
    for name, leaf in targets.items()
  }
  if not facts["pages"]:
    arrays |= _empty_memory(target, arrays)
  leaves = [arrays[name] for name, _ in _named(target)]
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


def _named(state: RolloutState) -> list[tuple[str, Any]]:
  """Returns the arrays of a state, each with its name."""
  leaves = jax.tree_util.tree_flatten_with_path(state)[0]
  return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def _is_kept(name: str) -> bool:
  """Returns True for an array that a snapshot without pages contains."""
  return not name.startswith(_MEMORY) or name.startswith(_IDENTITY)


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
  """Puts the running sequences back into the queue."""

  def on_auto_axes(leaf: Any) -> Any:
    # `requeue` does not support mesh axes of type Explicit.
    where = leaf.sharding
    if not isinstance(where, NamedSharding):
      return leaf
    assert isinstance(where.mesh, Mesh)  # Only a tracer has an abstract mesh.
    mesh, kind = auto_mesh(where.mesh), where.memory_kind
    return jax.device_put(
      leaf, NamedSharding(mesh, where.spec, memory_kind=kind)
    )

  state = jax.tree.map(on_auto_axes, state)
  ids, status = state.queue.ids, state.queue.status

  def requeue_all(state: RolloutState, ids: Array, mask: Array) -> RolloutState:
    return requeue(state, ids, mask=mask)[0]

  for _ in ids.shape[1:]:
    requeue_all = jax.vmap(requeue_all)
  return requeue_all(state, ids, status == SequenceStatus.RUNNING)


def _read(checkpointer: Any, folder: pathlib.Path, items: Any) -> Any:
  try:
    return checkpointer.restore(folder, items)
  # Without memory, a complete snapshot fails too.
  except (MemoryError, jax.errors.JaxRuntimeError):
    raise
  # Orbax and its storage raise errors of many types for damaged files.
  except Exception as error:
    raise ValueError(
      f"`folder` must hold a complete snapshot of a rollout, got "
      f"{str(folder)!r}: {error}"
    ) from error


def _check_facts(facts: dict[str, Any], folder: pathlib.Path) -> None:
  if facts.get("format", FORMAT) > FORMAT:
    raise ValueError(
      f"`folder` must have format {FORMAT} or less, got {facts['format']} in "
      f"{str(folder)!r}; install the version of jaxkv that wrote it."
    )
  missing = {"format", *_FACTS} - facts.keys()
  if missing:
    raise ValueError(
      f"`folder` must hold a complete snapshot of a rollout, got "
      f"{str(folder)!r} without {', '.join(sorted(missing))}; write it with "
      "jaxkv.checkpoint.save."
    )


def _check_static(facts: dict[str, Any], target: RolloutState) -> None:
  saved, options = facts["static"], dict(_static(target, ""))
  for name in sorted(saved.keys() | options.keys()):
    # It only says how `kv.init` was called; `dtype` is compared.
    if name.endswith(".has_default_dtype"):
      continue
    if saved.get(name) != options.get(name):
      raise ValueError(
        f"`target` must have the options of the saved rollout: `{name[1:]}` "
        f"was {saved.get(name)}, got {options.get(name)}."
      )


def _check_arrays(facts: dict[str, Any], targets: dict[str, Any]) -> None:
  for name in sorted(facts["shapes"].keys() | targets.keys()):
    saved = facts["shapes"].get(name)
    got = list(targets[name].shape) if name in targets else None
    if saved != got:
      raise ValueError(
        f"`target` must have the sizes of the saved rollout: `{name[1:]}` has "
        f"the shape {saved} in the folder, got {got}."
      )
    stored, dtype = facts["dtypes"][name], str(targets[name].dtype)
    # On a CPU, pools store bfloat16 and 8-bit floats as integers of that size.
    # `_check_static` has compared the number formats, in the pools' `dtype`.
    is_pool = name.startswith((".memory.kv", ".memory.host"))
    if stored != dtype and not (
      is_pool and _itemsize(stored) == _itemsize(dtype)
    ):
      raise ValueError(
        f"`target` must have the dtypes of the saved rollout: "
        f"`{name[1:]}` was {stored}, got {dtype}."
      )


def _itemsize(dtype: str) -> int:
  return jnp.dtype(dtype).itemsize


def _stored_shape(leaf: Any, dtype: str) -> jax.ShapeDtypeStruct:
  """Returns the shape, dtype and sharding with which orbax restores `leaf`."""
  where = getattr(leaf, "sharding", None)
  if where is None:
    where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  if not _is_key(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype), sharding=where)
  data = jax.eval_shape(jax.random.key_data, leaf)
  return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=where)


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
  bits = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
  words = jax.lax.bitcast_convert_type(array, bits).astype(jnp.uint32)
  # Flattening a sharded array would gather it on each device.
  index = jnp.zeros(array.shape, jnp.uint32)
  for axis in range(array.ndim):
    place = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    index = (index + place + 1) * jnp.uint32(0x9E3779B1)
  return jnp.sum(words * (2 * index + 1), dtype=jnp.uint32)


def _restored(data: Array, leaf: Any, impl: str | None) -> Array:
  if impl is not None:
    return jax.random.wrap_key_data(data, impl=impl)
  if data.dtype != leaf.dtype:
    data = jax.lax.bitcast_convert_type(data, leaf.dtype)
  where = getattr(leaf, "sharding", None)
  if where is not None and where.memory_kind == HOST:
    # Orbax restores to host memory, but the array's type does not show this.
    data = jax.device_put(np.asarray(data), where)
  return data


def _empty_memory(
  target: RolloutState, arrays: dict[str, Array]
) -> dict[str, Array]:
  """Returns the arrays of an empty memory that are missing from `arrays`."""
  # The key does not matter: `arrays` has the secret and the root.
  key = jnp.zeros((KEY_WORDS,), jnp.uint32)
  cache = init_cache(target.memory.cache.config, key)
  empty = dataclasses.replace(target.memory, cache=cache)
  values = dict(_named(dataclasses.replace(target, memory=empty)))
  memory = {}
  for name, leaf in _named(target):
    if name in arrays:
      continue
    # A new K/V memory is zero.
    is_page = not name.startswith(".memory.cache")
    value = np.zeros((), leaf.dtype) if is_page else np.asarray(values[name])
    where = getattr(leaf, "sharding", None)
    memory[name] = jax.device_put(np.broadcast_to(value, leaf.shape), where)
  return memory
