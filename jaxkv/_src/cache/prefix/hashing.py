"""Page keys: 128-bit hashes under a secret, chained page by page.

The only primitive is the Chaskey permutation of four 32-bit words with 8 rounds
(Mouha et al., "Chaskey: An Efficient MAC Algorithm for 32-bit
Microcontrollers", SAC 2014). The tokens of a page are absorbed four words at a
time into a secret start value, for all pages in parallel. This gives a digest
for each page. The digests are then chained:

    digest_i = absorb(secret, tokens of page i)
    chain_i  = permute(chain_{i-1} ^ digest_i),  chain_{-1} = root(epoch, salt)
    key_i    = chain_i ^ mask of the group

Only the chain is sequential over pages, with one permutation per page. Anyone
can invert the permutation, so secrets mask its inputs and outputs. An attacker
who sees the keys and chooses the tokens, but does not know the secret, cannot
construct two prefixes with the same key. (By Chaskey's bound, the hashed tokens
of an attack, times its computed permutations, must reach 2**128.) A lookup also
compares the tokens of the page, see `prefix_index`.
"""

import dataclasses
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.config import CacheConfig

KEY_WORDS = 4
NUM_ROUNDS = 8
# Rows of the array that `make_secret` returns. Group g has the row
# SECRET_OF_GROUPS + g.
SECRET_OF_DIGESTS, SECRET_OF_ROOTS, SECRET_OF_GROUPS = range(3)

# Public functions of this file take and return keys as uint32[..., 4]. Private
# functions use tuples of four uint32[...]. With one array for the four words,
# XLA would repeat earlier rounds for each word.
Words = tuple[Array, Array, Array, Array]


def salt(text: str | bytes) -> Array:
  """Makes a salt, for `admit`, `match` and `pin`, from a name or other text.

  Sequences with different salts never share a page. Sequences with equal salts
  do, so a salt must change with everything that changes K/V, except tokens. If
  an adapter is loaded again under its old name, for example, its new contents
  would hit the pages of the old ones. So use a digest of the contents:

    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(adapter):
      digest.update(np.asarray(leaf).tobytes())
    salt = jaxkv.salt(f"{name} {digest.hexdigest()}")

  If all weights change, call `new_epoch` or `rollout.update_weights` instead.

  Args:
    text: any text or bytes.

  Returns:
    uint32[4].

  Raises:
    TypeError: `text` is neither a str nor bytes.

  Examples:
    >>> import jaxkv
    >>> jaxkv.salt("tenant-a").shape
    (4,)
  """
  if not isinstance(text, (str, bytes, bytearray)):
    raise TypeError(
      f"`text` must be a str or bytes, got {text!r} of type "
      f"{type(text).__name__}; write str(...) around it."
    )
  data = text.encode() if isinstance(text, str) else bytes(text)
  return jnp.asarray(_blake2(b"salt", data))


def make_secret(key: Array, num_groups: int) -> Array:
  """Derives the secrets of digests, of roots and of each group from one key.

  The key is uint32[4], and the secrets are uint32[2 + G, 4].
  """
  purposes = jnp.asarray(secret_purposes(num_groups))
  words = _xor(_unstack(key), _unstack(purposes))
  # Without this XOR, the inverse permutation of a secret would reveal the key.
  return _stack(_xor(_unstack(key), _permute(words)))


def secret_purposes(num_groups: int) -> np.ndarray:
  """Returns uint32[2 + G, 4]: a public label for each secret, all distinct."""
  labels = [purpose.to_bytes(4, "little") for purpose in range(2 + num_groups)]
  return np.stack([_blake2(b"secret", label) for label in labels])


def root_key(secret: Array, epoch: Array, salts: Array | None) -> Array:
  """Computes the root, the chained hash before the first page of a sequence.

  Takes `CacheState.epoch` and salts, uint32[R, 4]. Returns uint32[R, 4], or
  uint32[4] without salts.
  """
  zero = sharding.zeros_like(epoch)
  versions = (epoch, zero, zero, zero)
  root = _stack(_permute(_xor(_unstack(secret[SECRET_OF_ROOTS]), versions)))
  if salts is None:
    salts = jnp.zeros((KEY_WORDS,), jnp.uint32)
  # The epoch is permuted before the XOR with a salt, so no salt can cancel it.
  root = jnp.broadcast_to(root, salts.shape)
  return _stack(_permute(_xor(_unstack(root), _unstack(salts))))


def group_key(secret: Array, chain: Array, group: Array) -> Array:
  """Computes page keys from chained hashes, or chained hashes from page keys.

  Takes `chain`, uint32[..., 4], and the group of each page, int32[...]. Both
  directions are the same XOR with the secret of the group.
  """
  return chain ^ secret.at[SECRET_OF_GROUPS + group].get(mode="clip")


def page_digests(secret: Array, tokens: Array) -> Array:
  """Computes digests of pages of tokens: int32[..., S] to uint32[..., 4]."""
  batch = tokens.shape[:-1]
  # All pages have the same size, so padding cannot make two of them equal.
  padding = -tokens.shape[-1] % KEY_WORDS
  words = lax.bitcast_convert_type(tokens, jnp.uint32)
  words = jnp.pad(words, [(0, 0)] * len(batch) + [(0, padding)])
  blocks = jnp.moveaxis(words.reshape(*batch, -1, KEY_WORDS), (-2, -1), (0, 1))
  zero = sharding.zeros_like(blocks[0, 0])
  start = _xor(_unstack(secret[SECRET_OF_DIGESTS]), (zero, zero, zero, zero))

  def absorb(state: Words, block: Array) -> tuple[Words, None]:
    state = _xor(state, (block[0], block[1], block[2], block[3]))
    return _permute(state, at_once=4), None

  return _stack(lax.scan(absorb, start, blocks)[0])


def row_keys(secret: Array, previous: Array, pages: Array) -> Array:
  """Computes the chained hashes of consecutive pages of tokens, int32[R, P, S].

  `previous` has the hash before the first page, uint32[R, 4]. Returns the hash
  after each page, uint32[R, P, 4].
  """
  return chain_keys(previous, page_digests(secret, pages))


def keys_of_group(
  config: CacheConfig, secret: Array, chain: Array, group: int
) -> Array:
  """Computes the keys of a group's pages, which can have more than S tokens.

  `chain` has the chained hash after every S tokens, uint32[R, P, 4]. Returns
  the keys of the group's X whole pages, uint32[R, X, 4].
  """
  step = config.page_sizes[group] // config.page_size
  group_chain = _unstack(chain[:, step - 1 :: step])
  return _stack(_xor(group_chain, _unstack(secret[SECRET_OF_GROUPS + group])))


def key_bytes(words) -> bytes:
  """Converts a key, uint32[4], to 16 bytes, little-endian."""
  return np.asarray(words).astype("<u4").tobytes()


def chain_keys(previous: Array, digests: Array) -> Array:
  """Computes `row_keys` from the digests of the pages, uint32[R, P, 4]."""

  def link(key: Words, digest: Array) -> tuple[Words, Words]:
    key = _permute(_xor(key, _unstack(digest)))
    return key, key

  _, keys = lax.scan(link, _unstack(previous), jnp.moveaxis(digests, 1, 0))
  return jnp.moveaxis(_stack(keys), 0, 1)


def _permute(words: Words, at_once: int = 2) -> Words:
  """Applies the eight rounds of the permutation.

  On a CPU, the rounds run in a loop, with `at_once` rounds in an iteration.
  """
  # XLA:CPU computes one word at a time. Without a loop, it would recompute the
  # values that several words depend on. On an accelerator, a loop would cost a
  # dozen kernel launches instead of one.
  return lax.platform_dependent(
    words,
    cpu=functools.partial(_rounds, at_once=at_once),
    default=functools.partial(_rounds, at_once=NUM_ROUNDS),
  )


def _rounds(words: Words, *, at_once: int) -> Words:
  def trip(_, words: Words) -> Words:
    for _ in range(at_once):
      words = _round(words)
    return words

  trips = NUM_ROUNDS // at_once
  return lax.fori_loop(0, trips, trip, words, unroll=trips == 1)


def _xor(a: Words, b: Words) -> Words:
  return a[0] ^ b[0], a[1] ^ b[1], a[2] ^ b[2], a[3] ^ b[3]


def _round(words: Words) -> Words:
  v0, v1, v2, v3 = words
  v0 = v0 + v1
  v1 = _rotate(v1, 5) ^ v0
  v0 = _rotate(v0, 16)
  v2 = v2 + v3
  v3 = _rotate(v3, 8) ^ v2
  v0 = v0 + v3
  v3 = _rotate(v3, 13) ^ v0
  v2 = v2 + v1
  v1 = _rotate(v1, 7) ^ v2
  v2 = _rotate(v2, 16)
  return v0, v1, v2, v3


def _rotate(x: Array, bits: int) -> Array:
  return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


def _stack(words: Words) -> Array:
  return jnp.stack(words, axis=-1)


def _unstack(key: Array) -> Words:
  return key[..., 0], key[..., 1], key[..., 2], key[..., 3]


def _blake2(purpose: bytes, data: bytes) -> np.ndarray:
  digest = hashlib.blake2b(data, digest_size=16, person=b"jaxkv-" + purpose)
  return np.frombuffer(digest.digest(), dtype="<u4").astype(np.uint32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotHashes:
  """The running hash of each slot's tokens.

  A is `CacheConfig.alignment`, so all groups end a page after every A tokens.

  Attributes:
    root: the chained hash before the slot's first page.  # uint32[B, 4]
    chain: the chained hash after the last multiple of A tokens; `root` if the
      slot has fewer than A tokens.  # uint32[B, 4]
    tail: the tokens after the last multiple of A. The first `length[b] % A`
      entries of slot b are valid.  # int32[B, A]
    prompt_length: tokens of the prompt that `admit` put into the slot; None
      unless `CacheConfig.prefix_retention_interval` is set.  # int32[B]
    shared_prefix_boundary: tokens of the prompt's longest prefix that only some
      groups had cached; 0 for none. None without `prompt_length`.  # int32[B]
    shared_tokens: tokens of two heads that other prompts share, see `admit`; 0
      for none. None without a `StateRetention`.  # int32[B, 2]
  """

  root: Array
  chain: Array
  tail: Array
  prompt_length: Array | None = None
  shared_prefix_boundary: Array | None = None
  shared_tokens: Array | None = None


def init_slots(config: CacheConfig) -> SlotHashes | None:
  """Returns the hashes of empty slots; None without prefix caching."""
  if not config.prefix_caching:
    return None
  slots = config.num_slots
  hashes = SlotHashes(
    root=jnp.zeros((slots, KEY_WORDS), jnp.uint32),
    chain=jnp.zeros((slots, KEY_WORDS), jnp.uint32),
    tail=jnp.zeros((slots, config.alignment), jnp.int32),
  )
  if not config.publishes_by_prompt:
    return hashes
  return dataclasses.replace(
    hashes,
    prompt_length=jnp.zeros((slots,), jnp.int32),
    shared_prefix_boundary=jnp.zeros((slots,), jnp.int32),
    shared_tokens=(
      jnp.zeros((slots, 2), jnp.int32) if config.state_retention else None
    ),
  )


def start_slots(
  hashes: SlotHashes | None,
  rows: indexing.SlotRows,
  starts: Array,
  root: Array,
  *,
  chain: Array | None = None,
  prompt_length: Array | None = None,
  boundary: Array | None = None,
  shared_tokens: Array | None = None,
) -> SlotHashes | None:
  """Starts the hashes of new sequences.

  Args:
    hashes: the hashes of all slots.
    rows: the slots.
    starts: bool[R], the rows that start a sequence.
    root: uint32[R, 4] or uint32[4], the roots, see `root_key`.
    chain: uint32[R, 4], the chained hashes after the cached prefixes; None if
      no sequence has a cached prefix.
    prompt_length: int32[R]; None for zeros.
    boundary: int32[R], see `SlotHashes.shared_prefix_boundary`; None for zeros.
    shared_tokens: int32[R, 2], see `SlotHashes`; None for zeros.
  """
  if hashes is None:
    return None
  # The number of cached tokens is a multiple of A, so no token of `tail` is
  # valid, and `tail` is not written.
  updates = {"root": root, "chain": root if chain is None else chain}
  if hashes.prompt_length is not None:
    zero = jnp.int32(0)
    updates["prompt_length"] = zero if prompt_length is None else prompt_length
    updates["shared_prefix_boundary"] = zero if boundary is None else boundary
  if hashes.shared_tokens is not None:
    updates["shared_tokens"] = (
      jnp.int32(0) if shared_tokens is None else shared_tokens
    )
  return dataclasses.replace(
    hashes,
    **{
      name: rows.write(getattr(hashes, name), starts, values)
      for name, values in updates.items()
    },
  )


def copy_slots(
  hashes: SlotHashes | None, src: Array, dst: Array
) -> SlotHashes | None:
  """Copies the hashes of slots `src`, int32[R], to slots `dst`, int32[R]."""
  return jax.tree.map(
    lambda rows: indexing.put(rows, dst, values=indexing.take(rows, src)),
    hashes,
  )
