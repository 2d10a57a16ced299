"""Compiles programs as users do, whatever flags the tests set for speed."""

import importlib.metadata

import jax

# `conftest` turns these off. Later versions of jaxlib lack the second one.
_OPTIONS = {"xla_backend_optimization_level": 3}
if importlib.metadata.version("jaxlib").startswith("0.10."):
  _OPTIONS["xla_cpu_use_fusion_emitters"] = True


def jit(function, **options):
  """Calls `jax.jit`; on a CPU with full optimization."""
  if jax.default_backend() != "cpu":
    return jax.jit(function, **options)
  return jax.jit(function, compiler_options=_OPTIONS, **options)
