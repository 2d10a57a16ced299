"""Which backend serves a call.

| platform | `backend="auto"` tries, in this order |
|---|---|
| cuda | triton, xla |
| tpu | mosaic_tpu, xla |
| any other | xla |

The platform is that of the first of these that is known: the device that the
arrays were put on, the device of the abstract mesh in use, jax's default
device, the default backend. Tracing cannot know where `jit` will place a
computation. So code that is compiled ahead of time for another platform, or
placed on another device, must name its backend, which implies the platform. A
call that a named backend does not serve is an error and never goes to another
backend. Outside a trace it is also an error if the backend is not for the
platform.
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

# Platforms of each backend; None for all. A named backend implies the first of
# its platforms. A backend is imported on first use.
_PLATFORMS: dict[str, tuple[str, ...] | None] = {
  "mosaic_gpu": ("cuda",),
  "mosaic_tpu": ("tpu",),
  "triton": ("cuda",),
  "xla": None,
}
_ORDER = {
  # mosaic_gpu must be named until it has been checked and timed on a Hopper;
  # it will come first there.
  "cuda": ("triton", "xla"),
  "tpu": ("mosaic_tpu", "xla"),
}

BACKENDS = ("auto", *_PLATFORMS)


class Backend(Protocol):
  """Interface of a backend's module.

  Both functions are called while tracing. A backend that takes plans also has
  `at_once(k_pages)`: how many pieces of work it processes at once, over all K/V
  heads. One that saves work when it knows of all tiles of queries has
  `TAKES_QUERY_TILES = True` and reads `query_tile`.
  """

  def attend(self, call: AttentionCall) -> tuple[jax.Array, jax.Array]:
    """Attention of a rectangle; see `api.paged_attention_padded`.

    Returns:
      (float32[B, T, H, Dv], float32[B, T, H]).
    """
    ...

  def unsupported(self, platform: str, call: AttentionCall) -> str | None:
    """Why this backend does not serve a call.

    Args:
      platform: what the call is compiled for: "cpu", "cuda", "tpu" ...
      call: only static values, such as `soft_cap`, shapes and dtypes.

    Returns:
      "`name` must be X, got Y" without a period, or None if it serves.
    """
    ...


def choose_backend(
  operation: str, backend: str, call: AttentionCall
) -> Backend:
  """The backend for a call.

  Args:
    operation: the public function called, for the log.
    backend: one of `BACKENDS`.
    call: as for `Backend.unsupported`.

  Returns:
    The backend's module.

  Raises:
    NotImplementedError: the backend does not exist, or does not serve the call.
    ValueError: `interpret` without the name of a Pallas backend.
  """
  check_name(backend)
  interpret = call.options.interpret
  if interpret and _PLATFORMS.get(backend) is None:
    pallas = ", ".join(name for name, own in _PLATFORMS.items() if own)
    raise ValueError(
      f"`interpret` must be False with backend={backend!r}, got"
      f" {interpret!r}; name the backend to interpret: {pallas}."
    )
  if backend != "auto":
    return _named(operation, backend, call)
  here = platform(call.q, call.k_pages)
  passed_over = []
  for name in _ORDER.get(here, ("xla",)):
    module = _load(name)
    reason = module.unsupported(here, call)
    if reason is None:
      _report(operation, name, here, "; ".join(passed_over))
      return module
    passed_over.append(f"{name}: {reason}")
  raise NotImplementedError(
    f"no backend serves {operation} on {here}: {'; '.join(passed_over)}."
  )


def decode_workers(k_pages: jax.Array, *, backend: str = "auto") -> int | None:
  """The number of workers to give to `plan_decode` for a backend.

  Args:
    k_pages: [N, K, S, D]; only shape and dtype are used.
    backend: as given to `paged_decode`. "auto": the first backend that takes
      plans among those tried on this platform; other backends ignore plans.

  Returns:
    The number; None if no plan would be used.

  Raises:
    TypeError: `k_pages` has a dtype that is not supported.
    ValueError: `k_pages` has a shape that is not supported.
    NotImplementedError: the backend does not exist.

  Examples:
    >>> import jax.numpy as jnp
    >>> k_pages = jnp.zeros((9, 8, 16, 128), jnp.bfloat16)
    >>> decode_workers(k_pages, backend="mosaic_gpu")
    33
    >>> decode_workers(k_pages, backend="triton") is None
    True
  """
  check.pool("k_pages", k_pages)
  check_name(backend)
  tried = _ORDER.get(platform(k_pages), ()) if backend == "auto" else (backend,)
  for name in tried:
    at_once = getattr(_load(name), "at_once", None)
    if at_once is not None:
      return max(at_once(k_pages) // k_pages.shape[1], 1)
  return None


def for_platform(platform: str) -> tuple[str, ...]:
  """The backends that can be named on "cpu", "cuda", "tpu" or another."""
  return tuple(
    name for name, own in _PLATFORMS.items() if own is None or platform in own
  )


def check_name(backend: str) -> None:
  """Raises `NotImplementedError` unless there is such a backend."""
  if backend not in BACKENDS:
    raise NotImplementedError(
      f"`backend` must be one of {', '.join(BACKENDS)}, got {backend!r}."
    )


def name_of(chosen: Backend) -> str:
  """The name of a backend in `BACKENDS`."""
  module: Any = chosen
  return module.__name__.split(".")[-2]


def target(backend: str, *arrays: Any) -> str:
  """The platform that a call is compiled for; a named backend implies it."""
  own = _PLATFORMS.get(backend)
  return platform(*arrays) if own is None else own[0]


def platform(*arrays: Any) -> str:
  """The platform that a call runs on, as far as can be known.

  Args:
    *arrays: arguments of the call, traced or not.

  Returns:
    "cpu", "cuda", "rocm", "tpu" or another of jax's names.
  """
  for array in arrays:
    devices = check.placed(array)
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
    reason = _elsewhere(backend, *arrays)
  if reason is not None:
    raise NotImplementedError(
      f"backend {backend!r} does not serve {operation}: {reason}."
    )
  return module


def _elsewhere(backend: str, *arrays: Any) -> str | None:
  """Why a backend cannot run where the arrays are; None if it can.

  Always None in a trace: a traced function may be compiled for another platform
  than that of the arrays, even if all of them are constants.
  """
  own, here = _PLATFORMS[backend], platform(*arrays)
  if own is None or here in own:
    return None
  # In a trace, operations on constants are traced too.
  traced = any(isinstance(array, core.Tracer) for array in arrays)
  if traced or isinstance(jnp.zeros(()), core.Tracer):
    return None
  return (
    f"the platform must be {', '.join(own)}, got {here}; use backend='auto', or"
    " interpret=True"
  )


def _load(name: str) -> Backend:
  module: Any = importlib.import_module(
    f"jaxkv_kernels._src.attention.{name}.backend"
  )
  return cast(Backend, module)


@functools.cache
def _report(operation: str, name: str, here: str, passed_over: str) -> None:
  """Logs a choice, once for each distinct one."""
  why = f" ({passed_over})" if passed_over else ""
  _logger.info("%s on %s: backend %s%s", operation, here, name, why)
