"""What every token does to an automaton, and which tokens lead to an end.

Tokens that lead each state to the same state are alike. A vocabulary of 50,000
tokens has some thousand different effects on an automaton, often fewer, so
everything is computed for effects, and for tokens only at the end.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxkv._src.guides.bitmask import BITS
from jaxkv._src.guides.bitmask import num_words
from jaxkv._src.guides.dfa import ByteDfa

FAR = 2**30
"""The distance of an end that cannot be reached."""

_MOST_ENTRIES = 2**23


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenMasks:
  """Which tokens may follow in each state, by the tokens that are left.

  A state whose end is `distance` tokens away has a mask for each number of
  tokens left from there on, up to the number from which on nothing changes.

  Attributes:
    distance: the fewest tokens to an end, the stop token included; FAR for
      none.  # int32[S]
    first: a state's entry in `rows` for `distance` tokens.  # int32[S]
    last: its last entry.  # int32[S]
    rows: the row in `masks` of each entry.  # int32[X]
    masks: a bit for each token, as in `bitmask`.  # uint32[U, ceil(V / 32)]
  """

  distance: np.ndarray
  first: np.ndarray
  last: np.ndarray
  rows: np.ndarray
  masks: np.ndarray


def token_masks(
  dfa: ByteDfa, tokens: Sequence[bytes], stop_tokens: Sequence[int]
) -> TokenMasks:
  """The masks of an automaton.

  A token is allowed if an end can be reached after it, by tokens of this
  vocabulary and in the tokens that are left. A stop token is allowed where the
  automaton accepts, and stands for no text. It is allowed too in states from
  which there is no way to an end; allowed tokens do not lead there. Tokens
  without bytes never are.

  Args:
    dfa: the automaton.
    tokens: the bytes of V tokens.
    stop_tokens: numbers of tokens.
  """
  texts = [b"" if i in stop_tokens else text for i, text in enumerate(tokens)]
  effect, effects = _effects(dfa.next, texts)
  distance = _distances(effects, dfa.accepts)
  after = np.where(distance < FAR, distance + 1, FAR)[effects]
  # From a state without a way to an end, only the stop token leads on.
  stops = np.where(dfa.accepts | (distance == FAR), 1, FAR)
  # The last column is that of all stop tokens.
  needed = np.concatenate([after, stops[None]]).T
  effect = effect.copy()
  effect[list(stop_tokens)] = len(effects)
  return _masks(needed, effect, distance)


def _effects(
  next: np.ndarray, texts: Sequence[bytes]
) -> tuple[np.ndarray, np.ndarray]:
  """Groups tokens by what they do.

  All tokens are read at once, a byte of each in a trip.

  Returns:
    For each token its effect, int[V], -1 where no state goes on or the token
    has no bytes; for each effect the state after each state, int32[E, S].
  """
  states = np.arange(len(next), dtype=np.int32)
  known = Numbering()
  effects = [states]
  known.of(states)
  lengths = np.array([len(text) for text in texts])
  data = np.frombuffer(b"".join(texts), np.uint8)
  starts = np.cumsum(lengths) - lengths
  effect = np.where(lengths > 0, 0, -1)
  reading = np.flatnonzero(lengths > 0)
  place = 0
  while len(reading):
    keys = effect[reading] * 256 + data[starts[reading] + place]
    pairs, own = np.unique(keys, return_inverse=True)
    numbers = np.empty(len(pairs), np.int64)
    width = max(1, _MOST_ENTRIES // len(next))
    for begin in range(0, len(pairs), width):
      some = pairs[begin : begin + width]
      before = np.stack([effects[number] for number in some // 256])
      for row, after in enumerate(next[before, (some % 256)[:, None]]):
        number = known.of(after) if after.any() else -1
        if number == len(effects):
          effects.append(after.copy())
        numbers[begin + row] = number
    effect[reading] = numbers[own.reshape(-1)]
    place += 1
    reading = reading[(effect[reading] >= 0) & (lengths[reading] > place)]
  used, effect_of_used = np.unique(effect, return_inverse=True)
  shift = int(used[0] == -1)
  table = [effects[number] for number in used[shift:]]
  stacked = np.stack(table) if table else np.zeros((0, len(next)), np.int32)
  return effect_of_used.reshape(-1) - shift, stacked


class Numbering:
  """Gives equal arrays equal numbers, from 0 on."""

  def __init__(self):
    self._known: dict[bytes, int] = {}

  def of(self, array: np.ndarray) -> int:
    return self._known.setdefault(array.tobytes(), len(self._known))


def _distances(effects: np.ndarray, accepts: np.ndarray) -> np.ndarray:
  """int[S]: the fewest tokens from each state to the stop token's end."""
  distance = np.where(accepts, 1, FAR)
  if not len(effects):
    return distance
  steps = 1
  while True:
    near = (distance[effects] == steps).any(axis=0) & (distance == FAR)
    if not near.any():
      return distance
    steps += 1
    distance[near] = steps


def _masks(
  needed: np.ndarray, effect: np.ndarray, distance: np.ndarray
) -> TokenMasks:
  """The masks.

  Args:
    needed: int[S, E], tokens that an end takes by way of each effect.
    effect: int[V], each token's effect, -1 for none.
    distance: int[S].
  """
  known, sets = Numbering(), []
  first, last, rows = [], [], []
  least = needed.min(axis=1)
  most = np.where(needed < FAR, needed, 0).max(axis=1)
  for state in range(len(needed)):
    first.append(len(rows))
    for left in range(least[state], most[state] + 1):
      allowed = np.packbits(needed[state] <= left)
      row = known.of(allowed)
      if row == len(sets):
        sets.append(allowed)
      rows.append(row)
    last.append(len(rows) - 1)
  return TokenMasks(
    distance=distance.astype(np.int32),
    first=np.array(first, np.int32),
    last=np.array(last, np.int32),
    rows=np.array(rows, np.int32),
    masks=_bits(np.stack(sets), needed.shape[1], effect),
  )


def _bits(sets: np.ndarray, size: int, effect: np.ndarray) -> np.ndarray:
  """uint32[U, ceil(V / 32)]: sets of effects as sets of tokens."""
  words = num_words(len(effect))
  masks = np.zeros((len(sets), words), np.uint32)
  column = np.where(effect < 0, size, effect)
  width = max(1, _MOST_ENTRIES // len(effect))
  for begin in range(0, len(sets), width):
    some = np.unpackbits(sets[begin : begin + width], axis=1, count=size)
    some = np.pad(some, ((0, 0), (0, 1)))  # Of tokens without an effect.
    packed = np.packbits(some[:, column], axis=1, bitorder="little")
    whole = np.zeros((len(packed), words * BITS // 8), np.uint8)
    whole[:, : packed.shape[1]] = packed
    masks[begin : begin + width] = whole.view("<u4")
  return masks
