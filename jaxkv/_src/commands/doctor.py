"""`python -m jaxkv doctor`: versions, devices, kernels, and a small check.

Bug reports should include the output. The check allocates and commits tokens on
the default device, attends to them with the backend that "auto" chooses, and
compares the result with that of the backend "xla".
"""

import argparse
import importlib.metadata
import logging
import os
import platform
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv._src.commands import output

_PACKAGES = ("jax", "jaxlib", "numpy", "chex", "optax")
# One package of each extra.
_EXTRAS = {
  "plots": "matplotlib",
  "hf": "tokenizers",
  "hub": "huggingface_hub",
  "gguf": "gguf",
  "schema": "outlines_core",
  "checkpoints": "orbax-checkpoint",
  "clients": "google-tunix",
}
_TOLERANCE = 2e-2  # Of bfloat16 values near 1.


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds no arguments to the command's parser."""
  del parser


def run(args: argparse.Namespace) -> int:
  """Prints the report, and returns 1 if a device or the check fails, else 0."""
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
    ]
    status = 0
  # The command must report any failure, so it catches all exceptions.
  except Exception as error:
    text = " ".join(str(error).split())
    rows.append(("FAILED", f"{type(error).__name__}: {text}"))
    status = 1
  try:
    output.print_table(*rows)
    if sys.stdout:  # None if it was closed before Python began.
      sys.stdout.flush()
  except BrokenPipeError:
    # The stream is redirected, because Python would report the closed pipe
    # again at its exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  return status


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _attention() -> str:
  """Runs the check, and returns the backend that served it with the reason.

  Raises:
    ArithmeticError: the result differs from that of the backend "xla".
  """
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
  # The log gives a reason only if a preferred backend refused the call.
  return "; ".join(
    text if "(" in text else f"{text}, the first choice there"
    for text in messages
  )


def _check() -> None:
  """Caches five tokens, attends to them and checks the state."""
  config = jaxkv.CacheConfig(
    num_pages=4, page_size=16, num_slots=1, pages_per_slot=2
  )
  size = {"num_layers": 1, "num_kv_heads": 8, "head_dim": 128}
  kv = jaxkv.kv.init(config, **size, dtype=jnp.bfloat16)
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
