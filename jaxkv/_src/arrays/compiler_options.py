"""Options for XLA's CPU compiler."""

CPU_COMPILER_OPTIONS = {
  "xla_disable_hlo_passes": "cpu-parallel-task-assigner",
  "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}
"""For `compiler_options` of an outermost `jax.jit`.

XLA:CPU splits a small gather or scatter over threads when the array behind it
is large, and runs small operations that are independent on several threads. The
hand-over costs more than the work. With these options it does neither: the
first has a pass of its own, and a schedule that saves memory leaves few
operations independent. Other compilers ignore both.
"""
