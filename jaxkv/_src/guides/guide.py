"""Guided decoding: masks tokens so that each text matches a grammar."""

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
from jaxkv._src.arrays.arguments import check_type
from jaxkv._src.guides.allowed_tokens import UNREACHABLE
from jaxkv._src.guides.allowed_tokens import TokenMasks
from jaxkv._src.guides.allowed_tokens import token_masks
from jaxkv._src.guides.bitmask import BITS
from jaxkv._src.guides.bitmask import mask_logits
from jaxkv._src.guides.bitmask import num_words
from jaxkv._src.guides.dfa import START
from jaxkv._src.guides.dfa import compile_grammar
from jaxkv._src.guides.grammars import Grammar
from jaxkv._src.guides.minimize import Numbering
from jaxkv._src.guides.regex import regex
from jaxkv._src.guides.token_bytes import TokenBytes
from jaxkv._src.guides.token_bytes import advance_states

AnyGrammar = str | bytes | Grammar | None
"""A regular expression, a `Grammar`, or None to allow every token."""

NO_LIMIT = UNREACHABLE
"""The value of `GuideState.limit` that means no limit."""


class GuideState(NamedTuple):
  """The grammar state of each sequence, which the rollout carries.

  Attributes:
    state: the row of `Guide.next` after the tokens read so far.  # int32[Q]
    limit: the maximum number of tokens of a text and its stop token; `NO_LIMIT`
      for none.  # int32[Q]
  """

  state: Array
  limit: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Guide:
  """N grammars compiled to tables of S states in total, over V tokens.

  Pass a guide to a jitted function as an argument. If the function closed over
  the guide, the tables would become constants of the program. After
  `rollout.init` with `Requests(..., extra=guide.init(Q))`, run:

    @jax.jit
    def run(params, guide, state):
      return rollout.generate(
        params, state, model=model, process=guide.process
      )

  The mask of a state depends on the number of remaining tokens. So each state
  has consecutive entries in `rows`, in the order of this number. The first
  entry is for `distance` tokens or fewer. The last entry also applies to all
  larger numbers.

  Attributes:
    start: the start state of each grammar.  # int32[N]
    home: for each state, the start state of its grammar.  # int32[S]
    next: the state after a state and a byte.  # int32[S, 256]
    distance: the fewest tokens that complete a text from each state, including
      the stop token; 2**30 if no text can be completed.  # int32[S]
    first: the index of each state's first entry in `rows`.  # int32[S]
    last: the index of each state's last entry in `rows`.  # int32[S]
    rows: the row in `masks` of each of X entries.  # int32[X]
    masks: U distinct bitmasks, see `bitmask`.  # uint32[U, ceil(V / 32)]
    tokens: the bytes of all tokens.
    max_bytes: the length of the longest text in bytes; None if unbounded.
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
    self, num_sequences: int, *, grammars: Any = None, max_tokens: Any = None
  ) -> GuideState:
    """Returns the start states of Q sequences.

    Args:
      num_sequences: Q.
      grammars: int32[Q], the index of each sequence's grammar; None if there is
        only one grammar.
      max_tokens: int32[] or int32[Q], the maximum number of tokens of a text
        and its stop token; None for no limit. A token is allowed only if the
        tokens that remain after it can complete the text. A sequence whose
        grammar is None ignores the limit.

    Raises:
      TypeError: `grammars` or `max_tokens` does not hold integers.
      ValueError: a shape is wrong, an index is out of range, `grammars` is None
        for several grammars, or `max_tokens` is too small for every text of a
        sequence's grammar. Traced values are not checked.
    """
    shape = (num_sequences,)
    numbers = self._grammars(grammars, shape)
    limit = NO_LIMIT if max_tokens is None else max_tokens
    limit = jnp.asarray(as_int32("max_tokens", limit))
    if limit.ndim:
      check_shape("max_tokens", limit, shape, ", a number for each sequence")
    limit = jnp.broadcast_to(limit, shape)
    state = indexing.take(self.start, jnp.asarray(numbers))
    shortest = indexing.take(self.distance, state)
    if not isinstance(limit - shortest, Tracer):
      for row in np.flatnonzero(np.asarray(limit < shortest)).tolist():
        raise ValueError(
          f"`max_tokens` must be at least {shortest[row]}, the tokens of the "
          f"shortest text and its stop token, got {limit[row]} for sequence "
          f"{row}."
        )
    # The copy lets the caller's array survive a donation of the state.
    return GuideState(state=state, limit=jnp.copy(limit))

  def _grammars(self, grammars: Any, shape: tuple[int]) -> Any:
    """Checks the argument `grammars` of `init`, and returns int32[Q]."""
    num_grammars = self.start.shape[0]
    if grammars is None and num_grammars > 1:
      raise ValueError(
        f"`grammars` must be the index of one of {num_grammars} grammars for "
        "each sequence, got None."
      )
    indices = np.zeros(shape, np.int32) if grammars is None else grammars
    meaning = ", a number for each sequence"
    indices = as_int32("grammars", indices, shape, meaning)
    if not isinstance(indices, Tracer):
      fits = (np.asarray(indices) >= 0) & (np.asarray(indices) < num_grammars)
      for row in np.flatnonzero(~fits).tolist():
        raise ValueError(
          f"`grammars[{row}]` must be 0 .. {num_grammars - 1}, got "
          f"{indices[row]}."
        )
    return indices

  def process(
    self, logits: Array, rows: Any, extra: GuideState
  ) -> tuple[Array, GuideState]:
    """Masks logits: tokens that the grammar does not allow get -inf.

    The rollout calls this before each draw. A turn is the tokens drawn after
    one prompt. The first call of a turn begins a new text, and later calls
    advance the state by the last token.

    If the drawn tokens cannot be completed to a text of the grammar, because a
    masked token was drawn, only stop tokens are allowed. If too few tokens
    remain, only tokens on a shortest path to the end of a text are allowed.

    Args:
      logits: floats [R, V].
      rows: has the fields `counts`, int32[R], the number of tokens drawn so far
        in this turn, and `last_tokens`, int32[R], each sequence's last token.
      extra: the states of the R sequences.

    Returns:
      The masked logits and the new states.

    Raises:
      TypeError: `extra` is not a `GuideState`.
      ValueError: the logits do not have V columns.
    """
    hint = "give extra=guide.init(Q) to rollout.Requests"
    check_type("extra", extra, GuideState, "a GuideState", hint)
    if logits.shape[1:] != (self.tokens.vocab_size,):
      raise ValueError(
        f"`logits` must have the shape [R, {self.tokens.vocab_size}], one for "
        f"each of the guide's tokens, got {[*logits.shape]}; use `vocab_size` "
        "of token_bytes if a model has more columns than tokens."
      )
    # In the first call of a turn, the last token belongs to the prompt, so
    # `read` is not used.
    read = advance_states(self.next, self.tokens, extra.state, rows.last_tokens)
    # A state determines its grammar, because no byte leads from one grammar to
    # another.
    home = indexing.take(self.home, extra.state)
    state = jnp.where(rows.counts == 0, home, read)
    bits = self.allowed(state, extra.limit - rows.counts)
    return mask_logits(logits, bits), GuideState(state, extra.limit)

  def allowed(self, state: Array, left: Array) -> Array:
    """Returns the bitmask of allowed tokens, uint32[R, ceil(V / 32)].

    Args:
      state: int32[R], the row of `next` after the tokens read so far.
      left: int32[R], the number of remaining tokens, including the stop token.
    """
    # With fewer than `distance` tokens left, the text cannot be completed. The
    # mask for `distance` then allows the tokens on a shortest path to its end.
    extra_tokens = jnp.maximum(left - indexing.take(self.distance, state), 0)
    entry = indexing.take(self.first, state)
    num_entries = indexing.take(self.last, state) - entry
    entry = entry + jnp.minimum(extra_tokens, num_entries)
    return indexing.take(self.masks, indexing.take(self.rows, entry))


def guide(
  grammars: AnyGrammar | list[AnyGrammar] | tuple[AnyGrammar, ...],
  tokens: TokenBytes,
  stop_token: int | Sequence[int],
) -> Guide:
  r"""Compiles grammars to a guide, on the host.

  A guide takes about 1 KiB for each state and V / 8 bytes for each distinct
  mask.

  Args:
    grammars: a regular expression (see `regex`), a `Grammar` such as from
      `json_schema`, or None to allow every token; or a list of these, from
      which `init` assigns one to each sequence.
    tokens: the bytes of V tokens. The guide stores a copy, so that `tokens`
      survives a donation of the guide.
    stop_token: the token that ends a text, or several such tokens. A stop token
      is allowed where a text of the grammar can end. Its bytes are ignored.

  Raises:
    TypeError: a grammar has a wrong type, or a stop token is not an integer.
    ValueError: a stop token is out of range, `grammars` or `stop_token` is an
      empty list, or a grammar is malformed, too large, or matches no text that
      the tokens can spell.

  Examples:
    >>> from jaxkv.guides import token_bytes
    >>> tokens = token_bytes([b"y", b"es", b"no", b"n", b""])
    >>> yes_or_no = guide("yes|no", tokens, stop_token=4)
    >>> state = yes_or_no.init(1).state
    >>> bits = yes_or_no.allowed(state, jnp.asarray([10]))
    >>> [f"{row:05b}" for row in bits[:, 0].tolist()]  # Tokens 2 and 0.
    ['00101']
  """
  texts = tokens.texts()
  stop_ids = _stop_tokens(stop_token, len(texts))
  all_grammars = grammars if isinstance(grammars, list | tuple) else [grammars]
  parts = [_tables(grammar, texts, stop_ids) for grammar in all_grammars]
  if not parts:
    raise ValueError("`grammars` must be one grammar or more, got none.")
  lengths = [part.max_bytes for part in parts]
  bounded = [number for number in lengths if number is not None]
  return Guide(
    **_concatenate(parts),
    tokens=tokens.copy(),
    max_bytes=max(bounded) if len(bounded) == len(lengths) else None,
  )


class _GrammarTables(NamedTuple):
  """The tables of one grammar; state 1 is the start state."""

  next: np.ndarray
  masks: TokenMasks
  max_bytes: int | None


def _tables(
  grammar: AnyGrammar, texts: Sequence[bytes], stops: Sequence[int]
) -> _GrammarTables:
  if grammar is None:
    return _unrestricted(len(texts))
  rules = regex(grammar) if isinstance(grammar, str | bytes) else grammar
  if not isinstance(rules, Grammar):
    raise TypeError(
      "`grammars` must be a regular expression or a grammar, got "
      f"{type(grammar).__name__}; see `regex` and `json_schema`."
    )
  dfa = compile_grammar(rules)
  masks = token_masks(dfa, texts, stops)
  if masks.distance[START] == UNREACHABLE:
    raise ValueError(
      "`tokens` must spell a text of each grammar, got tokens that spell no "
      f"text of {grammar!r:.200}."
    )
  return _GrammarTables(dfa.next, masks, dfa.max_bytes)


def _unrestricted(vocab_size: int) -> _GrammarTables:
  """Returns tables that allow every token, even tokens without bytes."""
  masks = np.zeros((1, num_words(vocab_size) * BITS), np.uint8)
  masks[:, :vocab_size] = 1
  words = np.packbits(masks, axis=1, bitorder="little").view("<u4")
  zeros = np.zeros(2, np.int32)
  tables = TokenMasks(
    distance=zeros + 1, first=zeros, last=zeros, rows=zeros[:1], masks=words
  )
  return _GrammarTables(np.full((2, 256), START, np.int32), tables, None)


def _concatenate(parts: Sequence[_GrammarTables]) -> dict[str, Array]:
  """Concatenates the tables of all grammars and renumbers their states."""
  sizes = np.array([len(part.next) for part in parts])
  first_states = np.cumsum(sizes) - sizes
  first_entries = np.cumsum([0, *(len(part.masks.rows) for part in parts)])
  # A mask that grammars share, such as that of dead states, is stored once.
  masks = np.concatenate([part.masks.masks for part in parts])
  numbering = Numbering()
  row_of_masks = np.array([numbering.of(mask) for mask in masks])
  masks = masks[np.unique(row_of_masks, return_index=True)[1]]
  counts = [len(part.masks.masks) for part in parts]
  rows = np.split(row_of_masks, np.cumsum(counts)[:-1])

  def joined(arrays: Sequence[np.ndarray]) -> Array:
    return jnp.asarray(np.concatenate(arrays), jnp.int32)

  numbered = list(zip(parts, first_states, first_entries, rows, strict=False))
  return dict(
    start=jnp.asarray(first_states + START, jnp.int32),
    home=jnp.asarray(np.repeat(first_states + START, sizes), jnp.int32),
    next=joined([part.next + offset for part, offset, _, _ in numbered]),
    distance=joined([part.masks.distance for part in parts]),
    first=joined([part.masks.first + entry for part, _, entry, _ in numbered]),
    last=joined([part.masks.last + entry for part, _, entry, _ in numbered]),
    rows=joined([new_row[part.masks.rows] for part, _, _, new_row in numbered]),
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
