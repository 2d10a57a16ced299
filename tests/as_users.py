"""Programs compiled as a user's, whatever flags the tests set for speed."""

import importlib.metadata

import jax

# What `conftest` turns off. Later versions of jaxlib lack the second one.
_OPTIONS = {"xla_backend_optimization_level": 3}
if importlib.metadata.version("jaxlib").startswith("0.10."):
  _OPTIONS["xla_cpu_use_fusion_emitters"] = True


def jit(function, **options):
  """`jax.jit`; only code of a CPU is compiled in another way."""
  if jax.default_backend() != "cpu":
    return jax.jit(function, **options)
  return jax.jit(function, compiler_options=_OPTIONS, **options)
