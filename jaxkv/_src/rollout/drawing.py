"""Samples the tokens of a step.

Without speculation a sequence samples one token. With it, sampling continues
while the token equals the draft, whose logits are then the next token's. So
speculation changes no token, whatever `Sampling` and `process` do.
"""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.state import Status
from jaxkv._src.rollout import endings
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.model import Logits
from jaxkv._src.rollout.packing import Work
from jaxkv._src.rollout.rows import Process
from jaxkv._src.rollout.rows import Rows
from jaxkv._src.rollout.rows import rows_of
from jaxkv._src.rollout.sequences import Sequences
from jaxkv._src.rollout.state import RolloutState
from jaxkv._src.sampling import penalties
from jaxkv._src.sampling import sample
from jaxkv._src.sampling import settings
from jaxkv._src.sampling.logits import as_logits
from jaxkv._src.sampling.penalties import History
from jaxkv._src.sampling.settings import Sampling


class Seen(NamedTuple):
  """Token counts of the sequences in the slots, for penalties.

  Attributes:
    owners: int32[B], the row of the sequence that each entry describes.
    counts: uint16[B, V], see `penalties.seen_in`.
  """

  owners: Array
  counts: Array


class Steps(NamedTuple):
  """Results of a step so far.

  Attributes:
    sequences: with the sampled tokens.
    user: see `RolloutState.user`.
    seen: None without penalties.
    ended: bool[B], sequences that ended.
    counts: int32[B], tokens sampled by each slot.
  """

  sequences: Sequences
  user: Any
  seen: Seen | None
  ended: Array
  counts: Array


def nothing_seen(state: RolloutState, vocab_size: int) -> Seen:
  """Returns entries that describe no sequence."""
  slots, none = state.running.shape[0], state.sequences.length.shape[0]
  owners = jnp.full((slots,), none, jnp.int32)
  return Seen(owners, jnp.zeros((slots, vocab_size), jnp.uint16))


def looked_at(state: RolloutState, seen: Seen | None) -> Seen | None:
  """Counts the tokens of sequences that entered slots since the last step."""
  if seen is None:
    return None
  sequences, running = state.sequences, state.running
  none, size = sequences.length.shape[0], seen.counts.shape[1]

  def trip(seen: Seen) -> Seen:
    slot = jnp.argmax(_strange(seen, running, none)).astype(jnp.int32)
    row = running[slot][None]
    counts = penalties.seen_in(
      indexing.take(sequences.tokens, row),
      indexing.take(sequences.length, row),
      indexing.take(sequences.versions, row) != queue.NOT_DRAWN,
      vocab_size=size,
    )
    return Seen(
      owners=seen.owners.at[slot].set(row[0]),
      counts=seen.counts.at[slot].set(counts[0]),
    )

  return lax.while_loop(
    lambda seen: jnp.any(_strange(seen, running, none)), trip, seen
  )


def _strange(seen: Seen, running: Array, none: int) -> Array:
  return (seen.owners != running) & (running < none)


@jax.named_scope("sample")
def draw(
  state: RolloutState,
  work: Work,
  draws: Array,
  logits: Logits,
  guesses: Array | None,
  seen: Seen | None,
  read: Array,
  process: Process | None,
) -> Steps:
  """Samples the next tokens of slots.

  Args:
    state: the sequences in the slots.
    work: the columns of the logits.
    draws: bool[B], the slots that sample.
    logits: from `model.call`.
    guesses: int32[B, K], drafts of each slot; None without speculation.
    seen: from `looked_at`.
    read: int32[], see `loops.read_before`.
    process: see `generate`.
  """
  steps = Steps(
    sequences=state.sequences,
    user=state.user,
    seen=seen,
    ended=sharding.zeros_like(draws),
    counts=sharding.zeros_like(work.counts),
  )
  steps, tokens = _one(state, steps, draws, logits.last, read, process)
  more, drafts, begins = logits.drafts, work.drafts, work.begins
  if guesses is None or more is None or drafts is None or begins is None:
    return steps

  def as_guessed(going: Array, tokens: Array, steps: Steps, number: Any) -> Any:
    guess = guesses[:, number]
    return going & (number < drafts) & (tokens == guess) & ~steps.ended

  def trip(loop: tuple[Steps, Array, Array]) -> tuple[Steps, Array, Array]:
    steps, going, number = loop
    here = more.at[begins + number - 1].get(mode="clip")
    steps, tokens = _one(state, steps, going, here, read, process)
    return steps, as_guessed(going, tokens, steps, number), number + 1

  going = as_guessed(draws, tokens, steps, 0)
  start = sharding.match_varying_axes((steps, going, jnp.ones((), jnp.int32)))
  return lax.while_loop(lambda loop: jnp.any(loop[1]), trip, start)[0]


def _one(
  state: RolloutState,
  steps: Steps,
  draws: Array,
  logits: Array,
  read: Array,
  process: Process | None,
) -> tuple[Steps, Array]:
  """Samples one token of each slot that draws, from logits [B, V].

  A sequence whose token has no finite log-prob fails instead.
  """
  numbers, sequences = state.running, steps.sequences
  none, config = sequences.length.shape[0], state.config
  state = dataclasses.replace(state, sequences=sequences, user=steps.user)
  rows = rows_of(state.sequences, state.user, numbers)
  own = settings.rows(state.sampling, numbers)
  raw = as_logits(logits)
  changed = penalties.adjust(raw, own, _history(state, own, rows, steps.seen))
  user = steps.user
  if process is not None:
    changed, kept = process(changed, rows, rows.user)
    place = indexing.where_valid(draws, numbers)
    user = jax.tree.map(
      lambda old, new: indexing.put(old, place, values=new), user, kept
    )
  drawn = sample.draw(
    sequences.keys[jnp.minimum(numbers, none - 1)],
    indexing.take(queue.num_generated(sequences), numbers),
    changed,
    own,
    raw_logits=raw,
    raw_log_probs=sequences.records.raw_log_probs is not None,
    entropy=config.entropy,
    top_log_probs=config.top_log_probs,
    exact=config.numerics == "exact",
  )
  fails = draws & ~jnp.isfinite(drawn.log_probs)
  draws &= ~fails
  ending = endings.ending(sequences, rows, drawn.tokens, own, config)
  read = jnp.maximum(read, jnp.max(drawn.tokens))
  sequences, ended = queue.append(
    sequences,
    loops.read_before(read, numbers),
    draws,
    drawn,
    state.cache.epoch.astype(jnp.int32),
    ending,
  )
  code = jnp.full_like(numbers, Status.BAD_LOGITS)
  sequences = queue.fail(sequences, numbers, fails, code)
  seen = steps.seen
  if seen is not None:
    counts = penalties.see(seen.counts, drawn.tokens, draws)
    seen = seen._replace(counts=counts)
  steps = Steps(
    sequences=sequences,
    user=user,
    seen=seen,
    ended=steps.ended | ended | fails,
    counts=steps.counts + draws.astype(jnp.int32),
  )
  return steps, drawn.tokens


def _history(
  state: RolloutState, own: Sampling, rows: Rows, seen: Seen | None
) -> History:
  count = penalties.num_last_tokens(own)
  last = None
  if count:
    last = penalties.last_tokens_of(
      state.sequences.tokens, rows.numbers, rows.lengths, count
    )
  return History(
    counts=rows.counts,
    seen=None if seen is None else seen.counts,
    last_tokens=last,
    stop_token=state.config.stop_token,
  )
