"""Compiles for machines that are not here: GPUs, and TPUs v5e, v6e and v7x.

XLA's own compilers for them are in the wheels of the `aot` extra, and need no
such device, driver or toolkit. What comes out is real machine code, so what a
compiler refuses is seen: more shared memory than there is, a spilled register,
a vector unit's tile that does not fit. Numbers and speed are not.

The compilers sit in the process that runs the tests and change nothing of its
CPU devices. jax 0.10 to 0.12.
"""

import contextlib
import ctypes
import dataclasses
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from jaxkv_kernels._src.attention import choose

# XLA asks these of a device. From NVIDIA's data sheets of the H200 SXM, the
# A100 SXM of 80 GB and the L40, and its table of compute capabilities; bytes,
# and bytes a second.
_GPU = """
gpu_device_info {
  cuda_compute_capability { major: %(major)d minor: %(minor)d }
  core_count: %(cores)d
  fpus_per_core: %(lanes)d
  clock_rate_ghz: %(clock)s
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: %(threads)d
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: %(shared)d
  shared_memory_per_core: %(shared_core)d
  l2_cache_size: %(l2)d
  device_memory_size: %(memory)d
  memory_bandwidth: %(bandwidth)d
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "%(name)s"
"""


def _gpu(name, capability, cores, lanes, clock, threads, *memory) -> str:
  """What XLA asks, filled in; memory: KB a core, MB of L2, GB, TB a second."""
  shared, l2, size, bandwidth = memory
  return _GPU % {
    "name": name,
    "major": capability[0],
    "minor": capability[1],
    "cores": cores,
    "lanes": lanes,
    "clock": clock,
    "threads": threads,
    # A block may have all but 1 KB of a core's.
    "shared": (shared - 1) * 1024,
    "shared_core": shared * 1024,
    "l2": l2 * 2**20,
    "memory": size * 2**30,
    "bandwidth": int(bandwidth * 1e12),
  }


_GPUS = {
  "h200": _gpu("NVIDIA H200", (9, 0), 132, 128, 1.98, 2048, 228, 60, 141, 4.8),
  "a100": _gpu(
    "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 2048, 164, 40, 80, 2.039
  ),
  "l40": _gpu("NVIDIA L40", (8, 9), 142, 128, 2.49, 1536, 100, 96, 48, 0.864),
}

# Named as jax names the topologies; one chip of each is compiled for.
_TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}

TARGETS = ("h200", *_TPUS)
OLDER_GPUS = ("a100", "l40")

# Read when the TPU compiler is loaded. It would ask a metadata server where it
# runs, keep a second process out by a file in /tmp, and log there.
_TPU_ENVIRONMENT = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "TPU_LOG_DIR": "disabled",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
}


# What was said of Mosaic's kernels, by their hashes. It keeps what it compiled
# and says nothing of a kernel the second time.
_reports: dict[str, tuple["Kernel", ...]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
  """What the assembler says of one CUDA kernel.

  Attributes:
    name: its entry point.
    registers: per thread.
    spilled: bytes of registers stored to memory, per thread.
  """

  name: str
  registers: int
  spilled: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """A program compiled for a machine that is not here.

  Attributes:
    compiled: what jax calls `jax.stages.Compiled`.
    mosaic_kernels: the Mosaic GPU kernels in it, or more if some of these were
      compiled with others; of other kernels the compiler says nothing but
      whether they spill.
  """

  compiled: Any
  mosaic_kernels: tuple[Kernel, ...]

  @property
  def text(self) -> str:
    """The optimised HLO."""
    return self.compiled.as_text()

  @property
  def temporary(self) -> int:
    """Bytes beside arguments and results."""
    return self.compiled.memory_analysis().temp_size_in_bytes

  @property
  def aliased(self) -> int:
    """Bytes of arguments that are results too."""
    return self.compiled.memory_analysis().alias_size_in_bytes


def why_not(target: str) -> str | None:
  """Why nothing can be compiled for this target here; None if it can."""
  module = "jax_plugins.xla_cuda13" if target in _GPUS else "libtpu"
  try:
    found = importlib.util.find_spec(module)
  except ModuleNotFoundError:
    found = None
  if found is None:
    return f"{target}: {module} is not installed; pip install jaxkv[aot]"
  return None


def needs(*targets: str) -> pytest.MarkDecorator:
  """Skips a test, with the reason, where one of the targets has no compiler."""
  reasons = [reason for target in targets if (reason := why_not(target))]
  return pytest.mark.skipif(bool(reasons), reason="; ".join(reasons))


def for_target(target: str) -> tuple[str, ...]:
  """Names of the attention backends that can be compiled for a target."""
  return choose.for_platform("cuda" if target in _GPUS else "tpu")


def compile_for(
  target: str,
  function: Any,
  *arguments: Any,
  may_spill: bool = False,
  **keywords: Any,
) -> Program:
  """Compiles a jitted function for one device of a target.

  Args:
    target: one of `TARGETS` or `OLDER_GPUS`.
    function: what `jax.jit` returned.
    *arguments: arrays, or `jax.ShapeDtypeStruct`, in any tree. Only shapes and
      dtypes are looked at.
    may_spill: whether registers of a CUDA kernel may overflow into memory.
    **keywords: static arguments, handed on as they are.

  Returns:
    The program.

  Raises:
    jax.errors.JaxRuntimeError: the target's compiler refuses the program, one
      that spills without `may_spill` included.
    ValueError: what the assembler says of a Mosaic GPU kernel is not found.
  """
  mesh = mesh_of(target, "device", 1)
  there = NamedSharding(mesh, PartitionSpec())
  shapes = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there),
    arguments,
  )
  # Pallas asks the mesh, not the arguments, for which device it lowers.
  with jax.set_mesh(mesh):
    lowered = function.trace(*shapes, **keywords).lower()
  options = {}
  if target in _GPUS:
    # Whatever conftest.py says of code for the CPU.
    options["xla_backend_optimization_level"] = 3
    options["xla_gpu_fail_ptx_compilation_on_register_spilling"] = not may_spill
  with _mosaic_assembler_output() as output:
    compiled = lowered.compile(compiler_options=options)
  kernels = _mosaic_kernels(lowered.as_text(), "".join(output))
  spilling = [kernel for kernel in kernels if kernel.spilled]
  if spilling and not may_spill:
    raise jax.errors.JaxRuntimeError(f"registers are spilled: {spilling}")
  return Program(compiled=compiled, mosaic_kernels=kernels)


def mesh_of(target: str, axis: str, size: int) -> Mesh:
  """Devices of the target that can only be compiled for.

  Args:
    target: one of `TARGETS` or `OLDER_GPUS`.
    axis: the name of the mesh's only axis.
    size: up to four devices.
  """
  if target in _GPUS:
    topology = topologies.get_topology_desc(
      platform="cuda",
      target_config=_GPUS[target],
      topology=f"1x1x{size}",
    )
  elif target in _TPUS:
    os.environ.update(_TPU_ENVIRONMENT)
    topology = topologies.get_topology_desc(_TPUS[target], platform="tpu")
  else:
    known = (*_GPUS, *_TPUS)
    raise ValueError(f"target={target!r}; it must be one of {known}")
  chosen = np.array(topology.devices[:size])
  return Mesh(chosen, (axis,), axis_types=(AxisType.Auto,))


@contextlib.contextmanager
def _mosaic_assembler_output() -> Iterator[list[str]]:
  """Makes Mosaic GPU print what its assembler says, and catches it.

  It does so from C, to the file descriptor.
  """
  output: list[str] = []
  c_library = ctypes.CDLL(None)
  sys.stdout.flush()
  kept = os.dup(1)
  with tempfile.TemporaryFile() as file, _variable("MOSAIC_GPU_DUMP_PTXAS"):
    os.dup2(file.fileno(), 1)
    try:
      yield output
    finally:
      c_library.fflush(None)
      os.dup2(kept, 1)
      os.close(kept)
      file.seek(0)
      output.append(file.read().decode(errors="replace"))


@contextlib.contextmanager
def _variable(name: str) -> Iterator[None]:
  """An environment variable set to 1 for a while."""
  before = os.environ.get(name)
  os.environ[name] = "1"
  try:
    yield
  finally:
    if before is None:
      del os.environ[name]
    else:
      os.environ[name] = before


def _mosaic_kernels(lowered: str, output: str) -> tuple[Kernel, ...]:
  """The kernels that a program calls; no report of one is an error."""
  hashes = set(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', lowered))
  if "custom_call @mosaic_gpu" in lowered and not hashes:
    raise ValueError("a call of a Mosaic GPU kernel is not understood")
  new = hashes - _reports.keys()
  report = _kernels(output)
  if len(report) != len(new):
    raise ValueError(
      f"the assembler reports {len(report)} of {len(new)} new Mosaic kernels"
    )
  _reports.update(dict.fromkeys(new, report))
  return tuple({k: None for name in hashes for k in _reports[name]})


def _kernels(output: str) -> tuple[Kernel, ...]:
  """Reads `ptxas -v`."""
  found = []
  for block in output.split("Compiling entry function ")[1:]:
    name = re.match(r"'([^']*)'", block)
    registers = re.search(r"Used (\d+) registers", block)
    spilled = re.search(r"(\d+) bytes spill stores", block)
    if name is None or registers is None or spilled is None:
      raise ValueError(f"the assembler's report is not understood: {block}")
    found.append(
      Kernel(
        name=name[1],
        registers=int(registers[1]),
        spilled=int(spilled[1]),
      )
    )
  return tuple(found)
