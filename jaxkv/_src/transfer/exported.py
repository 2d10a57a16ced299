"""The value in which sequences move from one rollout to another."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.cache.state import Outcome
from jaxkv._src.engine.queue.queue import Queue


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported(Outcome):
  """The result of `export`; a row is OK if its sequence was removed.

  The R sequences belong to no rollout. They can be pickled, for example to send
  them to another process. Protect them like a `RolloutState`: they contain
  tokens, and a rollout that imports them does not verify the K/V. In the shape
  of `page`, G is the number of layer groups, and A is W / page_size, rounded
  up.

  Attributes:
    code: a `Status` for each sequence.  # int32[R]
    queue: the sequences, without page keys and n-gram tables; zeros for rows
      that are not OK. Sequences that were RUNNING are WAITING.
    sample: the index of each among the samples of its prompt.  # int32[R]
    runs: True for sequences that held pages in a slot; False without
      `contents`.  # bool[R]
    num_computed: the number of tokens whose pages are exported.  # int32[R]
    version: the version of the exporting rollout's weights.  # uint32[]
    fingerprint: a value that is equal for caches with the same secret and
      version; zeros without prefix caching.  # uint32[4]
    page: for each page of a sequence, its index among the exported pages of its
      pool; -1 for none.  # int32[R, G, A]
    contents: the contents of the X exported pages of each pool, an array for
      each array of the memory; None without pages.  # storage dtype[X, ...]
    page_size: tokens of a page.
    layout: names and values of settings that the importing rollout must share,
      those of pages only if it imports pages.
  """

  queue: Queue
  sample: Array
  runs: Array
  num_computed: Array
  version: Array
  fingerprint: Array
  page: Array
  contents: tuple[Array, ...] | None
  page_size: int = dataclasses.field(metadata={"static": True})
  layout: tuple[tuple[str, str], ...] = dataclasses.field(
    metadata={"static": True}
  )

  def __getstate__(self) -> dict[str, Any]:
    # Random keys cannot be pickled, only their data.
    data = np.asarray(jax.random.key_data(self.queue.keys))
    impl = str(jax.random.key_impl(self.queue.keys))
    queue = dataclasses.replace(self.queue, keys=(data, impl))
    return vars(self) | {"queue": queue}

  def __setstate__(self, state: dict[str, Any]) -> None:
    queue = state["queue"]
    data, impl = queue.keys
    keys = jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
    vars(self).update(state, queue=dataclasses.replace(queue, keys=keys))
