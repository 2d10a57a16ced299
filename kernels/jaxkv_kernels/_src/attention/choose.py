"""Chooses the backend of a call.

| platform | `backend="auto"` tries, in this order |
|---|---|
| cuda | triton, xla |
| tpu | mosaic_tpu, xla |
| any other | xla |

The platform is that of the first of these that exists: the devices to which an
array is committed, the device of the abstract mesh in use, jax's default
device, `jax.devices()[0]`. During a trace it is unknown where `jit` will place
the computation. So code that is compiled ahead of time for another platform, or
placed on another device, must name its backend, which implies the platform. A
call fails if the named backend does not support it: no other is tried. Outside
of a trace, it also fails on another platform, unless `interpret` is set.
"""

import functools
import importlib
import logging
from typing import Any
from typing import Protocol
from typing import cast

import jax
import jax.numpy as jnp
from jax import core

from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention.options import AttentionCall

_logger = logging.getLogger(__name__)

# The platforms of each backend; None for all platforms. If the caller names a
# backend, `target` returns the first of its platforms.
_PLATFORMS: dict[str, tuple[str, ...] | None] = {
  "mosaic_gpu": ("cuda",),
  "mosaic_tpu": ("tpu",),
  "triton": ("cuda",),
  "xla": None,
}
_ORDER = {
  # On an H200, triton took 6 to 21 % less time than mosaic_gpu.
  "cuda": ("triton", "xla"),
  "tpu": ("mosaic_tpu", "xla"),
}

BACKENDS = ("auto", *_PLATFORMS)


class Backend(Protocol):
  """Interface of a backend's module.

  A backend that cuts columns into tiles itself has `TAKES_QUERY_TILES = True`
  and reads `call.query_tile`.
  """

  def attend(self, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
    """Computes attention of a rectangle; see `api.paged_attention_padded`.

    Returns:
      (float32[B, T, H, Dv], float32[B, T, H] log-sum-exps).
    """
    ...

  def unsupported(self, platform: str, call: AttentionCall) -> str | None:
    """Returns the reason why this backend does not support a call, if any.

    Args:
      platform: the target of compilation: "cpu", "cuda", "tpu" ...
      call: only static values, such as `soft_cap`, shapes and dtypes, are read.

    Returns:
      "`name` must be X, got Y" without a period, or None.
    """
    ...


def choose_backend(
  operation: str, backend: str, call: AttentionCall
) -> Backend:
  """Chooses the backend of a call of the public function `operation`.

  Raises:
    NotImplementedError: `backend` is unknown or does not support the call.
    ValueError: `interpret` is set, but `backend` is not a Pallas backend.
  """
  check_name(backend)
  interpret = call.options.interpret
  if interpret and _PLATFORMS.get(backend) is None:
    pallas = ", ".join(
      name for name, platforms in _PLATFORMS.items() if platforms
    )
    raise ValueError(
      f"`interpret` must be False with backend={backend!r}, got"
      f" {interpret!r}; name the backend to interpret: {pallas}."
    )
  if backend != "auto":
    return _named(operation, backend, call)
  target_platform = platform(call.q, call.k_pages)
  reasons = []
  for name in _ORDER.get(target_platform, ("xla",)):
    module = _load(name)
    reason = module.unsupported(target_platform, call)
    if reason is None:
      _report(operation, name, target_platform, "; ".join(reasons))
      return module
    reasons.append(f"{name}: {reason}")
  raise NotImplementedError(
    f"no backend serves {operation} on {target_platform}: {'; '.join(reasons)}."
  )


def for_platform(platform: str) -> tuple[str, ...]:
  """Returns the names of the backends that run on a platform."""
  return tuple(
    name
    for name, platforms in _PLATFORMS.items()
    if platforms is None or platform in platforms
  )


def check_name(backend: str) -> None:
  """Raises `NotImplementedError` unless `backend` is in `BACKENDS`."""
  if backend not in BACKENDS:
    raise NotImplementedError(
      f"`backend` must be one of {', '.join(BACKENDS)}, got {backend!r}."
    )


def name_of(backend: Backend) -> str:
  """Returns the name in `BACKENDS` of a backend."""
  module: Any = backend
  return module.__name__.split(".")[-2]


def target(backend: str, *arrays: Any) -> str:
  """Returns the platform that `backend` implies, else that of the arrays."""
  platforms = _PLATFORMS.get(backend)
  return platform(*arrays) if platforms is None else platforms[0]


def platform(*arrays: Any) -> str:
  """Returns the platform on which a call with these arrays most likely runs.

  This is "cpu", "cuda", "rocm", "tpu" or another of jax's names.
  """
  for array in arrays:
    devices = check.devices_of(array)
    if devices:
      return _platform_of(next(iter(devices)))
  described = jax.sharding.get_abstract_mesh().abstract_device
  if described is not None and described.platform:
    return "cuda" if described.platform == "gpu" else described.platform
  default: Any = jax.config.jax_default_device  # pyright: ignore
  if default is None:
    default = jax.devices()[0]
  elif isinstance(default, str):
    default = jax.devices(default)[0]
  return _platform_of(default)


def _platform_of(device: Any) -> str:
  if device.platform != "gpu":
    return device.platform
  version = getattr(device.client, "platform_version", "")
  return "rocm" if "rocm" in version.lower() else "cuda"


def _named(operation: str, backend: str, call: AttentionCall) -> Backend:
  module = _load(backend)
  arrays = call.q, call.k_pages
  reason = module.unsupported(target(backend, *arrays), call)
  if reason is None and not call.options.interpret:
    reason = _wrong_platform(backend, *arrays)
  if reason is not None:
    raise NotImplementedError(
      f"backend {backend!r} does not serve {operation}: {reason}."
    )
  return module


def _wrong_platform(backend: str, *arrays: Any) -> str | None:
  """Returns the reason why a backend cannot run on the arrays' platform."""
  platforms = _PLATFORMS[backend]
  current = platform(*arrays)
  if platforms is None or current in platforms:
    return None
  # During a trace any backend is accepted, because the function may be compiled
  # for a platform other than that of its arrays, even if all arrays are
  # constants. `jnp.zeros` returns a tracer if a trace is active.
  is_traced = any(isinstance(array, core.Tracer) for array in arrays)
  if is_traced or isinstance(jnp.zeros(()), core.Tracer):
    return None
  return (
    f"the platform must be {', '.join(platforms)}, got {current}; use"
    " backend='auto', or interpret=True"
  )


def _load(name: str) -> Backend:
  # Backends are imported on first use, because importing Pallas is slow.
  module: Any = importlib.import_module(
    f"jaxkv_kernels._src.attention.{name}.backend"
  )
  return cast(Backend, module)


@functools.cache
def _report(operation: str, name: str, platform: str, reasons: str) -> None:
  """Logs a choice of backend, once for each distinct choice."""
  suffix = f" ({reasons})" if reasons else ""
  _logger.info("%s on %s: backend %s%s", operation, platform, name, suffix)
