"""Workers of a `jaxkv.workers.Pool` as Ray actors."""

import hashlib
import threading
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import workers
from jaxkv._src.extras import extra_package


class _Key(NamedTuple):
  """The data of a `jax.random.key`, because a key cannot be pickled."""

  data: np.ndarray
  impl: str


class _StoredWeights(NamedTuple):
  """Weights in Ray's object store.

  Attributes:
    source: the weights before they were stored. Their identity distinguishes
      updates, because two pools can use equal version numbers.
    params: Ray's reference to the stored arrays.
    checksum: the checksum of the arrays before they were stored.
  """

  source: Any
  params: Any
  checksum: bytes


class RayWorkers:
  """Makes workers that are Ray actors, for `jaxkv.workers.Pool`.

  The pool replaces an actor that dies, as it replaces any worker that fails.
  Weights are put into Ray's object store once for each update. An actor raises
  ValueError if the checksum of the weights that it gets is wrong.

    ray.init()
    make = RayWorkers(make_local_worker, num_gpus=1)
    with jaxkv.workers.Pool(make, 4, config=config) as pool:
      ...
  """

  def __init__(
    self,
    make: Callable[[int], workers.Worker],
    *,
    timeout: float | None = None,
    **options: Any,
  ):
    """Creates a maker of workers.

    Args:
      make: a function from a place in the pool to a worker, usually a
        `jaxkv.workers.LocalWorker`. Each actor calls a copy of this function.
      timeout: seconds after which a call to an actor fails, compilation
        included; None for no limit.
      **options: options of the actors, such as `num_gpus`.

    Raises:
      ImportError: Ray is not installed (extra `ray`).
      RuntimeError: Ray was not started.
      ValueError: `options` has `max_restarts` or `max_task_retries`.
    """
    # A restarted actor has neither its prompts nor the newest weights.
    for name in ("max_restarts", "max_task_retries"):
      if options.get(name):
        raise ValueError(
          f"`{name}` must be 0, got {options[name]}; the pool replaces actors "
          "that die."
        )
    self._ray = extra_package(
      "ray", install="jaxkv[ray]", task="To run workers as Ray actors"
    )
    if not self._ray.is_initialized():
      raise RuntimeError("Ray must be started first; call ray.init().")
    self._actor = self._ray.remote(_Actor).options(**options)
    self._make, self._timeout = make, timeout
    self._lock, self._weights = threading.Lock(), None

  def __call__(self, place: int) -> "RayWorker":
    """Returns a new worker for a place of the pool."""
    actor = self._actor.remote(self._make, place)
    return RayWorker(self._ray, actor, self._stored, self._timeout)

  def _stored(self, params: Any) -> _StoredWeights:
    """Puts weights into the object store, unless the last call stored them."""
    with self._lock:
      if self._weights is None or self._weights.source is not params:
        arrays = jax.device_get(params)
        self._weights = _StoredWeights(
          params, self._ray.put(arrays), checksum_of(arrays)
        )
      return self._weights


class RayWorker:
  """A `jaxkv.workers.Worker` in a Ray actor; `RayWorkers` makes it."""

  def __init__(
    self,
    ray: Any,
    actor: Any,
    stored: Callable[..., _StoredWeights],
    timeout: Any,
  ):
    self._ray, self._actor = ray, actor
    self._stored, self._timeout = stored, timeout

  def _call(self, name: str, *arguments: Any) -> Any:
    result = getattr(self._actor, name).remote(*arguments)
    return self._ray.get(result, timeout=self._timeout)

  def room(self) -> workers.Room:
    """See `jaxkv.workers.Worker`."""
    return self._call("call", "room")

  def match(self, requests: Any) -> np.ndarray:
    """See `jaxkv.workers.Worker`."""
    return self._call("call", "match", requests)

  def submit(self, requests: Any, ids: list[int]) -> list[bool]:
    """See `jaxkv.workers.Worker`."""
    return self._call("call", "submit", requests, ids)

  def advance(self) -> list[workers.Group]:
    """See `jaxkv.workers.Worker`."""
    return self._call("call", "advance")

  def update_weights(
    self, params: Any, version: int, max_age: int | None
  ) -> list[int]:
    """See `jaxkv.workers.Worker`."""
    weights = self._stored(params)
    # Ray resolves references that are arguments, not those inside an argument.
    return self._call(
      "update_weights", weights.params, weights.checksum, version, max_age
    )

  def export(self) -> Any:
    """See `jaxkv.workers.Worker`."""
    return _with_keys(self._call("call", "export"))

  def import_sequences(self, exported: Any, ids: list[int]) -> list[int]:
    """See `jaxkv.workers.Worker`."""
    exported = _without_keys(exported)
    return self._call("call", "import_sequences", exported, ids)

  def close(self) -> None:
    """Ends the actor."""
    self._ray.kill(self._actor)


class _Actor:
  """The Ray actor of a worker."""

  def __init__(self, make: Callable[[int], workers.Worker], place: int):
    self._worker = make(place)

  def call(self, name: str, *arguments: Any) -> Any:
    arguments = tuple(map(_with_keys, arguments))
    return _without_keys(getattr(self._worker, name)(*arguments))

  def update_weights(
    self, params: Any, checksum: bytes, version: int, max_age: int | None
  ) -> list[int]:
    if checksum_of(params) != checksum:
      raise ValueError(
        f"`params` must be the weights that were stored as version {version}, "
        "got other bytes; call the pool's update_weights again."
      )
    return self._worker.update_weights(params, version, max_age)


def checksum_of(params: Any) -> bytes:
  """Returns a checksum of the names, shapes, dtypes and bytes of arrays."""
  checksum = hashlib.blake2b(digest_size=16)
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    array = np.ascontiguousarray(leaf)
    name = jax.tree_util.keystr(path), array.shape, array.dtype.name
    checksum.update(repr(name).encode())
    checksum.update(array.reshape(-1).view(np.uint8).data)
  return checksum.digest()


def _without_keys(tree: Any) -> Any:
  """Replaces random keys by `_Key`s, and other jax arrays by numpy arrays."""

  def replaced(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
      return leaf
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return np.asarray(leaf)
    impl = str(jax.random.key_impl(leaf))
    return _Key(np.asarray(jax.random.key_data(leaf)), impl)

  return jax.tree.map(replaced, tree)


def _with_keys(tree: Any) -> Any:
  """Replaces each `_Key` by its random key, and keeps all other leaves."""

  def replaced(leaf: Any) -> Any:
    if not isinstance(leaf, _Key):
      return leaf
    return jax.random.wrap_key_data(jnp.asarray(leaf.data), impl=leaf.impl)

  return jax.tree.map(
    replaced, tree, is_leaf=lambda leaf: isinstance(leaf, _Key)
  )
