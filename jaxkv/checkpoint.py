"""Snapshots of rollouts: on disk, and back on other devices.

  jaxkv.checkpoint.save(folder, state)
  state = jaxkv.checkpoint.restore(folder, target)

`target` is a rollout of the same sizes, or its shapes, and says on which
devices the arrays go. A snapshot with `pages=False` is small, and tokens are
computed again. Both need orbax: `pip install "jaxkv[checkpoints]"`.

A rollout is an ordinary pytree, so other libraries can save it too. These
functions also check that options, sizes and number formats are those of the
saved rollout, and convert K/V memory between a CPU, which stores bfloat16 as
integers, and accelerators. Snapshots are trusted, see SECURITY.md.
"""

from jaxkv._src.engine.snapshot import restore
from jaxkv._src.engine.snapshot import save

__all__ = ["restore", "save"]
