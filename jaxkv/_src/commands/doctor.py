"""`python -m jaxkv doctor`: versions, devices, kernels, and a small check.

Bug reports should include the output. The check allocates and commits tokens on
the default device, attends to them with the backend that "auto" chooses, and
compares the result with that of the backend "xla". The last two rows help to
choose the arguments of `jaxkv.OffloadPolicy`. They are the measured bandwidth
of pages restored from offload memory, and an upper bound of the prefill speed.
"""

import argparse
import importlib.metadata
import logging
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
import jaxkv.results
from jaxkv._src.commands import output

_PACKAGES = ("jax", "jaxlib", "numpy", "chex", "optax")
# For each extra, one package whose presence shows that the extra is installed.
_EXTRAS = {
  "hf": "tokenizers",
  "hub": "huggingface_hub",
  "gguf": "gguf",
  "schema": "outlines_core",
  "checkpoints": "orbax-checkpoint",
  "clients": "google-tunix",
  "ray": "ray",
}
_TOLERANCE = 2e-2  # The compared values are bfloat16, of order 1.


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds nothing, because the command has no arguments."""
  del parser


def run(args: argparse.Namespace) -> int:
  """Prints the report, and returns 1 if any part of it fails, else 0."""
  del args
  extras = [name for name, package in _EXTRAS.items() if _version(package)]
  rows = [
    ("jaxkv", jaxkv.__version__),
    ("Python", f"{platform.python_version()}, {platform.platform()}"),
    ("packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)),
    ("extras", ", ".join(extras) or "none"),
  ]
  try:
    names = [f"{device.id}: {device.device_kind}" for device in jax.devices()]
    rows += [
      ("devices", f"{jax.default_backend()}, {'; '.join(names)}"),
      ('backend "auto"', _attention()),
      ("check", "passed"),
      ("bytes_per_second", _bytes_per_second()),
      ("tokens_per_second", _tokens_per_second()),
    ]
    status = 0
  # The command must report any failure, so it catches all exceptions.
  except Exception as error:
    text = " ".join(str(error).split())
    rows.append(("FAILED", f"{type(error).__name__}: {text}"))
    status = 1
  output.print_table(*rows)
  return status


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _attention() -> str:
  """Runs the check; returns the backend of "auto" and the reason for it."""
  messages: list[str] = []
  handler = logging.Handler(logging.INFO)
  handler.emit = lambda record: messages.append(record.getMessage())
  logger = logging.getLogger("jaxkv_kernels")
  level = logger.level
  logger.addHandler(handler)
  logger.setLevel(logging.INFO)
  try:
    _check()
  finally:
    logger.removeHandler(handler)
    logger.setLevel(level)
  # A message gives a reason in (...) only if a preferred backend is unfit.
  return "; ".join(
    text if "(" in text else f"{text}, the first choice there"
    for text in messages
  )


def _check() -> None:
  """Writes five tokens, attends to them, and checks the outputs and state."""
  config = jaxkv.CacheConfig(
    num_pages=4, page_size=16, num_slots=1, pages_per_slot=2
  )
  shape = {"num_layers": 1, "num_kv_heads": 8, "head_dim": 128}
  kv = jaxkv.kv.init(config, **shape, dtype=jnp.bfloat16)
  tokens = jnp.arange(5, dtype=jnp.int32)[None]
  num_tokens = jnp.asarray([5], jnp.int32)
  state, _ = jaxkv.allocate(jaxkv.init(config), num_tokens)
  view = jaxkv.view(state, num_tokens=num_tokens)
  q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 5, 8, 128)).astype(
    jnp.bfloat16
  )
  kv = jaxkv.kv.write(kv, view, 0, k, v)
  out, expected = (
    np.asarray(jaxkv.kv.attend(kv, view, 0, q, backend=name), np.float32)
    for name in ("auto", "xla")
  )
  state, _ = jaxkv.commit(state, tokens, num_tokens)
  jaxkv.check(state)
  error = np.abs(out - expected).max()
  if not error < _TOLERANCE:
    raise ArithmeticError(f'attention differs from backend "xla": {error:.3g}')


def _bytes_per_second() -> str:
  """Measures the bandwidth of pages restored from offload memory."""
  kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
  if "pinned_host" not in kinds:
    return f"no pinned_host memory, only {', '.join(kinds)}"
  count = 32
  config = jaxkv.CacheConfig(
    num_pages=1 + count,
    page_size=16,
    num_slots=1,
    pages_per_slot=1,
    offload_pages=count,
  )
  kv = jaxkv.kv.init(config, num_layers=8, num_kv_heads=8, head_dim=128)
  offload = jaxkv.kv.init_offload(kv, config)
  pages = jnp.arange(1 + count, dtype=jnp.int32)
  moves = jaxkv.results.Moves(
    page=pages + 1,
    saved_to=jnp.full_like(pages, jaxkv.results.Moves.NONE),
    restored_from=pages,
    count=jnp.int32(count),
  )
  num_bytes = sum(pages.nbytes for pages in offload.pages)
  memories = [kv, offload]
  # Donated, because a copy of the pools would take longer than the moves.
  move = jax.jit(jaxkv.kv.move, donate_argnums=(0, 1))

  def call() -> Any:
    memories[:] = move(*memories, moves)
    return memories

  return f"{num_bytes / _seconds(call):.3g}"


def _tokens_per_second() -> str:
  """Measures a bound of prefill speed for a model of a billion parameters."""
  dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
  left = jnp.ones((512, 2048), dtype)
  right = jnp.ones((2048, 2048), dtype)
  product = jax.jit(jnp.matmul)
  seconds = _seconds(lambda: product(left, right))
  # Prefill needs a multiplication and an addition for each token and parameter.
  # The product needs both for each row of `left` and element of `right`.
  speed = left.shape[0] * right.size / seconds / 1e9
  return f"{speed:.3g} at most for 1e9 parameters, times 1e9 / N for N"


def _seconds(call: Callable[[], Any]) -> float:
  """Returns the shortest time of five calls, after one that compiles."""
  times = []
  for _ in range(6):
    start_time = time.perf_counter()
    jax.block_until_ready(call())
    times.append(time.perf_counter() - start_time)
  return min(times[1:])
