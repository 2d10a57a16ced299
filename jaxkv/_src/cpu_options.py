"""Options for XLA's CPU compiler."""

CPU_COMPILER_OPTIONS = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}
"""For `compiler_options` of an outermost `jax.jit`.

XLA:CPU splits a small gather or scatter over threads when the array behind it
is large, and the hand-over costs more than the work. Other compilers have no
such pass and ignore the option.
"""
