"""What XLA is told about a program over a cache."""

CPU_COMPILER_OPTIONS = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}
"""For the `compiler_options` of an outermost `jax.jit`.

XLA:CPU splits a small gather or scatter over threads when the array behind it
is large; the hand-over costs more than the work. Other compilers have no such
pass and do as they always do.
"""
