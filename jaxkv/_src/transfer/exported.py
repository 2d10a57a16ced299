"""The format in which sequences move from one rollout to another."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Outcome
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.queue import Queue
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.kv.page_contents import arrays_of

# Options that must be equal in both rollouts.
_OPTIONS = (
  "num_samples",
  "stop_token",
  "raw_log_probs",
  "unfiltered_log_probs",
  "entropy",
  "top_log_probs",
  "prompt_log_probs",
  "numerics",
  "record_experts",
)

Layout = tuple[tuple[str, str], ...]


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
    queue: the sequences, without page keys and n-gram tables. Sequences that
      were RUNNING are WAITING.
    sample: the index of each among the samples of its prompt.  # int32[R]
    runs: True for sequences that held pages in a slot; False without
      `contents`.  # bool[R]
    num_computed: the number of tokens whose pages are exported.  # int32[R]
    version: the version of the exporting rollout's weights.  # uint32[]
    fingerprint: a value that is equal for caches with the same secret and
      version; None without prefix caching.  # uint32[4]
    page: the index in `contents` of each page of a sequence; X for none.
      # int32[R, G, A]
    contents: the contents of X pages, an array for each array of the memory;
      None without pages.  # storage dtype[X, ...]
    page_size: tokens of a page.
    layout: names and values of settings that the importing rollout must share.
    memory_layout: those of settings that it must also share to import pages.
  """

  queue: Queue
  sample: Array
  runs: Array
  num_computed: Array
  version: Array
  fingerprint: Array | None
  page: Array
  contents: tuple[Array, ...] | None
  page_size: int = dataclasses.field(metadata={"static": True})
  layout: Layout = dataclasses.field(metadata={"static": True})
  memory_layout: Layout = dataclasses.field(metadata={"static": True})

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


def fingerprint_of(cache: CacheState) -> Array | None:
  """Returns `Exported.fingerprint` for a cache."""
  if cache.secret is None or cache.root is None:
    return None
  # Masked, because the unmasked root would disclose a part of the secret.
  return hashing.group_key(cache.secret, cache.root, jnp.int32(0))


def layout_of(queue: Queue, config: RolloutConfig) -> Layout:
  """Returns `Exported.layout`: the settings on which sequences depend."""

  def shapes(tree: Any, axes: int = 1) -> str:
    types = jax.tree.map(lambda leaf: f"{leaf.dtype}{leaf.shape[axes:]}", tree)
    return str(types)

  options = [
    (f"RolloutConfig.{name}", str(getattr(config, name))) for name in _OPTIONS
  ]
  strings = queue.sampling.stop_strings
  tables = None if strings is None else (strings.next, strings.ends)
  return (
    *options,
    ("RolloutConfig.max_length", str(queue.width)),
    ("key", str(queue.keys.dtype)),
    ("Requests.priority", shapes(queue.priority)),
    ("Requests.salts", shapes(queue.salts)),
    ("Requests.extra", shapes(queue.extra)),
    ("Sampling.stop_strings", shapes(tables, axes=0)),
    ("experts", shapes(queue.experts)),
  )


def memory_layout_of(state: RolloutState) -> Layout:
  """Returns `Exported.memory_layout`: the settings on which pages depend."""
  types = [
    f"{array.dtype}{(num_layers, *array.shape[1:])}"
    for array, num_layers in arrays_of(state.memory.kv)
  ]
  groups = state.memory.cache.config.groups
  return ("CacheConfig.groups", str(groups)), ("pages", ", ".join(types))


def check_exported(exported: Any, state: RolloutState) -> Exported:
  """Returns `exported`; raises unless `state` can continue its sequences.

  Raises:
    TypeError: `exported` is not an `Exported`.
    ValueError: a setting of `state` differs from `layout`, or from
      `memory_layout` if the pages can be imported.
  """
  if not isinstance(exported, Exported):
    hint = "unpack what `export` returned: `state, exported = ...`"
    raise TypeError(
      f"`exported` must be an Exported, got {type(exported).__name__}; {hint}."
    )
  settings, values = layout_of(state.queue, state.config), exported.layout
  if has_usable_pages(exported, state):
    settings += memory_layout_of(state)
    values += exported.memory_layout
  settings, values = dict(settings), dict(values)
  for name in settings | values:
    setting, value = settings.get(name), values.get(name)
    if value != setting:
      raise ValueError(
        f"`exported` must come from a rollout with the same {name}, {setting}, "
        f"got {value}; use equal settings and versions of jaxkv, or export "
        "with max_pages=0 if only the pages differ."
      )
  return exported


def num_columns(state: RolloutState) -> int:
  """Returns A, the maximum number of pages of a sequence in one group."""
  return -(-state.queue.width // state.memory.cache.config.page_sizes[0])


def has_usable_pages(exported: Exported, state: RolloutState) -> bool:
  """Returns True if pages were exported, with the page size of `state`."""
  size = state.memory.cache.config.page_sizes[0]
  return exported.contents is not None and exported.page_size == size
