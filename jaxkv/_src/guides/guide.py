"""Guides: which token may come next, so that every text is of a grammar."""

import dataclasses
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import check_shape
from jaxkv._src.guides.bitmask import BITS
from jaxkv._src.guides.bitmask import mask_logits
from jaxkv._src.guides.bitmask import num_words
from jaxkv._src.guides.dfa import START
from jaxkv._src.guides.dfa import compile_grammar
from jaxkv._src.guides.grammars import Grammar
from jaxkv._src.guides.regex import regex
from jaxkv._src.guides.token_bytes import TokenBytes
from jaxkv._src.guides.token_bytes import advance_states
from jaxkv._src.guides.token_masks import FAR
from jaxkv._src.guides.token_masks import Numbering
from jaxkv._src.guides.token_masks import TokenMasks
from jaxkv._src.guides.token_masks import token_masks

AnyGrammar = str | bytes | Grammar | None
"""A regular expression, another grammar, or none: every token is allowed."""

NO_LIMIT = FAR
"""More tokens than any sequence has."""


class GuideState(NamedTuple):
  """What a loop carries for each sequence.

  Attributes:
    state: where its text is in the grammar.  # int32[Q]
    limit: the most tokens of a turn, the stop token included.  # int32[Q]
  """

  state: Array
  limit: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Guide:
  """Grammars as tables, S states in all, over V tokens.

  Pass it to a jitted function as an argument. Tables that a function closes
  over would become constants of the program. With `init(user=guide.init(Q))`:

    @jax.jit
    def run(params, guide, state):
      return rollout.generate(
        params, state, model=model, process=guide.process
      )

  The stop token may be any token, also one that has bytes of its own.

  Attributes:
    start: the state in which each grammar begins.  # int32[N]
    home: the state in which the grammar of each state begins.  # int32[S]
    next: the state after a state and a byte.  # int32[S, 256]
    distance: the fewest tokens from each state to the end of a text, the stop
      token included; 2**30 if there is no way.  # int32[S]
    first: an entry of `rows` for each state: its mask when `distance` tokens
      are left. An entry for each further token follows.  # int32[S]
    last: the last of these entries, for all larger numbers.  # int32[S]
    rows: the row of each entry in `masks`.  # int32[X]
    masks: sets of tokens, see `bitmask`.  # uint32[U, ceil(V / 32)]
    tokens: the bytes of all tokens.
    max_bytes: bytes of the longest text of the grammars; None if there is no
      longest.
  """

  start: Array
  home: Array
  next: Array
  distance: Array
  first: Array
  last: Array
  rows: Array
  masks: Array
  tokens: TokenBytes
  max_bytes: int | None = dataclasses.field(metadata={"static": True})

  def init(
    self,
    num_sequences: int,
    *,
    grammars: Any = None,
    max_tokens: Any = None,
  ) -> GuideState:
    """The state of Q sequences that have no token yet.

    Args:
      num_sequences: Q.
      grammars: int32[Q], which grammar each sequence has; None if there is but
        one.
      max_tokens: int32[] or int32[Q], the most tokens that are drawn for a
        text, the stop token included. All texts end by then: a token is only
        allowed if an end can be reached in the tokens left after it. None for
        no limit.

    Raises:
      TypeError: `grammars` or `max_tokens` does not hold integers.
      ValueError: they have another shape, there is no such grammar, there are
        several and `grammars` is None, or `max_tokens` is too small for any
        text of a grammar. Traced numbers are not checked.
    """
    shape = (num_sequences,)
    numbers = self._grammars(grammars, shape)
    limit = NO_LIMIT if max_tokens is None else max_tokens
    limit = jnp.asarray(as_int32("max_tokens", limit))
    if limit.ndim:
      check_shape("max_tokens", limit, shape, ", a number for each sequence")
    limit = jnp.broadcast_to(limit, shape)
    state = indexing.take(self.start, jnp.asarray(numbers))
    least = indexing.take(self.distance, state)
    if not isinstance(limit - least, Tracer):
      for row in np.flatnonzero(np.asarray(limit < least)).tolist():
        raise ValueError(
          f"`max_tokens` must be at least {least[row]}, the tokens of the "
          f"shortest text and its stop token, got {limit[row]} for sequence "
          f"{row}."
        )
    return GuideState(state=state, limit=jnp.copy(limit))

  def _grammars(self, grammars: Any, shape: tuple[int]) -> Any:
    """`grammars` of `init`, checked."""
    known = self.start.shape[0]
    if grammars is None and known > 1:
      raise ValueError(
        f"`grammars` must say which of the {known} grammars each sequence has, "
        "got None."
      )
    numbers = np.zeros(shape, np.int32) if grammars is None else grammars
    numbers = as_int32("grammars", numbers)
    check_shape("grammars", numbers, shape, ", a number for each sequence")
    if not isinstance(numbers, Tracer):
      bad = (np.asarray(numbers) < 0) | (np.asarray(numbers) >= known)
      for row in np.flatnonzero(bad).tolist():
        raise ValueError(
          f"`grammars[{row}]` must be 0 .. {known - 1}, got {numbers[row]}."
        )
    return numbers

  def process(
    self, logits: Array, rows: Any, user: GuideState
  ) -> tuple[Array, GuideState]:
    """Masks the logits of tokens that may not come next.

    To be called once for each token that is drawn. At the first token of a turn
    a text begins, whatever the state was; at others the last token is read.

    A sequence whose text can have no end, because tokens were not drawn from
    these logits, may only draw the stop token. One that has too few tokens left
    may draw what leads to the nearest end.

    Args:
      logits: floats [R, V].
      rows: `counts` int32[R], the tokens drawn so far in this turn, and
        `last_tokens` int32[R], each sequence's last token.
      user: the states of the R sequences.

    Returns:
      The logits, -inf where a token is not allowed, and the states.

    Raises:
      TypeError: `user` is no `GuideState`.
      ValueError: the logits are not for V tokens.
    """
    if not isinstance(user, GuideState):
      raise TypeError(
        f"`user` must be a GuideState, got {type(user).__name__}; give "
        "user=guide.init(Q) to rollout.init."
      )
    if logits.shape[1:] != (self.tokens.vocab_size,):
      raise ValueError(
        f"`logits` must have the shape [R, {self.tokens.vocab_size}], one for "
        f"each of the guide's tokens, got {[*logits.shape]}; use `vocab_size` "
        "of token_bytes if a model has more columns than tokens."
      )
    read = advance_states(self.next, self.tokens, user.state, rows.last_tokens)
    home = indexing.take(self.home, user.state)
    state = jnp.where(rows.counts == 0, home, read)
    bits = self.allowed(state, user.limit - rows.counts)
    return mask_logits(logits, bits), GuideState(state, user.limit)

  def allowed(self, state: Array, left: Array) -> Array:
    """The tokens that may come next.

    Args:
      state: int32[R].
      left: int32[R], tokens that may still be drawn, the stop token included.

    Returns:
      uint32[R, ceil(V / 32)], see `bitmask`.
    """
    more = jnp.maximum(left - indexing.take(self.distance, state), 0)
    first, last = (
      indexing.take(self.first, state),
      indexing.take(self.last, state),
    )
    row = indexing.take(self.rows, first + jnp.minimum(more, last - first))
    return indexing.take(self.masks, row)


def guide(
  grammars: AnyGrammar | list[AnyGrammar] | tuple[AnyGrammar, ...],
  tokens: TokenBytes,
  stop_token: int | Sequence[int],
) -> Guide:
  r"""Makes a guide, on the host.

  A state takes about 1 KiB, and each of the different masks V / 8 bytes.

  Args:
    grammars: a regular expression, see `regex`, or another grammar, such as
      `json_schema`; or several, of which each sequence has one. None in a list
      leaves its sequences free.
    tokens: the bytes of V tokens; they are copied, so that a state with a guide
      may be donated.
    stop_token: the token that ends a text, or several of them. It is allowed
      where the text may end.

  Raises:
    TypeError: a grammar is of no known type.
    ValueError: a grammar is wrong, matches nothing, or the tokens cannot spell
      any text of it, or there is no such stop token.

  Examples:
    >>> from jaxkv.rollout import token_bytes
    >>> tokens = token_bytes([b"y", b"es", b"no", b"n", b""])
    >>> yes_or_no = guide("yes|no", tokens, stop_token=4)
    >>> state = yes_or_no.init(1).state
    >>> bits = yes_or_no.allowed(state, jnp.asarray([10]))
    >>> [f"{row:05b}" for row in bits[:, 0].tolist()]  # "no" and "y"
    ['00101']
  """
  texts = tokens.texts()
  stops = _stop_tokens(stop_token, len(texts))
  several = grammars if isinstance(grammars, list | tuple) else [grammars]
  parts = [_part(one, texts, stops) for one in several]
  if not parts:
    raise ValueError("`grammars` must be one grammar or more, got none.")
  longest = [part.max_bytes for part in parts]
  known = [number for number in longest if number is not None]
  return Guide(
    **_joined(parts),
    tokens=tokens.copy(),
    max_bytes=max(known) if len(known) == len(longest) else None,
  )


class _GrammarTables(NamedTuple):
  """The tables of one grammar, which begins in state 1."""

  next: np.ndarray
  masks: TokenMasks
  max_bytes: int | None


def _part(
  grammar: AnyGrammar, texts: Sequence[bytes], stops: Sequence[int]
) -> _GrammarTables:
  if grammar is None:
    return _free(len(texts))
  rules = regex(grammar) if isinstance(grammar, str | bytes) else grammar
  if not isinstance(rules, Grammar):
    raise TypeError(
      "`grammars` must be a regular expression or a grammar, got "
      f"{type(grammar).__name__}; see `regex` and `json_schema`."
    )
  dfa = compile_grammar(rules)
  masks = token_masks(dfa, texts, stops)
  if masks.distance[START] == FAR:
    raise ValueError(
      "`tokens` must spell a text of each grammar, got tokens that spell none "
      f"of {grammar!r:.200}."
    )
  return _GrammarTables(dfa.next, masks, dfa.max_bytes)


def _free(vocab_size: int) -> _GrammarTables:
  """A grammar that allows every token, even those without bytes."""
  masks = np.zeros((1, num_words(vocab_size) * BITS), np.uint8)
  masks[:, :vocab_size] = 1
  words = np.packbits(masks, axis=1, bitorder="little").view("<u4")
  zeros = np.zeros(2, np.int32)
  one = TokenMasks(
    distance=zeros + 1, first=zeros, last=zeros, rows=zeros[:1], masks=words
  )
  return _GrammarTables(np.full((2, 256), START, np.int32), one, None)


def _joined(parts: Sequence[_GrammarTables]) -> dict[str, Array]:
  """The tables of all grammars, their states one after the other."""
  sizes = np.array([len(part.next) for part in parts])
  begins = np.cumsum(sizes) - sizes
  entries = np.cumsum([0, *(len(part.masks.rows) for part in parts)])
  # Grammars have many masks in common, such as that of the dead state.
  masks = np.concatenate([part.masks.masks for part in parts])
  numbering = Numbering()
  row = np.array([numbering.of(mask) for mask in masks])
  masks = masks[np.unique(row, return_index=True)[1]]
  counts = [len(part.masks.masks) for part in parts]
  rows = np.split(row, np.cumsum(counts)[:-1])

  def joined(arrays: Sequence[np.ndarray]) -> Array:
    return jnp.asarray(np.concatenate(arrays), jnp.int32)

  numbered = list(zip(parts, begins, entries, rows, strict=False))
  return dict(
    start=jnp.asarray(begins + START, jnp.int32),
    home=jnp.asarray(np.repeat(begins + START, sizes), jnp.int32),
    next=joined([part.next + begin for part, begin, _, _ in numbered]),
    distance=joined([part.masks.distance for part in parts]),
    first=joined([part.masks.first + at for part, _, at, _ in numbered]),
    last=joined([part.masks.last + at for part, _, at, _ in numbered]),
    rows=joined([own[part.masks.rows] for part, _, _, own in numbered]),
    masks=jnp.asarray(masks, jnp.uint32),
  )


def _stop_tokens(stop_token: int | Sequence[int], vocab_size: int) -> list[int]:
  array = np.asarray(as_int32("stop_token", stop_token)).reshape(-1)
  for token in array.tolist():
    if not 0 <= token < vocab_size:
      raise ValueError(
        f"`stop_token` must be a token, 0 .. {vocab_size - 1}, got {token}."
      )
  if not len(array):
    raise ValueError("`stop_token` must be one token or more, got none.")
  return array.tolist()
