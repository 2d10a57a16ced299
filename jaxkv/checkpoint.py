"""Snapshots of rollouts: on disk, and back on other devices.

  jaxkv.checkpoint.save(folder, state)
  state = jaxkv.checkpoint.restore(folder, target)

`target` is a rollout of the same sizes, or its shapes, and its shardings select
the devices. `save(..., pages=False)` writes a small snapshot without K/V pages;
after `restore`, the tokens are computed again. Both functions need orbax:
`pip install "jaxkv[checkpoints]"`.

A rollout is a pytree, so other libraries can save it too. These functions also
check that options, sizes and number formats equal those of the saved rollout.
They convert K/V memory between accelerators and a CPU, which stores bfloat16 as
integers. Restore only snapshots that you trust, see SECURITY.md.
"""

from jaxkv._src.transfer.snapshot import restore
from jaxkv._src.transfer.snapshot import save

__all__ = ["restore", "save"]
