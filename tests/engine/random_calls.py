"""Random calls of a rollout's verbs, compared with sequences in plain Python.

A sequence's id, prompt, adapter, added tokens and the weights over time
determine every token that is sampled for it. So each call is checked against a
list of tokens, without slots, pages or other sequences.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import kv as kv_memory
from jaxkv import rollout
from jaxkv.rollout import SequenceStatus
from tests.engine import by_hand

_VOCABULARY, _WIDTH, _LIMIT = 11, by_hand.WIDTH, 24
_SAMPLES, _GROUPS, _PROMPT = 2, 4, 8
_STOP = 3
_RNG = np.random.default_rng(3)
_TOKENS = _RNG.normal(size=(_VOCABULARY, _WIDTH)).astype(np.float32)
_POSITIONS = _RNG.normal(size=(_LIMIT + 8, _WIDTH)).astype(np.float32)
_SCALES = np.asarray([1.0, 1.5], np.float32)  # of two adapters
_FAMILIES = _RNG.integers(4, _VOCABULARY, (3, _PROMPT)).tolist()

CONFIG = rollout.RolloutConfig(
  num_samples=_SAMPLES,
  max_new_tokens=8,
  max_length=_LIMIT,
  stop_token=_STOP,
  prefill_chunk=3,
  admissions=2,
  window=5,
  max_overtaken=3,
  record_experts=True,
)
SIZES = jaxkv.CacheConfig(
  num_pages=22, page_size=2, num_slots=4, pages_per_slot=_LIMIT // 2
)


def model(params, batch, kv):
  """One layer of attention; an adapter scales the embeddings."""
  kv, expert_ids = kv
  adapter = batch.rows.extra["adapter"]
  x = params[batch.tokens] * jnp.asarray(_SCALES)[adapter][None, :, None]
  x = (x + jnp.asarray(_POSITIONS)[batch.positions])[:, :, None]
  used = _experts(params, batch.tokens, batch.positions, adapter[None])
  view = batch.views[0]
  expert_ids = kv_memory.write_expert_ids(expert_ids, view, 0, used[..., None])
  kv = kv_memory.write(kv, view, 0, x, x)
  out = kv_memory.attend(kv, view, 0, x)[0]
  out = out.at[batch.columns].get(mode="clip")
  return jnp.einsum("xhd,vd->xv", out, params), (kv, expert_ids)


def _experts(table: Any, tokens: Any, positions: Any, adapter: Any) -> Any:
  """Returns the expert of each token; it depends on the weights."""
  mark = (abs(table[0, 0]) * np.float32(1000)).astype(np.int32) % 60
  return tokens * 3 + positions * 4 + adapter + mark


@dataclasses.dataclass
class Sequence:
  """The expected state of one sequence.

  Attributes:
    tokens: the tokens so far.
    prompt: the length of the first prompt.
    drawn: the version of the weights that drew each token; -1 if not drawn.
    limit: the length at which the seq ends.
    adapter: 0 or 1.
    finish: a `Finish`.
    ran: the number of tokens with recorded experts.
  """

  tokens: list[int]
  prompt: int
  drawn: list[int]
  limit: int
  adapter: int
  finish: int = 0
  ran: int = 0

  def copy(self) -> "Sequence":
    return dataclasses.replace(self, tokens=[*self.tokens], drawn=[*self.drawn])


class Mismatch(AssertionError):
  """The rollout differs from its sequences in plain Python."""


class Calls:
  """A rollout, and the same sequences in plain Python.

  Attributes:
    state: the rollout.
    sequences: the sequences of the rollout, by id.
    version: the version of the weights.
    done: the number of calls, by verb and code.
    names: the verbs, each as often as it is likely.
  """

  names = ("generate",) * 5 + ("submit",) * 3 + ("extend", "harvest") * 2
  names += "abort", "requeue", "update"

  def __init__(self, seed: int, temperature: float = 1.0, **options):
    self._rng = np.random.default_rng(seed)
    self._temperature = temperature
    self.sequences: dict[int, Sequence] = {}
    self.version, self.next_id = 0, 0
    self.done: dict[str, int] = {}
    self._key = jax.random.key(seed)
    kv = by_hand.poisoned(by_hand.pages(SIZES))
    rows = _GROUPS * _SAMPLES
    self.state = rollout.init(
      jaxkv.init(SIZES, jax.random.key(9)),
      (kv, kv_memory.init_expert_ids(SIZES, num_layers=1, width=1)),
      rollout.Requests(
        np.zeros((_GROUPS, _PROMPT), np.int32),
        np.zeros(_GROUPS, np.int32),
        sampling=rollout.Sampling(temperature=temperature),
        num_samples=np.zeros(_GROUPS, np.int32),
        salts=np.zeros((rows, 4), np.uint32),
        extra={"adapter": np.zeros(rows, np.int32)},
      ),
      self._key,
      dataclasses.replace(CONFIG, **options),
    )
    self._weights = [_TOKENS]
    self._compare("init")

  def step(self) -> None:
    """Makes a random call and checks it."""
    name = self.names[self._rng.integers(len(self.names))]
    if name == "update" and self._rng.random() < 0.7:
      name = "generate"
    getattr(self, f"_{name}")()
    laws = jax.device_get(rollout.check_invariants(self.state))
    broken = [law for law, holds in laws.items() if not holds]
    self._check(not broken, f"{name} broke {broken}")
    self._compare(name)
    self._compare_experts(name)

  def _check(self, holds: bool, message: str) -> None:
    if not holds:
      raise Mismatch(message)

  def _codes(self, name: str, codes: Any, expected: list[int]) -> None:
    codes = np.asarray(codes).tolist()
    self._check(codes == expected, f"{name}: codes {codes}, not {expected}")
    for code in expected:
      key = f"{name} {jaxkv.Status(code).name}"
      self.done[key] = self.done.get(key, 0) + 1

  def _ids(self, count: int) -> list[int]:
    """Returns ids of sequences, a few of them missing or repeated."""
    present = [*self.sequences] or [0]
    ids = [int(self._rng.choice(present)) for _ in range(count)]
    if self._rng.random() < 0.2:
      ids[0] = int(self._rng.integers(-2, self.next_id + 3))
    return ids

  def _mask(self, count: int) -> list[bool]:
    return (self._rng.random(count) < 0.8).tolist()

  def _status(self, seq_id: int) -> int:
    return int(self._statuses()[seq_id])

  def _statuses(self) -> dict[int, int]:
    sequences = jax.device_get((self.state.queue.ids, self.state.queue.status))
    return {
      int(seq_id): int(status)
      for seq_id, status in zip(*sequences, strict=True)
      if status != SequenceStatus.EMPTY
    }

  def _generate(self) -> None:
    params = jnp.asarray(self._weights[self.version])
    until = rollout.Until(steps=int(self._rng.integers(1, 5)))
    self.state = run(params, self.state, until)
    self.done["generate"] = self.done.get("generate", 0) + 1

  def _prompt(self) -> list[int]:
    family = _FAMILIES[self._rng.integers(len(_FAMILIES))]
    shared = int(self._rng.integers(0, _PROMPT + 1))
    suffix = self._rng.integers(4, _VOCABULARY, _PROMPT).tolist()
    length = int(self._rng.integers(1, _PROMPT + 1))
    return [*family[:shared], *suffix[shared:]][:length]

  def _submit(self) -> None:
    rng, rows = self._rng, 2
    prompts = [self._prompt() for _ in range(rows)]
    lengths = [len(prompt) for prompt in prompts]
    if rng.random() < 0.1:
      lengths[0] = int(rng.choice([0, -3, _PROMPT + 1, 2**31 - 1]))
    counts = rng.integers(1, _SAMPLES + 1, rows).tolist()
    if rng.random() < 0.1:
      counts[1] = int(rng.choice([0, -1, _SAMPLES + 1]))
    mask, ids = self._mask(rows), None
    if rng.random() < 0.3:
      ids = rng.integers(-1, self.next_id + 6, rows).tolist()
    adapters = rng.integers(0, 2, rows * _SAMPLES).tolist()
    padded = [[*prompt, *[5] * (_PROMPT - len(prompt))] for prompt in prompts]
    salts = [[adapter, 7, 7, 7] for adapter in adapters]
    requests = rollout.Requests(
      padded,
      lengths,
      num_samples=counts,
      salts=np.asarray(salts, np.uint32),
      extra={"adapter": np.asarray(adapters, np.int32)},
    )
    self.state, out = rollout.submit(self.state, requests, ids=ids, mask=mask)
    self._check_submit(out, prompts, lengths, counts, adapters, ids, mask)

  def _check_submit(
    self, out, prompts, lengths, counts, adapters, ids, mask
  ) -> None:
    status = np.asarray(self._before).reshape(-1, _SAMPLES)
    room = int((status == SequenceStatus.EMPTY).all(axis=1).sum())
    codes, new_ids, asked = [], [], []
    present, upcoming = set(self.sequences), self.next_id
    for row, prompt in enumerate(prompts):
      seq_id = upcoming if ids is None else ids[row]
      overlaps = any(abs(seq_id - other_id) < _SAMPLES for other_id in asked)
      is_used = seq_id < 0 or present & {*range(seq_id, seq_id + _SAMPLES)}
      code = jaxkv.Status.OK
      if not mask[row]:
        code = jaxkv.Status.SKIPPED
      elif lengths[row] != len(prompt) or not 1 <= counts[row] <= _SAMPLES:
        code = jaxkv.Status.BAD_LENGTH
      elif is_used or overlaps:
        code = jaxkv.Status.BAD_SEQUENCE
      elif not room:
        code = jaxkv.Status.QUEUE_FULL
      else:
        room -= 1
        self._add(seq_id, prompt, adapters[row * _SAMPLES :][: counts[row]])
        upcoming += _SAMPLES
      refused = (jaxkv.Status.SKIPPED, jaxkv.Status.BAD_LENGTH)
      if ids is not None and code not in refused and not is_used:
        asked.append(seq_id)
      codes.append(code)
      new_ids.append(seq_id if code == jaxkv.Status.OK else -1)
    self._codes("submit", out.code, codes)
    self._check(out.ids.tolist() == new_ids, f"ids {out.ids}, not {new_ids}")

  def _add(self, seq_id: int, prompt: list[int], adapters: list[int]) -> None:
    self.next_id = max(self.next_id, seq_id + _SAMPLES)
    for sample, adapter in enumerate(adapters):
      self.sequences[seq_id + sample] = Sequence(
        tokens=[*prompt],
        prompt=len(prompt),
        drawn=[-1] * len(prompt),
        limit=len(prompt) + CONFIG.max_new_tokens,
        adapter=adapter,
      )

  def _codes_of(self, ids: list[int], mask: list[bool]) -> list[int | None]:
    """Returns the error code of each row; None if the sequence is present."""
    codes: list[int | None] = []
    for row, seq_id in enumerate(ids):
      repeated = any(mask[n] and ids[n] == seq_id for n in range(row))
      if not mask[row]:
        codes.append(jaxkv.Status.SKIPPED)
      elif repeated or seq_id not in self.sequences:
        codes.append(jaxkv.Status.BAD_SEQUENCE)
      else:
        codes.append(None)
    return codes

  def _abort(self) -> None:
    ids, mask = self._ids(2), self._mask(2)
    codes, status = self._codes_of(ids, mask), self._statuses()
    for row, seq_id in enumerate(ids):
      if codes[row] is None and status[seq_id] >= SequenceStatus.DONE:
        codes[row] = jaxkv.Status.ENDED
      elif codes[row] is None:
        codes[row] = jaxkv.Status.OK
        self.sequences[seq_id].finish = rollout.Finish.ABORTED
    self.state, out = rollout.abort(self.state, ids, mask=mask)
    self._codes("abort", out.code, codes)

  def _requeue(self) -> None:
    ids, mask = self._ids(2), self._mask(2)
    codes, status = self._codes_of(ids, mask), self._statuses()
    for row, seq_id in enumerate(ids):
      if codes[row] is None:
        ended = status[seq_id] >= SequenceStatus.DONE
        codes[row] = jaxkv.Status.ENDED if ended else jaxkv.Status.OK
    self.state, out = rollout.requeue(self.state, ids, mask=mask)
    self._codes("requeue", out.code, codes)
    status = self._statuses()
    for row, seq_id in enumerate(ids):
      if codes[row] == jaxkv.Status.OK:
        self._check(status[seq_id] == SequenceStatus.WAITING, f"{seq_id} runs")

  def _extend(self) -> None:
    rng, columns = self._rng, 4
    ids, mask = self._ids(2), self._mask(2)
    tokens = rng.integers(0, _VOCABULARY, (2, columns)).tolist()
    lengths = rng.integers(0, columns + 1, 2).tolist()
    budget = rng.integers(1, 7, 2).tolist() if rng.random() < 0.7 else None
    if rng.random() < 0.1:
      lengths[0] = int(rng.choice([-1, columns + 1, 2**31 - 1]))
    if budget is not None and rng.random() < 0.1:
      budget[1] = int(rng.choice([0, -5, 2**31 - 1]))
    codes, status = self._codes_of(ids, mask), self._statuses()
    for row, seq_id in enumerate(ids):
      if codes[row] is not None:
        continue
      seq = self.sequences[seq_id]
      room = CONFIG.max_new_tokens if budget is None else budget[row]
      if status[seq_id] == SequenceStatus.FAILED:
        codes[row] = jaxkv.Status.ENDED
      elif (
        not 0 <= lengths[row] <= columns
        or room < 1
        or len(seq.tokens) + lengths[row] + room > _LIMIT
      ):
        codes[row] = jaxkv.Status.BAD_LENGTH
      else:
        codes[row] = jaxkv.Status.OK
        addition = tokens[row][: lengths[row]]
        seq.tokens += addition
        seq.drawn += [-1] * len(addition)
        seq.limit = len(seq.tokens) + room
        seq.finish = 0
    self.state, out = rollout.extend(
      self.state, ids, tokens, lengths, max_tokens=budget, mask=mask
    )
    self._codes("extend", out.code, codes)

  def _ended_ids(self, groups: bool) -> set[int]:
    """Returns the ids of sequences that can be harvested."""
    ids, status = jax.device_get(
      (self.state.queue.ids, self.state.queue.status)
    )
    ended = (SequenceStatus.DONE, SequenceStatus.FAILED)
    is_ready = np.isin(status, ended)
    if groups:
      whole = (status.reshape(-1, _SAMPLES) >= SequenceStatus.DONE).all(axis=1)
      is_ready &= np.repeat(whole, _SAMPLES)
    return set(ids[is_ready].tolist())

  def _harvest(self) -> None:
    groups = bool(self._rng.random() < 0.5)
    expected = self._ended_ids(groups)
    if self._rng.random() < 0.3:
      self.state, out = rollout.harvest(self.state, whole_prompts=groups)
      ok = np.asarray(out.code) == jaxkv.Status.OK
      ended = set(np.asarray(self._ids_before)[ok].tolist())
      self._check(ended == expected, f"harvested {ended}, not {expected}")
    else:
      ids, mask = self._ids(3), self._mask(3)
      codes = self._codes_of(ids, mask)
      for row, seq_id in enumerate(ids):
        if codes[row] is None:
          code = "OK" if seq_id in expected else "UNFINISHED"
          codes[row] = jaxkv.Status[code]
      self.state, out = rollout.harvest(
        self.state, ids, mask=mask, whole_prompts=groups
      )
      self._codes("harvest", out.code, codes)
      pairs = zip(ids, codes, strict=True)
      ended = {seq_id for seq_id, code in pairs if code == jaxkv.Status.OK}
    self._check_results(out)
    for seq_id in ended:
      del self.sequences[seq_id]

  def _check_results(self, out) -> None:
    results = jax.device_get(out.results)
    for row in np.flatnonzero(results.valid):
      seq_id = int(results.ids[row])
      seq = self.sequences[seq_id]
      length = int(results.lengths[row])
      self._check(
        results.tokens[row, :length].tolist() == seq.tokens
        and results.mask[row].tolist()
        == [*(mark >= 0 for mark in seq.drawn), *[False] * (_LIMIT - length)]
        and results.finish[row] == seq.finish,
        f"{seq_id} was harvested as {results.tokens[row]}",
      )

  def _update(self) -> None:
    how = "drop" if self._rng.random() < 0.3 else "recompute"
    status = self._statuses()
    self.state = rollout.update_weights(self.state, how)
    self.version += 1
    noise = self._rng.normal(size=_TOKENS.shape).astype(np.float32)
    self._weights.append(_TOKENS + noise * np.float32(0.3))
    for seq_id, seq in self.sequences.items():
      if how == "drop" and status[seq_id] < SequenceStatus.DONE:
        seq.tokens = seq.tokens[: seq.prompt]
        seq.drawn = seq.drawn[: seq.prompt]
        seq.ran = 0
        seq.limit = seq.prompt + CONFIG.max_new_tokens
    self.done[f"weights {how}"] = self.done.get(f"weights {how}", 0) + 1

  def _compare(self, name: str) -> None:
    """Checks the tokens of all sequences, and appends the sampled ones."""
    left_out = {"keys": None, "records": None, "log_probs": None}
    rows = jax.device_get(dataclasses.replace(self.state.queue, **left_out))
    self._before, self._ids_before = rows.status, rows.ids
    row_of = {
      int(rows.ids[row]): row
      for row in np.flatnonzero(rows.status != SequenceStatus.EMPTY)
    }
    self._check(
      row_of.keys() == self.sequences.keys(),
      f"after {name} there are {row_of.keys()}, not {self.sequences.keys()}",
    )
    for seq_id, row in row_of.items():
      seq, length = self.sequences[seq_id], int(rows.length[row])
      tokens = rows.tokens[row, :length].tolist()
      for token in tokens[len(seq.tokens) :]:
        self._check(seq.finish == 0, f"{seq_id} went on after its end")
        self._check_draw(seq_id, seq, token)
        seq.tokens.append(token)
        seq.drawn.append(self.version)
        if token == _STOP:
          seq.finish = int(rollout.Finish.STOP_TOKEN)
        elif len(seq.tokens) == seq.limit:
          seq.finish = int(rollout.Finish.LENGTH)
      self._check(tokens == seq.tokens, f"{seq_id}: {tokens}, not {seq.tokens}")
      self._check(
        rows.versions[row, :length].tolist() == seq.drawn
        and int(rows.finish[row]) == seq.finish
        and int(rows.limit[row]) == seq.limit,
        f"{seq_id} after {name}: {rows.finish[row]}, {rows.limit[row]}",
      )

  def _compare_experts(self, name: str) -> None:
    """Checks recorded experts: never lost, and complete at the end."""
    results = jax.device_get(rollout.generated(self.state))
    for row in np.flatnonzero(results.valid):
      seq_id, experts = int(results.ids[row]), results.experts[row, :, 0, 0]
      seq = self.sequences[seq_id]
      ran = int(np.sum(experts >= 0))
      whole = 0 < seq.finish < rollout.Finish.ABORTED
      minimum = len(seq.tokens) - 1 if whole else seq.ran
      self._check(
        minimum <= ran < len(seq.tokens) and np.all(experts[ran:] == -1),
        f"after {name} {seq_id} has experts {experts}, of {minimum} at least",
      )
      seq.ran = ran
      where = np.asarray(seq.tokens[:ran], int), np.arange(ran), seq.adapter
      expected = np.stack([_experts(x, *where) for x in self._weights])
      # Before the end, experts may be those of older weights; then, they are
      # those of the next token's log-prob, or of the last weights.
      if whole:
        drawn = np.asarray(seq.drawn[1:])
        versions = np.where(drawn < 0, drawn[-1], drawn)
        expected = expected[versions, np.arange(ran)][None]
      holds = bool(np.all(np.any(expected == experts[:ran], axis=0)))
      self._check(holds, f"{seq_id} after {name}: {experts}, not {expected}")

  def _check_draw(self, seq_id: int, seq: Sequence, token: int) -> None:
    """Checks a draw: one uniform selects a block of four, another the token."""
    table = self._weights[self.version].astype(np.float64)
    x = table[seq.tokens] * _SCALES[seq.adapter] + _POSITIONS[: len(seq.tokens)]
    scores = x @ x[-1] / _WIDTH**0.5
    weights = np.exp(scores - scores.max())
    logits = table @ (weights @ x / weights.sum()) / self._temperature
    chances = np.exp(logits - logits.max())
    chances /= chances.sum()
    uniforms = _uniforms(self._key, seq_id, len(seq.tokens) - seq.prompt)
    sums = np.add.reduceat(chances, np.arange(0, _VOCABULARY, 4))
    block, index = divmod(token, 4)
    low, high = sums[:block].sum(), sums[: block + 1].sum()
    block_chances = chances[4 * block : 4 * block + 4] / sums[block]
    tolerance = 1e-5  # Float32 sums in another order.
    self._check(
      low - tolerance <= uniforms[0] <= high + tolerance
      and block_chances[:index].sum() - tolerance
      <= uniforms[1]
      <= block_chances[: index + 1].sum() + tolerance,
      f"{seq_id} drew {token} after {seq.tokens}",
    )


@jax.jit
def run(params, state, until):
  return rollout.generate(params, state, until, model=model)


@jax.jit
def _bits(key, seq_id, count):
  key = jax.random.fold_in(jax.random.fold_in(key, seq_id), count)
  return jax.random.bits(key, (2,), jnp.uint32)


def _uniforms(key, seq_id: int, count: int) -> np.ndarray:
  return (np.asarray(_bits(key, seq_id, count)) >> 8) / 2.0**24
