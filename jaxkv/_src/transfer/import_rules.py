"""Rules of imports: the rollouts that can import exported sequences."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import arguments
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.kv.page_contents import arrays_of
from jaxkv._src.transfer.exported import Exported

# Options of `RolloutConfig` that must be equal in both rollouts.
_OPTIONS = (
  "num_samples",
  "stop_token",
  "raw_log_probs",
  "unfiltered_log_probs",
  "entropy",
  "top_log_probs",
  "record_experts",
)

# Settings that must be equal if pages are imported.
_OF_PAGES = ("CacheConfig.groups", "pages")


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
    f"{array.values.dtype}{(array.num_layers, *array.values.shape[1:])}"
    for array in arrays_of(state.memory.kv)
  ]
  strings = queue.sampling.stop_strings
  tables = None if strings is None else (strings.next, strings.ends)
  return (
    ("CacheConfig.groups", str(state.memory.cache.config.groups)),
    ("pages", ", ".join(pages)),
    *((f"RolloutConfig.{x}", str(getattr(state.config, x))) for x in _OPTIONS),
    ("RolloutConfig.max_length", str(queue.width)),
    ("RolloutConfig.max_new_tokens > 0", str(state.config.max_new_tokens > 0)),
    ("key", str(queue.keys.dtype)),
    ("Requests.priority", types(queue.priority)),
    ("Requests.log_probs_from", types(queue.log_probs_from)),
    ("Requests.salts", types(queue.salts)),
    ("Requests.extra", types(queue.extra)),
    ("Sampling.stop_strings", types(tables, axes=0)),
    ("experts", types(queue.experts)),
  )


def check_exported(exported: Any, state: RolloutState) -> None:
  """Raises unless `state` can continue the sequences of `exported`."""
  hint = "unpack what `export` returned: `state, exported = ...`"
  arguments.check_type("exported", exported, Exported, "an Exported", hint)
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
