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
from jaxkv._src.engine.queue import Queue
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.kv.page_contents import arrays_of

# Options of `RolloutConfig` that must be equal in both rollouts.
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

# Settings that must be equal if pages are imported.
_OF_PAGES = ("CacheConfig.groups", "pages")


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
    page: the index in `contents` of each page of a sequence; X for none.
      # int32[R, G, A]
    contents: the contents of X pages, an array for each array of the memory;
      None without pages.  # storage dtype[X, ...]
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


def fingerprint_of(cache: CacheState) -> Array:
  """Returns `Exported.fingerprint` for a cache."""
  if cache.secret is None or cache.root is None:
    return jnp.zeros((hashing.KEY_WORDS,), jnp.uint32)
  # Masked, because the unmasked root would disclose a part of the secret.
  return hashing.group_key(cache.secret, cache.root, jnp.int32(0))


def layout_of(state: RolloutState) -> tuple[tuple[str, str], ...]:
  """Returns `Exported.layout`: the settings on which sequences depend."""

  def types(tree: Any, axes: int = 1) -> str:
    return str(
      jax.tree.map(lambda leaf: f"{leaf.dtype}{leaf.shape[axes:]}", tree)
    )

  queue = state.queue
  pages = [
    f"{array.dtype}{(num_layers, *array.shape[1:])}"
    for array, num_layers in arrays_of(state.memory.kv)
  ]
  strings = queue.sampling.stop_strings
  tables = None if strings is None else (strings.next, strings.ends)
  return (
    ("CacheConfig.groups", str(state.memory.cache.config.groups)),
    ("pages", ", ".join(pages)),
    *((f"RolloutConfig.{x}", str(getattr(state.config, x))) for x in _OPTIONS),
    ("RolloutConfig.max_length", str(queue.width)),
    ("key", str(queue.keys.dtype)),
    ("Requests.priority", types(queue.priority)),
    ("Requests.salts", types(queue.salts)),
    ("Requests.extra", types(queue.extra)),
    ("Sampling.stop_strings", types(tables, axes=0)),
    ("experts", types(queue.experts)),
  )


def check_exported(exported: Any, state: RolloutState) -> None:
  """Raises unless `state` can continue the sequences of `exported`.

  Raises:
    TypeError: `exported` is not an `Exported`.
    ValueError: a setting of `state` differs from `layout`, or `exported` is a
      stack.
  """
  if not isinstance(exported, Exported):
    hint = "unpack what `export` returned: `state, exported = ...`"
    raise TypeError(
      f"`exported` must be an Exported, got {type(exported).__name__}; {hint}."
    )
  if len(exported.code.shape) != 1:
    raise ValueError(
      "`exported` must come from a single rollout, got a stack of shape "
      f"{[*exported.code.shape]}; use jax.vmap or jaxkv.sharding.each_shard."
    )
  settings = dict(layout_of(state))
  values = dict(exported.layout)
  has_pages = has_usable_pages(exported, state)
  for name in settings | values:
    setting = settings.get(name)
    value = values.get(name)
    is_of_pages = name in _OF_PAGES
    if value != setting and (has_pages or not is_of_pages):
      hint = ", or export with max_pages=0" if is_of_pages else ""
      raise ValueError(
        f"`exported` must come from a rollout with the same {name}, {setting}, "
        f"got {value}; use equal settings and versions of jaxkv{hint}."
      )


def has_usable_pages(exported: Exported, state: RolloutState) -> bool:
  """Returns True if pages were exported, with the page size of `state`."""
  page_size = state.memory.cache.config.page_sizes[0]
  return exported.contents is not None and exported.page_size == page_size
