"""Rollouts that hand their sequences to each other at random steps."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv.rollout import SequenceStatus
from tests import as_users
from tests.engine import by_hand
from tests.models import exact_families as families
from tests.models import tiny_decoders as tiny

SAMPLES, NEW, PROMPT = 2, 10, 14
WIDTH = PROMPT + NEW
_AT_ONCE = 4
_TEMPERATURE = 0.8


@dataclasses.dataclass(frozen=True)
class Spec:
  """The sizes of one rollout; G samples need G rows of the queue.

  Attributes:
    slots: B.
    pages: pages of one layer group.
    groups: groups of rows in the queue.
    page_size: S.
    secret: the secret of page keys.
    options: changed options of the rollout.
  """

  slots: int
  pages: int
  groups: int
  page_size: int = 4
  secret: int = 1
  offload_pages: int = 0
  options: tuple[tuple[str, Any], ...] = ()


def begun(config, spec: Spec, **cache_options) -> rollout.RolloutState:
  """Returns a rollout without sequences."""
  sizes = tiny.cache_config(
    config,
    num_pages=1 + spec.pages,
    page_size=spec.page_size,
    num_slots=spec.slots,
    pages_per_slot=-(-WIDTH // spec.page_size) + 1,
    offload_pages=spec.offload_pages,
    **cache_options,
  )
  fields = {
    "num_samples": SAMPLES,
    "max_new_tokens": NEW,
    "max_length": WIDTH,
    "prefill_chunk": 5,
    "raw_log_probs": True,
  }
  options = rollout.RolloutConfig(**(fields | dict(spec.options)))
  # Pages that nothing has written must never be read.
  kv = by_hand.poisoned(models.init_kv(config, sizes))
  requests = rollout.Requests(
    np.zeros((spec.groups, PROMPT), np.int32),
    np.ones(spec.groups, np.int32),
    sampling=rollout.Sampling(temperature=_TEMPERATURE),
    num_samples=np.zeros(spec.groups, np.int32),
  )
  return rollout.init(
    jaxkv.init(sizes, jax.random.key(spec.secret)),
    kv,
    requests,
    jax.random.key(0),
    options,
    offload=jaxkv.kv.init_offload(kv, sizes) if spec.offload_pages else None,
  )


def prompts_of(count: int) -> list[list[int]]:
  """Returns prompts, some of them with a common prefix."""
  rng = np.random.default_rng(0)
  stems = rng.integers(0, families.VOCABULARY, (4, PROMPT))
  prompts = []
  for _ in range(count):
    length = int(rng.integers(1, PROMPT + 1))
    shared = int(rng.integers(0, length + 1))
    tokens = rng.integers(0, families.VOCABULARY, PROMPT)
    tokens[:shared] = stems[rng.integers(4), :shared]
    prompts.append(tokens[:length].tolist())
  return prompts


class Fleet:
  """Rollouts that share the prompts; sequences move between them.

  Attributes:
    states: the rollouts.
    results: by id, the tokens and log-probs of each ended sequence.
    moved: by id, the times a sequence moved.
  """

  def __init__(self, config, params, specs, prompts, **cache_options):
    self._rng = np.random.default_rng(0)
    self._config = config
    self._params = params
    self._prompts = prompts
    self.states = [begun(config, spec, **cache_options) for spec in specs]
    self.results: dict[int, tuple[list[int], bytes]] = {}
    self.moved: dict[int, int] = {}
    self._num_submitted = 0
    self._max_pages = None

  def run(self, *, moves: bool, max_pages: int | None = None) -> None:
    """Runs all prompts to their ends; moves sequences after random steps."""
    self._max_pages = max_pages
    num_seqs = len(self._prompts) * SAMPLES
    for turn in itertools.count():
      if len(self.results) == num_seqs:
        return
      self._submit()
      for index in range(len(self.states)):
        self._generate(index)
      if moves:
        self._move()
        if turn % 8 == 0:
          self.check()
      for index in range(len(self.states)):
        self._harvest(index)

  def recomputed(self) -> int:
    """Returns the tokens that any rollout computed again."""
    return sum(int(state.counters.recomputed) for state in self.states)

  def _generate(self, index: int) -> None:
    until = rollout.Until(steps=jnp.int32(self._rng.integers(1, 4)))
    run = _generate(self._config)
    self.states[index] = run(self._params, self.states[index], until)

  def _submit(self) -> None:
    index = int(self._rng.integers(len(self.states)))
    if self._num_submitted == len(self._prompts):
      return
    prompt = self._prompts[self._num_submitted]
    tokens = [[*prompt, *[0] * (PROMPT - len(prompt))]]
    requests = rollout.Requests(
      tokens,
      [len(prompt)],
      sampling=rollout.Sampling(
        temperature=jnp.full((SAMPLES,), _TEMPERATURE, jnp.float32)
      ),
    )
    ids = [self._num_submitted * SAMPLES]
    self.states[index], out = rollout.submit(
      self.states[index], requests, ids=ids
    )
    self._num_submitted += int(out.ok[0])

  def _move(self) -> None:
    """Moves some sequences from one rollout to another."""
    rng = self._rng
    source, target = rng.permutation(len(self.states))[:2].tolist()
    queue = self.states[source].queue
    ids, status = jax.device_get((queue.ids, queue.status))
    present = rng.permutation(ids[status < SequenceStatus.DONE]).tolist()
    # Those that have moved least come first.
    present = sorted(present, key=lambda seq_id: self.moved.get(seq_id, 0))
    present = present[:_AT_ONCE]
    chosen = np.full(_AT_ONCE, -1, np.int32)
    chosen[: len(present)] = present
    self.states[source], exported = rollout.export(
      self.states[source], chosen, max_pages=self._max_pages
    )
    self.states[target], out = rollout.import_sequences(
      self.states[target], exported
    )
    for seq_id, code in zip(chosen.tolist(), out.code.tolist(), strict=True):
      if code == jaxkv.Status.OK:
        self.moved[seq_id] = self.moved.get(seq_id, 0) + 1
    # Where there was no room, it returns.
    back = exported.ok & ~out.ok
    self.states[source], out = rollout.import_sequences(
      self.states[source], exported, mask=back
    )
    assert bool(jnp.all(out.ok == back))

  def _harvest(self, index: int) -> None:
    self.states[index], out = rollout.harvest(self.states[index])
    results = jax.device_get(
      dataclasses.replace(out.results, records=None, experts=None)
    )
    for row in np.flatnonzero(results.valid):
      length = int(results.lengths[row])
      seq_id = int(results.ids[row])
      assert seq_id not in self.results
      self.results[seq_id] = (
        results.tokens[row, :length].tolist(),
        results.log_probs[row, :length].tobytes(),
      )

  def check(self) -> None:
    for state in self.states:
      rollout.check(state)


@functools.cache
def _generate(config) -> Any:
  forward = functools.partial(models.forward, config=config)
  return as_users.jit(functools.partial(rollout.generate, model=forward))
