"""Workers of a `jaxkv.workers.Pool` as Ray actors."""

import functools
import hashlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxkv import workers
from jaxkv._src.extras import extra_package

_LOGGER = logging.getLogger("jaxkv")

_MAX_SENDS = 4
"""The number of times that an actor gets weights until it counts as failed."""


class RayWorkers:
  """Makes workers that are Ray actors, for `jaxkv.workers.Pool`.

  The pool replaces an actor that dies, as it replaces any worker that fails.
  Weights are put into Ray's object store once for each update. If the checksum
  of the weights that an actor gets is wrong, they are stored and sent again.

    ray.init()
    make = RayWorkers(make_engine, num_gpus=1)
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
      make: a function from an index in the pool to a worker, usually a
        `jaxkv.rollout.Engine`. Each actor calls a copy of this function.
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
    self._check_started()
    self._actor = self._ray.remote(_Actor).options(**options)
    self._make = make
    self._timeout = timeout
    self._lock = threading.Lock()
    # The weights of the last update, and Ray's reference to their copy.
    self._stored: tuple[Any, Any] | None = None

  def __call__(self, index: int) -> Any:
    """Returns a new worker for an index in the pool."""
    self._check_started()
    actor = self._actor.remote(self._make, index)
    return _RayWorker(self._ray, actor, self._store, self._timeout)

  def _check_started(self) -> None:
    # Otherwise Ray would start itself, on this machine alone.
    if not self._ray.is_initialized():
      raise RuntimeError("Ray must be started first; call ray.init().")

  def _store(self, params: Any, damaged: Any = None) -> Any:
    """Returns a reference to weights and their checksum in the object store.

    The weights are stored again if the reference would be `damaged`.
    """
    with self._lock:
      stored = self._stored
      # By identity, because two pools can use equal version numbers.
      if stored is None or stored[0] is not params or stored[1] is damaged:
        arrays = jax.device_get(params)
        stored = params, self._ray.put((arrays, checksum_of(arrays)))
        self._stored = stored
      return stored[1]


class _RayWorker:
  """A worker in a Ray actor, with all methods of `jaxkv.workers.Worker`."""

  def __init__(
    self, ray: Any, actor: Any, store: Callable[[Any, Any], Any], timeout: Any
  ):
    self._ray = ray
    self._actor = actor
    self._store = store
    self._timeout = timeout

  def __getattr__(self, name: str) -> Callable[..., Any]:
    return functools.partial(self._get, self._actor.call, name)

  def _get(self, method: Any, *arguments: Any, **options: Any) -> Any:
    # Ray replaces references among `arguments` by the stored objects.
    result = method.remote(*arguments, **options)
    return self._ray.get(result, timeout=self._timeout)

  def update_weights(
    self, params: Any, *, version: int, max_age: int | None
  ) -> list[int]:
    damaged = None
    for _ in range(_MAX_SENDS):
      stored = self._store(params, damaged)
      dropped = self._get(self._actor.update_weights, stored, version, max_age)
      if dropped is not None:
        return dropped
      _LOGGER.warning("An actor got damaged weights of version %d.", version)
      damaged = stored
    raise RuntimeError(
      f"an actor got damaged weights of version {version} {_MAX_SENDS} times; "
      "check its machine and Ray's object store."
    )

  def close(self) -> None:
    self._ray.kill(self._actor)


class _Actor:
  """The Ray actor of a worker."""

  def __init__(self, make: Callable[[int], workers.Worker], index: int):
    self._worker = make(index)

  def call(self, name: str, *arguments: Any, **options: Any) -> Any:
    return getattr(self._worker, name)(*arguments, **options)

  def update_weights(
    self, stored: tuple[Any, bytes], version: int, max_age: int | None
  ) -> list[int] | None:
    """Returns the ids of removed prompts, or None for damaged weights."""
    params, checksum = stored
    if checksum_of(params) != checksum:
      return None
    return self._worker.update_weights(params, version=version, max_age=max_age)


def checksum_of(params: Any) -> bytes:
  """Returns a checksum of the names, shapes, dtypes and bytes of arrays."""
  checksum = hashlib.blake2b(digest_size=16)
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    array = np.ascontiguousarray(leaf)
    name = jax.tree_util.keystr(path), array.shape, array.dtype.name
    checksum.update(repr(name).encode())
    checksum.update(array.reshape(-1).view(np.uint8).data)
  return checksum.digest()
