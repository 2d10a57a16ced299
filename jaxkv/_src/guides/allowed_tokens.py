"""Computes the tokens that are allowed in each state of a DFA, as masks.

The effect of a token is an array that maps each state to the state after the
token. Typically, 50,000 tokens have at most a few thousand distinct effects. So
masks are computed over effects, and expanded to tokens at the end.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkv._src.guides.bitmask import BITS
from jaxkv._src.guides.bitmask import num_words
from jaxkv._src.guides.dfa import ByteDfa
from jaxkv._src.guides.minimize import Numbering

UNREACHABLE = 2**30
"""The `distance` of a state from which no text can be completed."""

_MAX_BATCH_ENTRIES = 2**23


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenMasks:
  """The allowed tokens of each state for each number of remaining tokens.

  `Guide` describes the fields.
  """

  distance: np.ndarray
  first: np.ndarray
  last: np.ndarray
  rows: np.ndarray
  masks: np.ndarray


def token_masks(
  dfa: ByteDfa, tokens: Sequence[bytes], stop_tokens: Sequence[int]
) -> TokenMasks:
  """Computes the token masks of a DFA over V tokens.

  A token is allowed if the tokens that remain after it can complete the text.
  Stop tokens are allowed in accepting states, and their bytes are ignored. In a
  state from which no text can be completed, only stop tokens are allowed.
  Tokens without bytes that are not stop tokens are never allowed.
  """
  texts = [b"" if i in stop_tokens else text for i, text in enumerate(tokens)]
  effect, effects = _group_by_effect(dfa.next, texts)
  distance = _distances(effects, dfa.accepts)
  after = np.where(distance < UNREACHABLE, distance + 1, UNREACHABLE)[effects]
  # Stop tokens are allowed in a state that cannot complete a text, because an
  # empty mask would make all logits -inf.
  stops = np.where(dfa.accepts | (distance == UNREACHABLE), 1, UNREACHABLE)
  # All stop tokens share one additional effect, in the last column.
  needed = np.concatenate([after, stops[None]]).T
  effect = effect.copy()
  effect[list(stop_tokens)] = len(effects)
  return _mask_table(needed, effect, distance)


def _group_by_effect(
  next: np.ndarray, texts: Sequence[bytes]
) -> tuple[np.ndarray, np.ndarray]:
  """Groups tokens by their effect on the states.

  Returns:
    The number of each token's effect, int[V], and the E effects, int32[E, S].
    The number is -1 for a token that has no bytes or leads every state to the
    dead state.
  """
  states = np.arange(len(next), dtype=np.int32)
  numbering = Numbering()
  effects = [states]
  numbering.of(states)
  lengths = np.array([len(text) for text in texts])
  data = np.frombuffer(b"".join(texts), np.uint8)
  starts = np.cumsum(lengths) - lengths
  effect = np.where(lengths > 0, 0, -1)
  unread = np.flatnonzero(lengths > 0)
  index = 0
  # Each iteration reads the next byte of every unread token. Tokens with the
  # same effect so far and the same next byte share one table look-up.
  while len(unread):
    keys = effect[unread] * 256 + data[starts[unread] + index]
    pairs, pair_of_token = np.unique(keys, return_inverse=True)
    numbers = np.empty(len(pairs), np.int64)
    # Batches bound the memory of the [pairs, S] table of next states.
    width = max(1, _MAX_BATCH_ENTRIES // len(next))
    for begin in range(0, len(pairs), width):
      batch = pairs[begin : begin + width]
      before = np.stack([effects[number] for number in batch // 256])
      for row, after in enumerate(next[before, (batch % 256)[:, None]]):
        # A token that leads all states to the dead state 0 is never allowed.
        number = numbering.of(after) if after.any() else -1
        if number == len(effects):
          effects.append(after.copy())
        numbers[begin + row] = number
    effect[unread] = numbers[pair_of_token.reshape(-1)]
    index += 1
    unread = unread[(effect[unread] >= 0) & (lengths[unread] > index)]
  used, effect_of_used = np.unique(effect, return_inverse=True)
  shift = int(used[0] == -1)
  table = [effects[number] for number in used[shift:]]
  stacked = np.stack(table) if table else np.zeros((0, len(next)), np.int32)
  return effect_of_used.reshape(-1) - shift, stacked


def _distances(effects: np.ndarray, accepts: np.ndarray) -> np.ndarray:
  """Returns the fewest tokens that complete a text from each state, int[S]."""
  # A breadth-first search backwards from the accepting states. These have the
  # distance 1, because only the stop token is missing.
  distance = np.where(accepts, 1, UNREACHABLE)
  if not len(effects):
    return distance
  steps = 1
  while True:
    reached = (distance[effects] == steps).any(axis=0)
    reached &= distance == UNREACHABLE
    if not reached.any():
      return distance
    steps += 1
    distance[reached] = steps


def _mask_table(
  needed: np.ndarray, effect: np.ndarray, distance: np.ndarray
) -> TokenMasks:
  """Builds the masks of each state, one for each number of remaining tokens.

  `needed`, int[S, E], is the fewest tokens that complete a text from a state if
  the first of them has an effect. `effect`, int[V], is each token's column of
  `needed`; -1 if never allowed. `TokenMasks` has `distance`, int[S].
  """
  numbering = Numbering()
  effect_sets = []
  first = []
  last = []
  rows = []
  min_needed = needed.min(axis=1)
  max_needed = np.where(needed < UNREACHABLE, needed, 0).max(axis=1)
  # The entries of a state end at its largest finite `needed`, because more
  # remaining tokens would allow no further effect.
  for state in range(len(needed)):
    first.append(len(rows))
    for remaining in range(min_needed[state], max_needed[state] + 1):
      allowed = np.packbits(needed[state] <= remaining)
      row = numbering.of(allowed)
      if row == len(effect_sets):
        effect_sets.append(allowed)
      rows.append(row)
    last.append(len(rows) - 1)
  return TokenMasks(
    distance=distance.astype(np.int32),
    first=np.array(first, np.int32),
    last=np.array(last, np.int32),
    rows=np.array(rows, np.int32),
    masks=_expand(np.stack(effect_sets), needed.shape[1], effect),
  )


def _expand(sets: np.ndarray, size: int, effect: np.ndarray) -> np.ndarray:
  """Converts packed bitmasks over `size` effects to bitmasks over tokens."""
  words = num_words(len(effect))
  masks = np.zeros((len(sets), words), np.uint32)
  column = np.where(effect < 0, size, effect)
  width = max(1, _MAX_BATCH_ENTRIES // len(effect))
  for begin in range(0, len(sets), width):
    unpacked = np.unpackbits(sets[begin : begin + width], axis=1, count=size)
    # The added column of zeros is for tokens that are never allowed.
    unpacked = np.pad(unpacked, ((0, 0), (0, 1)))
    packed = np.packbits(unpacked[:, column], axis=1, bitorder="little")
    padded = np.zeros((len(packed), words * BITS // 8), np.uint8)
    padded[:, : packed.shape[1]] = packed
    masks[begin : begin + width] = padded.view("<u4")
  return masks
