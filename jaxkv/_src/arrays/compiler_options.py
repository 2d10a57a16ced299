"""Options for XLA's CPU compiler."""

import jax

CPU_COMPILER_OPTIONS = {
  "xla_disable_hlo_passes": "cpu-parallel-task-assigner",
  "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}
"""The `compiler_options` for an outermost `jax.jit` on a CPU.

XLA:CPU splits a small gather or scatter over threads if its operand is large,
and runs independent small operations on several threads. Handing the work to
another thread costs more than the work itself. The first option disables the
compiler pass that splits operations. The second option makes the schedule save
memory, so few operations run at the same time. Other backends ignore both.
"""


def of_backend() -> dict[str, str | bool] | None:
  """Returns the `compiler_options` for programs of an engine.

  They are `CPU_COMPILER_OPTIONS` if the default backend is a CPU. With jax
  0.10, the older code generator is also chosen, which compiles in three
  quarters of the time. Later versions do not have it.
  """
  if jax.default_backend() != "cpu":
    return None
  options: dict[str, str | bool] = {**CPU_COMPILER_OPTIONS}
  if jax.__version__.startswith("0.10."):
    options["xla_cpu_use_fusion_emitters"] = False
  return options
