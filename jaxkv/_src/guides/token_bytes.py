"""The bytes of every token, and automata that read them."""

import dataclasses
import itertools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
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
"""Bytes that are read in one trip of the loop."""

Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenBytes:
  """The bytes of V tokens, one token after the other.

  Tokens of any length take no more memory than their bytes.

  Attributes:
    data: the bytes of all tokens.  # uint8[X]
    starts: where each token begins; the last entry is X.  # int32[V + 1]
  """

  data: Array
  starts: Array

  @property
  def vocab_size(self) -> int:
    """V, the number of tokens."""
    return self.starts.shape[0] - 1

  def texts(self) -> list[bytes]:
    """The bytes of each token, on the host."""
    data = np.asarray(self.data).tobytes()
    starts = np.asarray(self.starts).tolist()
    return [data[i:j] for i, j in itertools.pairwise(starts)]

  def copy(self) -> "TokenBytes":
    """The same bytes in memory of their own, for a state that is donated."""
    return jax.tree.map(jnp.copy, self)


def token_bytes(
  tokens: Sequence[bytes], *, vocab_size: int | None = None
) -> TokenBytes:
  """The bytes of tokens, as arrays.

  Args:
    tokens: the bytes of each token, by its number. Special tokens have none:
      they stand for no text.
    vocab_size: V, if a model's logits have more columns than there are tokens.
      The tokens after the last one have no bytes.

  Raises:
    TypeError: a token is not `bytes`.
    ValueError: there are no tokens, or more than V, or 2**31 bytes.

  Examples:
    >>> tokens = token_bytes([b"a", b"", b"bc"], vocab_size=4)
    >>> tokens.data.tolist(), tokens.starts.tolist()
    ([97, 98, 99], [0, 1, 1, 3, 3])
  """
  pieces = list(tokens)
  for number, piece in enumerate(pieces):
    if not isinstance(piece, bytes):
      raise TypeError(
        f"`tokens[{number}]` must be bytes, got {piece!r} of type "
        f"{type(piece).__name__}; `vocabulary_bytes` makes bytes of the "
        "strings in a byte-level vocabulary."
      )
  size = len(pieces) if vocab_size is None else vocab_size
  if not 0 < len(pieces) <= size:
    raise ValueError(
      f"`tokens` must be 1 .. {size} tokens, got {len(pieces)}; raise "
      "`vocab_size` for more."
    )
  lengths = np.zeros(size + 1, np.int64)
  lengths[1 : len(pieces) + 1] = [len(piece) for piece in pieces]
  starts = np.cumsum(lengths)
  if starts[-1] >= 2**31:
    raise ValueError(
      f"`tokens` must have less than 2**31 bytes, got {starts[-1]}."
    )
  # A gather needs something to read from, even where no token has a byte.
  joined = b"".join(pieces) or b"\0"
  return TokenBytes(
    data=jnp.asarray(np.frombuffer(joined, np.uint8)),
    starts=jnp.asarray(starts, jnp.int32),
  )


def vocabulary_bytes(
  vocabulary: Mapping[str, int] | Sequence[str],
  *,
  special: Iterable[str | int] = (),
  added: Mapping[str, int] | None = None,
) -> list[bytes]:
  r"""The bytes of a byte-level vocabulary, as Hugging Face stores it.

  Such vocabularies write each byte as a printable character; a space is "Ġ".
  They are the `model.vocab` of a `tokenizer.json`, or a `vocab.json`.

  Args:
    vocabulary: the number of each token, or all tokens in order.
    special: tokens without bytes, by string or by number: those that end a
      text, separate messages, and so on.
    added: the number of each token that is stored as plain text, such as those
      under `added_tokens`. None for none.

  Returns:
    The bytes of each token, by number, for `token_bytes`. A number that no
    token has gets no bytes.

  Raises:
    ValueError: a token has a character that stands for no byte, a number is
      negative or two tokens have it, or a special token does not exist.

  Examples:
    >>> vocabulary_bytes(["a", "Ġthe", "Ã©", "<end>"], special=["<end>"])
    [b'a', b' the', b'\xc3\xa9', b'']
  """
  numbers = vocabulary
  if not isinstance(numbers, Mapping):
    numbers = {i: token for i, token in enumerate(numbers)}
  else:
    numbers = _by_number(numbers)
  plain = _by_number(added or {})
  without = _numbers_of(special, numbers | plain)
  tokens = [b""] * (max([-1, *numbers, *plain]) + 1)
  for number, token in numbers.items():
    if number not in without and number not in plain:
      tokens[number] = _bytes_of(token)
  for number, token in plain.items():
    if number not in without:
      tokens[number] = token.encode()
  return tokens


def _by_number(vocabulary: Mapping[str, int]) -> dict[int, str]:
  found: dict[int, str] = {}
  for token, number in vocabulary.items():
    if number < 0 or number in found:
      raise ValueError(
        f"`vocabulary` must give each token a number of its own, got {number} "
        f"for {token!r}."
      )
    found[number] = token
  return found


def _numbers_of(
  special: Iterable[str | int], tokens: Mapping[int, str]
) -> set[int]:
  numbers = {token: number for number, token in tokens.items()}
  found = set()
  for token in special:
    number = numbers.get(token, -1) if isinstance(token, str) else token
    if number not in tokens:
      raise ValueError(
        f"`special` must name tokens of the vocabulary, got {token!r}."
      )
    found.add(int(number))
  return found


def _bytes_of(token: str) -> bytes:
  try:
    return bytes(_ALPHABET[character] for character in token)
  except KeyError as error:
    raise ValueError(
      f"`vocabulary` must be a byte-level one, got {token!r}, where "
      f"{error.args[0]!r} stands for no byte; name the token in `special` or "
      "`added`."
    ) from None


def _alphabet() -> dict[str, int]:
  """The byte of each character in a byte-level vocabulary.

  Bytes that Latin-1 can print stand for themselves. The others follow from
  character 256 on, in order.
  """
  printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
  others = [byte for byte in range(256) if byte not in printable]
  return {chr(byte): byte for byte in printable} | {
    chr(256 + place): byte for place, byte in enumerate(others)
  }


_ALPHABET = _alphabet()


def fold_bytes(
  tokens: TokenBytes,
  numbers: Array,
  body: Callable[[Carry, Array, Array], Carry],
  carry: Carry,
) -> Carry:
  """Folds `body` over the bytes of one token in each row.

  The loop ends with the longest of these tokens, whatever the vocabulary has.

  Args:
    tokens: the bytes of all tokens.
    numbers: int32[R], a token for each row; one out of range has no bytes.
    body: takes the carry, a byte for each row, int32[R], and which rows have
      one, bool[R]; returns the carry.
    carry: any pytree of arrays.
  """
  start = indexing.take(tokens.starts, numbers)
  known = (numbers >= 0) & (numbers < tokens.vocab_size)
  length = jnp.where(
    known, indexing.take(tokens.starts, numbers + 1) - start, 0
  )

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
  """The state of an automaton in each row after the bytes of one token.

  Args:
    next: int32[S, 256], the state after a state and a byte.
    tokens: the bytes of all tokens.
    states: int32[R]; one out of range stays as it is.
    numbers: int32[R], the token that each row reads; after one without bytes,
      or out of range, the state is what it was.

  Returns:
    int32[R].

  Examples:
    >>> counts = jnp.asarray([[1] * 256, [2] * 256, [0] * 256])
    >>> tokens = token_bytes([b"a", b"", b"bc"])
    >>> advance_states(
    ...   counts, tokens, jnp.asarray([0, 0, 1]), jnp.asarray([0, 1, 2])
    ... )
    Array([1, 0, 0], dtype=int32)
  """
  next, tokens, states, numbers = sharding.match_varying_axes(
    (next, tokens, states, numbers)
  )

  def body(states: Array, byte: Array, reads: Array) -> Array:
    return read_byte(next, states, byte, reads)

  return fold_bytes(tokens, numbers, body, states)


def read_byte(next: Array, states: Array, byte: Array, reads: Array) -> Array:
  """int32[R]: the states after a byte, where `reads` and the state exists."""
  inside = (states >= 0) & (states < next.shape[0])
  return jnp.where(reads & inside, indexing.take(next, states, byte), states)
