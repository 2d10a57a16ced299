"""Compiles for absent devices: GPUs, and TPUs v5e, v6e and v7x.

XLA's compilers for them are in the wheels of the `aot` extra, and need no such
device, driver or toolkit. They generate real machine code, so a test sees what
a compiler refuses: too much shared memory, a spilled register, a tile that does
not fit the vector unit. Tests of numbers and speed need the device.

The compilers run in the test process and leave its CPU devices unchanged. They
are tested with jax 0.10 to 0.12.
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
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from jaxkv_kernels._src.attention import choose

# The device properties that XLA reads. Sources: NVIDIA's data sheets of the
# H200 SXM, the A100 SXM of 80 GB and the L40, and its table of compute
# capabilities. Units are bytes, and bytes a second.
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
  """Formats `_GPU`; `memory` is KB a core, MB of L2, GB, and TB a second."""
  shared, l2, num_gigabytes, bandwidth = memory
  return _GPU % {
    "name": name,
    "major": capability[0],
    "minor": capability[1],
    "cores": cores,
    "lanes": lanes,
    "clock": clock,
    "threads": threads,
    # A block may use all shared memory of a core but 1 KB.
    "shared": (shared - 1) * 1024,
    "shared_core": shared * 1024,
    "l2": l2 * 2**20,
    "memory": num_gigabytes * 2**30,
    "bandwidth": int(bandwidth * 1e12),
  }


_GPUS = {
  "h200": _gpu("NVIDIA H200", (9, 0), 132, 128, 1.98, 2048, 228, 60, 141, 4.8),
  "a100": _gpu(
    "NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 2048, 164, 40, 80, 2.039
  ),
  "l40": _gpu("NVIDIA L40", (8, 9), 142, 128, 2.49, 1536, 100, 96, 48, 0.864),
}

# jax's names of the topologies; programs are compiled for one chip of each.
_TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}

TARGETS = ("h200", *_TPUS)
OLDER_GPUS = ("a100", "l40")

# Read when the TPU compiler is loaded. Without them it would query a metadata
# server, lock out a second process by a file in /tmp, and write logs there.
_TPU_ENVIRONMENT = {
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  "TPU_LOG_DIR": "disabled",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
}


# The reports of Mosaic's kernels, by their hashes. Mosaic caches kernels and
# reports each only once.
_reports: dict[str, tuple["Kernel", ...]] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
  """The assembler's report of one CUDA kernel.

  Attributes:
    name: the entry point.
    registers: registers of a thread.
    spilled: bytes of registers that a thread stores to memory.
  """

  name: str
  registers: int
  spilled: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """A program compiled for an absent device.

  Attributes:
    compiled: a `jax.stages.Compiled`.
    mosaic_kernels: the reports of its Mosaic GPU kernels, and of kernels that
      were compiled together with them. There are none of other kernels, but
      their spills are errors.
  """

  compiled: Any
  mosaic_kernels: tuple[Kernel, ...]

  @property
  def text(self) -> str:
    """The optimized HLO."""
    return self.compiled.as_text()

  @property
  def temporary(self) -> int:
    """Bytes of temporary buffers."""
    return self.compiled.memory_analysis().temp_size_in_bytes

  @property
  def aliased(self) -> int:
    """Bytes of arguments that results reuse."""
    return self.compiled.memory_analysis().alias_size_in_bytes


def why_not(target: str) -> str | None:
  """Returns the reason why a target cannot be compiled for, or None."""
  module = "jax_plugins.xla_cuda13" if target in _GPUS else "libtpu"
  try:
    spec = importlib.util.find_spec(module)
  except ModuleNotFoundError:
    spec = None
  if spec is None:
    return f"{target}: {module} is not installed; pip install jaxkv[aot]"
  return None


def needs(*targets: str) -> pytest.MarkDecorator:
  """Returns a mark that skips a test if a target's compiler is missing."""
  reasons = [reason for target in targets if (reason := why_not(target))]
  return pytest.mark.skipif(bool(reasons), reason="; ".join(reasons))


def for_target(target: str) -> tuple[str, ...]:
  """Returns the attention backends that can be compiled for a target."""
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
    function: a result of `jax.jit`.
    *arguments: trees of arrays or of shapes with dtypes.
    may_spill: True if registers of a CUDA kernel may spill to memory.
    **keywords: static arguments.

  Raises:
    jax.errors.JaxRuntimeError: the target's compiler refuses the program, or it
      spills without `may_spill`.
    ValueError: the assembler's report of a Mosaic GPU kernel is not found.
  """
  mesh = mesh_of(target, "device", 1)
  sharding = NamedSharding(mesh, PartitionSpec())
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    arguments,
  )
  # Pallas reads the target device from the mesh, not from the arguments.
  with jax.set_mesh(mesh):
    lowered = function.trace(*shapes, **keywords).lower()
  options = {}
  if target in _GPUS:
    # conftest.py turns optimization off for CPU programs.
    options["xla_backend_optimization_level"] = 3
    options["xla_gpu_fail_ptx_compilation_on_register_spilling"] = not may_spill
  with _mosaic_assembler_output() as output, _without_kept_programs():
    compiled = lowered.compile(compiler_options=options)
  kernels = _mosaic_kernels(lowered.as_text(), "".join(output))
  spilling = [kernel for kernel in kernels if kernel.spilled]
  if spilling and not may_spill:
    raise jax.errors.JaxRuntimeError(f"registers are spilled: {spilling}")
  return Program(compiled=compiled, mosaic_kernels=kernels)


def mesh_of(target: str, axis: str, num_devices: int) -> Mesh:
  """Returns a mesh of up to four devices of a target, for compilation only."""
  if target in _GPUS:
    topology = topologies.get_topology_desc(
      platform="cuda",
      target_config=_GPUS[target],
      topology=f"1x1x{num_devices}",
    )
  elif target in _TPUS:
    os.environ.update(_TPU_ENVIRONMENT)
    topology = topologies.get_topology_desc(_TPUS[target], platform="tpu")
  else:
    targets = (*_GPUS, *_TPUS)
    raise ValueError(f"target={target!r}; it must be one of {targets}")
  devices = np.array(topology.devices[:num_devices])
  return Mesh(devices, (axis,), axis_types=(AxisType.Auto,))


@contextlib.contextmanager
def _without_kept_programs() -> Iterator[None]:
  """Disables jax's persistent cache.

  It cannot load programs for devices that are absent, and the assembler reports
  a kernel only when it is compiled.
  """
  enabled = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()


@contextlib.contextmanager
def _mosaic_assembler_output() -> Iterator[list[str]]:
  """Captures the reports of Mosaic GPU's assembler."""
  # Mosaic prints them from C to the file descriptor 1, so replacing
  # `sys.stdout` would not capture them.
  output: list[str] = []
  c_library = ctypes.CDLL(None)
  sys.stdout.flush()
  stdout = os.dup(1)
  with (
    tempfile.TemporaryFile() as file,
    pytest.MonkeyPatch.context() as patch,
  ):
    patch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    os.dup2(file.fileno(), 1)
    try:
      yield output
    finally:
      c_library.fflush(None)
      os.dup2(stdout, 1)
      os.close(stdout)
      file.seek(0)
      output.append(file.read().decode(errors="replace"))


def _mosaic_kernels(lowered: str, output: str) -> tuple[Kernel, ...]:
  """Returns the reports of a program's kernels; a missing one is an error."""
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
  """Parses the output of `ptxas -v`."""
  kernels = []
  for block in output.split("Compiling entry function ")[1:]:
    name = re.match(r"'([^']*)'", block)
    registers = re.search(r"Used (\d+) registers", block)
    spilled = re.search(r"(\d+) bytes spill stores", block)
    if name is None or registers is None or spilled is None:
      raise ValueError(f"the assembler's report is not understood: {block}")
    kernels.append(
      Kernel(
        name=name[1],
        registers=int(registers[1]),
        spilled=int(spilled[1]),
      )
    )
  return tuple(kernels)
