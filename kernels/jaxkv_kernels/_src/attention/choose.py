"""Which backend serves a call.

| platform | `backend="auto"` tries, in this order |
|---|---|
| cuda | triton, xla |
| tpu | mosaic_tpu, xla |
| any other | xla |

The platform is that of the arrays, if they were put on a device, else of the
abstract mesh in use, if it names its device, else of jax's default device, else
of the default backend. Tracing cannot know where
`jit` is going to place a computation, so code that is compiled ahead of time
for another platform, or placed on another device, names its backend; naming
one names the platform that it is for. What a named backend cannot do is an
error, never another backend's work; so is, outside a trace, running it on a
platform that it is not for.
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
from jaxkv_kernels._src.attention.options import CallOptions

_logger = logging.getLogger(__name__)

# The platforms that a backend is for, the first of which is meant when it is
# named; None: all. A backend is imported when it is first asked for.
_PLATFORMS: dict[str, tuple[str, ...] | None] = {
  "mosaic_gpu": ("cuda",),
  "mosaic_tpu": ("tpu",),
  "triton": ("cuda",),
  "xla": None,
}
_ORDER = {
  # mosaic_gpu is for those who name it, until it has been checked and timed on
  # a Hopper, where it is to come first.
  "cuda": ("triton", "xla"),
  "tpu": ("mosaic_tpu", "xla"),
}

BACKENDS = ("auto", *_PLATFORMS)


class Backend(Protocol):
  """What the module of a backend defines.

  Arguments have been checked by `api`. Both are called while tracing. One that
  takes plans has `at_once(k_pages)` too: the pieces of work that it has in
  hand at once, whatever their heads of keys.
  """

  def attend(
    self,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    options: CallOptions,
  ) -> tuple[jax.Array, jax.Array]:
    """Attention of a rectangle; see `api.paged_attention_padded`.

    Args:
      q: [B, T, H, D].
      k_pages: [P, K, S, D].
      v_pages: [P, K, S, Dv].
      page_table: int32[B, M], any numbers where a row has no page.
      starts: int32[B], -1 where a row sees no key, or past M * S.
      counts: int32[B].
      options: the rest, with defaults filled in.

    Returns:
      (float32[B, T, H, Dv], float32[B, T, H]).
    """
    ...

  def unsupported(
    self,
    platform: str,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    options: CallOptions,
  ) -> str | None:
    """Why this backend does not serve a call.

    Args:
      platform: "cpu", "cuda", "tpu" ...: what is compiled for.
      q: [B, H, D] for a decode, [B, T, H, D] for a rectangle. Of this and the
        pools only shapes and dtypes may be looked at.
      k_pages: [P, K, S, D].
      v_pages: [P, K, S, Dv].
      options: likewise; static values, such as `soft_cap`, are there.

    Returns:
      One sentence that names the argument and what is supported, or None if
      it serves.
    """
    ...


def choose_backend(
  operation: str,
  backend: str,
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  options: CallOptions,
) -> Backend:
  """The backend for a call.

  Args:
    operation: what it is for, for the log.
    backend: one of `BACKENDS`.
    q: as for `Backend.unsupported`.
    k_pages: likewise.
    v_pages: likewise.
    options: likewise.

  Returns:
    Its module.

  Raises:
    NotImplementedError: there is no such backend, or it does not serve.
    ValueError: `interpret` without the name of a backend that interprets.
  """
  check_name(backend)
  if options.interpret and _PLATFORMS.get(backend) is None:
    raise ValueError(
      f"interpret={options.interpret!r} with backend={backend!r}; name one of"
      f" {', '.join(name for name, own in _PLATFORMS.items() if own) or '-'}"
    )
  if backend != "auto":
    return _named(operation, backend, q, k_pages, v_pages, options)
  here = platform(q, k_pages)
  passed_over = []
  for name in _ORDER.get(here, ("xla",)):
    module = _load(name)
    reason = module.unsupported(here, q, k_pages, v_pages, options)
    if reason is None:
      _report(operation, name, here, "; ".join(passed_over))
      return module
    passed_over.append(f"{name}: {reason}")
  raise NotImplementedError(
    f"no backend serves {operation} on {here}: {'; '.join(passed_over)}"
  )


def decode(
  chosen: Backend,
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  page_table: jax.Array,
  lengths: jax.Array,
  options: CallOptions,
) -> tuple[jax.Array, jax.Array]:
  """One query per sequence, a rectangle of one column.

  Args:
    chosen: the backend.
    q: [B, H, D].
    k_pages: [P, K, S, D].
    v_pages: [P, K, S, Dv].
    page_table: int32[B, M].
    lengths: int32[B].
    options: the rest, with defaults filled in.

  Returns:
    (float32[B, H, Dv], float32[B, H]).
  """
  starts, counts = lengths - 1, jnp.ones_like(lengths)
  out, lse = chosen.attend(
    q[:, None], k_pages, v_pages, page_table, starts, counts, options
  )
  return out[:, 0], lse[:, 0]


def decode_workers(k_pages: jax.Array, *, backend: str = "auto") -> int | None:
  """Pieces that `plan_decode` is to aim at for a backend.

  Args:
    k_pages: [P, K, S, D]; looked at for its shape alone.
    backend: as `paged_decode` will be told. "auto": whichever of those that it
      tries here takes plans; the others ignore one.

  Returns:
    The number; None if no plan would be used.

  Raises:
    ValueError: k_pages is no pool.
    NotImplementedError: there is no such backend.

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
      f"backend={backend!r} does not exist; there are {', '.join(BACKENDS)}"
    )


def name_of(chosen: Backend) -> str:
  """What a backend is called in `BACKENDS`."""
  module: Any = chosen
  return module.__name__.split(".")[-2]


def target(backend: str, *arrays: Any) -> str:
  """The platform that a call is compiled for: a named backend's own one."""
  own = _PLATFORMS.get(backend)
  return platform(*arrays) if own is None else own[0]


def platform(*arrays: Any) -> str:
  """The platform that a call runs on, as far as can be known.

  Args:
    *arrays: of the call, traced or not.

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


def _named(operation, backend, q, k_pages, v_pages, options) -> Backend:
  module = _load(backend)
  here = target(backend, q, k_pages)
  reason = module.unsupported(here, q, k_pages, v_pages, options)
  if reason is None and not options.interpret:
    reason = _elsewhere(backend, q, k_pages)
  if reason is not None:
    raise NotImplementedError(
      f"backend={backend!r} does not serve {operation}: {reason}"
    )
  return module


def _elsewhere(backend: str, *arrays: Any) -> str | None:
  """Why it cannot run where the arrays are; None if it can, or in a trace.

  What is traced may be compiled for another platform than the arrays' one,
  even if all of them are constants.
  """
  own, here = _PLATFORMS[backend], platform(*arrays)
  if own is None or here in own:
    return None
  # In a trace what is made of constants alone is traced too.
  traced = any(isinstance(array, core.Tracer) for array in arrays)
  if traced or isinstance(jnp.zeros(()), core.Tracer):
    return None
  return (
    f"the platform is {here}; supported is {', '.join(own)}, or any with"
    " interpret=True; backend='auto' chooses one that serves"
  )


def _load(name: str) -> Backend:
  module: Any = importlib.import_module(
    f"jaxkv_kernels._src.attention.{name}.backend"
  )
  return cast(Backend, module)


@functools.cache
def _report(operation: str, name: str, here: str, passed_over: str) -> None:
  """Once for each distinct choice."""
  why = f" ({passed_over})" if passed_over else ""
  _logger.info("%s on %s: backend %s%s", operation, here, name, why)
