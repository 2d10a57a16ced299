"""Page keys: 128-bit, secret, chained page by page.

The one primitive is the Chaskey permutation of four 32-bit words with 8 rounds
(Mouha et al., "Chaskey: An Efficient MAC Algorithm for 32-bit
Microcontrollers", SAC 2014). A page's tokens are absorbed four words at a time
into a secret start value, all pages in parallel; the digests are then chained:

    digest_i = absorb(secret, tokens of page i)
    chain_i  = permute(chain_{i-1} ^ digest_i),  chain_{-1} = root(epoch, salt)
    key_i    = chain_i ^ mask of the group

Only the chain is sequential, one permutation a page. The permutation can be
inverted, so everything that enters it or leaves it is masked by a secret: who
sees the keys and chooses the tokens, but does not know the secret, cannot make
two prefixes with one key. (Chaskey's bound: tokens seen times permutations
computed must reach 2**128.) A hit compares the page's own tokens besides, see
`prefix_index`.

A key is `uint32[..., 4]` outside and a tuple of four `uint32[...]` inside:
XLA compiles the tuple form to straight code; stacking between rounds makes it
recompute earlier rounds for every word. XLA:CPU computes one result at a time
and recomputes them in straight code too, so there the rounds are a loop.
Elsewhere a loop would be a dozen launches instead of one.
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
_ROUNDS = 8
# Rows of `make_secret`; from the last one on, a row for each group.
_DIGEST, _ROOT, _GROUPS = range(3)

Words = tuple[Array, Array, Array, Array]


def salt(text: str | bytes) -> Array:
  """Makes a salt for `admit`, `match` and `pin`, e.g. from a tenant's name.

  Sequences with different salts never share a page.

  Args:
    text: any text or bytes.

  Returns:
    uint32[4].

  Raises:
    TypeError: `text` is neither.

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
  return jnp.asarray(_words(b"salt", data))


def make_secret(key: Array, num_groups: int) -> Array:
  """The secrets of the digests, of the roots and of each group, from one key.

  Args:
    key: uint32[4].
    num_groups: G.

  Returns:
    uint32[2 + G, 4].
  """
  numbers = [number.to_bytes(4, "little") for number in range(2 + num_groups)]
  purposes = np.stack([_words(b"secret", number) for number in numbers])
  words = _mixed(_unstack(key), _unstack(jnp.asarray(purposes)))
  return _stack(_mixed(_unstack(key), _permute(words)))


def root_key(secret: Array, epoch: Array, salts: Array | None) -> Array:
  """The key before the first page.

  Args:
    secret: see `make_secret`.
    epoch: uint32[].
    salts: uint32[R, 4], or None for sequences without a salt.

  Returns:
    uint32[R, 4], or uint32[4] without salts.
  """
  zero = sharding.zeros_like(epoch)
  versions = (epoch, zero, zero, zero)
  root = _stack(_permute(_mixed(_unstack(secret[_ROOT]), versions)))
  if salts is None:
    salts = jnp.zeros((KEY_WORDS,), jnp.uint32)
  root = jnp.broadcast_to(root, salts.shape)
  return _stack(_permute(_mixed(_unstack(root), _unstack(salts))))


def group_key(secret: Array, chain: Array, group: Array) -> Array:
  """The key of a page in one group, from the chain's key; its own inverse.

  Args:
    secret: see `make_secret`.
    chain: uint32[..., 4].
    group: int32[...], group numbers.

  Returns:
    uint32[..., 4].
  """
  return chain ^ secret.at[_GROUPS + group].get(mode="clip")


def page_digests(secret: Array, tokens: Array) -> Array:
  """Digests of the tokens of single pages.

  Args:
    secret: see `make_secret`.
    tokens: int32[..., S], any numbers.

  Returns:
    uint32[..., 4].
  """
  batch, size = tokens.shape[:-1], tokens.shape[-1]
  padding = -size % KEY_WORDS
  words = lax.bitcast_convert_type(tokens, jnp.uint32)
  words = jnp.pad(words, [(0, 0)] * len(batch) + [(0, padding)])
  blocks = jnp.moveaxis(words.reshape(*batch, -1, KEY_WORDS), (-2, -1), (0, 1))
  zero = sharding.zeros_like(blocks[0, 0])
  start = _mixed(_unstack(secret[_DIGEST]), (zero, zero, zero, zero))

  def absorb(state: Words, block: Array) -> tuple[Words, None]:
    state = _mixed(state, (block[0], block[1], block[2], block[3]))
    return _permute(state, at_once=4), None

  return _stack(lax.scan(absorb, start, blocks)[0])


def row_keys(secret: Array, previous: Array, pages: Array) -> Array:
  """Keys of rows of pages of tokens.

  Args:
    secret: see `make_secret`.
    previous: uint32[R, 4], the keys before the first page.
    pages: int32[R, P, S].

  Returns:
    uint32[R, P, 4], the key after each page.
  """
  return chain_keys(previous, page_digests(secret, pages))


def keys_of_group(
  config: CacheConfig, secret: Array, chain: Array, group: int
) -> Array:
  """Keys of the pages of a group, which may be larger than `page_size`.

  Args:
    config: the cache's groups.
    secret: see `make_secret`.
    chain: uint32[R, P, 4], the key after every `page_size` tokens.
    group: its number.

  Returns:
    uint32[R, X, 4], of its X whole pages.
  """
  step = config.page_sizes[group] // config.page_size
  own = _unstack(chain[:, step - 1 :: step])
  return _stack(_mixed(own, _unstack(secret[_GROUPS + group])))


def key_bytes(words) -> bytes:
  """A key uint32[4] as 16 bytes, the lowest first."""
  return np.asarray(words).astype("<u4").tobytes()


def chain_keys(previous: Array, digests: Array) -> Array:
  """Keys of consecutive pages.

  Args:
    previous: uint32[R, 4], the keys before the first page.
    digests: uint32[R, P, 4].

  Returns:
    uint32[R, P, 4], the key after each page.
  """

  def link(key: Words, digest: Array) -> tuple[Words, Words]:
    key = _permute(_mixed(key, _unstack(digest)))
    return key, key

  _, keys = lax.scan(link, _unstack(previous), jnp.moveaxis(digests, 1, 0))
  return jnp.moveaxis(_stack(keys), 0, 1)


def _permute(words: Words, at_once: int = 2) -> Words:
  """Eight rounds; on a CPU so many at once in a loop."""
  return lax.platform_dependent(
    words,
    cpu=functools.partial(_rounds, at_once=at_once),
    default=functools.partial(_rounds, at_once=_ROUNDS),
  )


def _rounds(words: Words, *, at_once: int) -> Words:
  def some(_, words: Words) -> Words:
    for _ in range(at_once):
      words = _round(words)
    return words

  trips = _ROUNDS // at_once
  return lax.fori_loop(0, trips, some, words, unroll=trips == 1)


def _mixed(a: Words, b: Words) -> Words:
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


def _words(purpose: bytes, data: bytes) -> np.ndarray:
  digest = hashlib.blake2b(data, digest_size=16, person=b"jaxkv-" + purpose)
  return np.frombuffer(digest.digest(), dtype="<u4").astype(np.uint32)


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


def init_slots(config: CacheConfig) -> SlotHashes | None:
  """The hashes of empty slots."""
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
) -> SlotHashes | None:
  """Starts sequences in some slots.

  A sequence starts where all groups end a page, so `tail` stays as it is.

  Args:
    hashes: those of all slots.
    rows: the slots.
    starts: bool[R], the rows that start a sequence.
    root: uint32[R, 4] or uint32[4].
    chain: uint32[R, 4]; None for the root.
    prompt_length: int32[R]; None for zeros.
    boundary: int32[R]; None for zeros.
  """
  if hashes is None:
    return None
  new = {"root": root, "chain": root if chain is None else chain}
  if hashes.prompt_length is not None:
    zero = jnp.int32(0)
    new["prompt_length"] = zero if prompt_length is None else prompt_length
    new["shared_prefix_boundary"] = zero if boundary is None else boundary
  return dataclasses.replace(
    hashes,
    **{
      name: rows.write(getattr(hashes, name), starts, values)
      for name, values in new.items()
    },
  )


def copy_slots(
  hashes: SlotHashes | None, src: Array, dst: Array
) -> SlotHashes | None:
  """Copies the rows of slots `src` to slots `dst`, int32[R] both."""
  return jax.tree.map(
    lambda rows: indexing.put(rows, dst, values=indexing.take(rows, src)),
    hashes,
  )
