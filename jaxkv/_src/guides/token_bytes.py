"""The bytes of tokens on the device, and automata that read these bytes."""

import dataclasses
import itertools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding

UNROLL = 4
"""The number of bytes that one iteration of `fold_bytes` reads per token."""

Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenBytes:
  """The bytes of V tokens, concatenated without padding.

  Attributes:
    data: the X bytes of all tokens.  # uint8[X]
    starts: the offset in `data` where each token starts, and at the end the
      offset where the last token ends.  # int32[V + 1]
  """

  data: Array
  starts: Array

  @property
  def vocab_size(self) -> int:
    """V, the number of tokens."""
    return self.starts.shape[0] - 1

  def texts(self) -> list[bytes]:
    """Returns the bytes of each token, on the host."""
    data = np.asarray(self.data).tobytes()
    starts = np.asarray(self.starts).tolist()
    return [data[i:j] for i, j in itertools.pairwise(starts)]

  def copy(self) -> "TokenBytes":
    """Returns a copy in new buffers, for a pytree that will be donated."""
    return jax.tree.map(jnp.copy, self)


def token_bytes(
  tokens: Sequence[bytes], *, vocab_size: int | None = None
) -> TokenBytes:
  """Packs the bytes of tokens into arrays.

  Args:
    tokens: the bytes of each token, in the order of token ids. Special tokens
      have empty bytes, because they represent no text.
    vocab_size: V, the number of columns of the model's logits; None for the
      number of entries of `tokens`. Tokens beyond the entries have no bytes.

  Returns:
    `data`, uint8[X], the X bytes of all tokens, and `starts`, int32[V + 1], the
    offset of each token in `data`. The method `copy` makes a copy for a pytree
    that will be donated.

  Raises:
    TypeError: a token is not `bytes`.
    ValueError: `tokens` is empty, has more than V entries, or has more than
      2**31 - 1 bytes.

  Examples:
    >>> tokens = token_bytes([b"a", b"", b"bc"], vocab_size=4)
    >>> tokens.data.tolist(), tokens.starts.tolist()
    ([97, 98, 99], [0, 1, 1, 3, 3])
  """
  pieces = list(tokens)
  for token, piece in enumerate(pieces):
    if not isinstance(piece, bytes):
      raise TypeError(
        f"`tokens[{token}]` must be bytes, got {piece!r} of type "
        f"{type(piece).__name__}; `jaxkv.models.Tokenizer.token_bytes` gives "
        "the bytes of a tokenizer's tokens."
      )
  size = len(pieces) if vocab_size is None else vocab_size
  if not 0 < len(pieces) <= size:
    limit = "" if vocab_size is None else f" and at most `vocab_size`, {size}"
    raise ValueError(
      f"`tokens` must have at least one entry{limit}, got {len(pieces)}."
    )
  # Lengths are int64, so that their sum does not overflow before the check.
  lengths = np.zeros(size + 1, np.int64)
  lengths[1 : len(pieces) + 1] = [len(piece) for piece in pieces]
  starts = np.cumsum(lengths)
  if starts[-1] >= 2**31:
    raise ValueError(
      f"`tokens` must have less than 2**31 bytes, got {starts[-1]}."
    )
  # A gather cannot read an empty array, so `joined` has at least one byte.
  joined = b"".join(pieces) or b"\0"
  return TokenBytes(
    data=jnp.asarray(np.frombuffer(joined, np.uint8)),
    starts=jnp.asarray(starts, jnp.int32),
  )


def fold_bytes(
  tokens: TokenBytes,
  numbers: Array,
  body: Callable[[Carry, Array, Array], Carry],
  carry: Carry,
) -> Carry:
  """Folds `body` over the bytes of each row's token; returns the last carry.

  `numbers`, int32[R], is the token of each row; a token out of range has no
  bytes. `body` maps the carry, any pytree of arrays, the next byte of each row,
  int32[R], and the rows that have one, bool[R], to the next carry.
  """
  start = indexing.take(tokens.starts, numbers)
  has_bytes = (numbers >= 0) & (numbers < tokens.vocab_size)
  length = jnp.where(
    has_bytes, indexing.take(tokens.starts, numbers + 1) - start, 0
  )

  # A while_loop ends after the longest token of these rows. A scan would always
  # run for the longest token of the vocabulary.
  def trip(loop: tuple[Array, Any]) -> tuple[Array, Any]:
    step, carry = loop
    for _ in range(UNROLL):
      byte = indexing.take(tokens.data, start + step).astype(jnp.int32)
      carry = body(carry, byte, step < length)
      step = step + 1
    return step, carry

  return lax.while_loop(
    lambda loop: jnp.any(loop[0] < length),
    trip,
    (sharding.zeros_like(length), carry),
  )[1]


def advance_states(
  next: Array, tokens: TokenBytes, states: Array, numbers: Array
) -> Array:
  """Advances the automaton of each row by the bytes of one token.

  `next`, int32[S, 256], has the state after a state and a byte. Row i is in
  `states[i]` and reads the token `numbers[i]`. A state out of range does not
  change, and a token out of range has no bytes. Returns int32[R].
  """
  next, tokens, states, numbers = sharding.match_varying_axes(
    (next, tokens, states, numbers)
  )

  def body(states: Array, byte: Array, reads: Array) -> Array:
    return read_byte(next, states, byte, reads)

  return fold_bytes(tokens, numbers, body, states)


def read_byte(next: Array, states: Array, byte: Array, reads: Array) -> Array:
  """Advances states by a byte in the rows where `reads` is True."""
  inside = (states >= 0) & (states < next.shape[0])
  return jnp.where(reads & inside, indexing.take(next, states, byte), states)
