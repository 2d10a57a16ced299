"""Options for XLA's CPU compiler."""

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
