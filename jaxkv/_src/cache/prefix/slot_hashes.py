"""What is needed to go on hashing the tokens of each slot."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import ops
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.prefix import rules
from jaxkv._src.cache.prefix.hashing import KEY_WORDS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotHashes:
  """The state of the hash of each slot's tokens; None without prefix caching.

  A is `CacheConfig.alignment`: every A tokens all groups end a page.

  Attributes:
    root: the key before the slot's first page.  # uint32[B, 4]
    chain: the key after the last A tokens that are complete; `root` before
      there are any.  # uint32[B, 4]
    tail: the tokens after them; of row b, `length[b] % A` count.
      # int32[B, A]
    prompt_length: tokens of the prompt that the slot was admitted with; None
      unless `CacheConfig.prefix_retention_interval` is set.  # int32[B]
    shared_prefix_boundary: tokens of it that some groups had cached when not
      all had; 0 for none. None as `prompt_length` is.  # int32[B]
  """

  root: Array
  chain: Array
  tail: Array
  prompt_length: Array | None = None
  shared_prefix_boundary: Array | None = None


def init(config: CacheConfig) -> SlotHashes | None:
  """The hashes of empty slots."""
  if not config.prefix_caching:
    return None
  slots = config.num_slots
  hashes = SlotHashes(
    root=jnp.zeros((slots, KEY_WORDS), jnp.uint32),
    chain=jnp.zeros((slots, KEY_WORDS), jnp.uint32),
    tail=jnp.zeros((slots, config.alignment), jnp.int32),
  )
  if not rules.keeps_some(config):
    return hashes
  return dataclasses.replace(
    hashes,
    prompt_length=jnp.zeros((slots,), jnp.int32),
    shared_prefix_boundary=jnp.zeros((slots,), jnp.int32),
  )


def start(
  hashes: SlotHashes | None,
  slots: Array,
  *,
  root: Array,
  chain: Array,
  prompt_length: Array,
  boundary: Array,
) -> SlotHashes | None:
  """Starts sequences in some slots.

  A sequence starts where all groups end a page, so `tail` stays as it is.

  Args:
    hashes: those of all slots.
    slots: int32[R], out of range for rows that start nothing.
    root: uint32[R, 4].
    chain: uint32[R, 4].
    prompt_length: int32[R].
    boundary: int32[R].
  """
  if hashes is None:
    return None
  new = {"root": root, "chain": chain}
  if hashes.prompt_length is not None:
    new |= {"prompt_length": prompt_length, "shared_prefix_boundary": boundary}
  return dataclasses.replace(
    hashes,
    **{
      name: ops.put(getattr(hashes, name), slots, values=values)
      for name, values in new.items()
    },
  )


def copy(
  hashes: SlotHashes | None, src: Array, dst: Array
) -> SlotHashes | None:
  """Copies the rows of slots `src` to slots `dst`, int32[R] both."""
  return jax.tree.map(
    lambda rows: ops.put(rows, dst, values=ops.take(rows, src)), hashes
  )
