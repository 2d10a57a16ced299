"""score: computes log-probs of given completions, with a paged cache.

Completions are the given tokens of a rollout that samples nothing.
"""

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import as_key
from jaxkv._src.arrays.arguments import check_bool
from jaxkv._src.arrays.arguments import check_shape
from jaxkv._src.arrays.arguments import check_type
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.engine import schedule
from jaxkv._src.engine.admission.admit import empty_slots
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.counters import init_counters
from jaxkv._src.engine.generate import generate
from jaxkv._src.engine.hooks import Model
from jaxkv._src.engine.hooks import check_model
from jaxkv._src.engine.hooks import vocab_size_of
from jaxkv._src.engine.memory import Memory
from jaxkv._src.engine.memory import check_pools
from jaxkv._src.engine.memory import has_version
from jaxkv._src.engine.pages.preempt import vacate
from jaxkv._src.engine.queue.enqueue import new_queue
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import fail
from jaxkv._src.engine.queue.queue import set_status
from jaxkv._src.engine.queue.requests import Requests
from jaxkv._src.engine.queue.requests import as_extra
from jaxkv._src.engine.queue.requests import check_tokens
from jaxkv._src.engine.slots import init_slots
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.kv.view import Batch
from jaxkv._src.sampling import reductions
from jaxkv._src.sampling.settings import Sampling
from jaxkv._src.sampling.temperature import as_temperature
from jaxkv._src.sampling.temperature import divisor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored(Outcome):
  """Log-probs of G completions, of up to R tokens, of each of N prompts.

  Columns past the end of a completion are 0. The other columns of a failed
  group are NaN, or 0 in `top_tokens`. A completion whose length is out of range
  counts as R tokens long.

  Attributes:
    code: the `Status` of each prompt with its completions.  # int32[N]
    log_probs: the log-prob of each token.  # float32[N, G, R]
    entropy: the entropy in nats of the distribution of each token; None if not
      requested.  # float32[N, G, R]
    top_tokens: the X most likely tokens at each position, most likely first;
      None if not requested.  # int32[N, G, R, X]
    top_log_probs: the log-probs of `top_tokens`.  # float32[N, G, R, X]
    computed_tokens: tokens that the model computed, without padding.  # int32[]
  """

  log_probs: Array
  entropy: Array | None
  top_tokens: Array | None
  top_log_probs: Array | None
  computed_tokens: Array


class _Groups(NamedTuple):
  """The arguments of `score` that have a row for each prompt, as arrays.

  Attributes:
    prompts: int32[N, P].
    prompt_lengths: int32[N].
    completions: int32[N, G, R].
    lengths: int32[N, G].
    salts: uint32[N, 4]; None for no salts.
    extra: a pytree of arrays [N, ...].
  """

  prompts: Array
  prompt_lengths: Array
  completions: Array
  lengths: Array
  salts: Array | None
  extra: Any


def score(
  params: Any,
  state: Any,
  prompts: Array,
  prompt_lengths: Array,
  completions: Array,
  completion_lengths: Array,
  *,
  model: Model,
  temperature: Array | float = 1.0,
  entropy: bool = False,
  top_log_probs: int = 0,
  chunk: int = 256,
  salts: Array | None = None,
  extra: Any = None,
  version: Array | int | None = None,
) -> tuple[Any, Any]:
  """Computes log-probs of G completions of each of N prompts.

  A completion continues from the cached prefix of its prompt. The prompt is
  computed once, and each further completion computes again at most the tokens
  after its last full page. Computed pages become cached, so scoring the samples
  of a rollout costs little more than computing the completions. Without prefix
  caching, each completion computes its prompt.

  The loop is a `while_loop` on the device. Jit `score` with the state donated,
  as `jax.jit(functools.partial(score, model=model), donate_argnums=1)`, so that
  the K/V memory is updated in place. For gradients, call
  `jaxkv.models.grouped_log_probs` instead.

  Scoring uses only empty slots and frees them at the end. Running sequences are
  unchanged, and samples that wait to fork return to the queue.

  After a change of the weights, call `update_weights`, or `jaxkv.new_epoch` for
  the cache of a `Memory`; otherwise pages of the old weights are reused.

  Args:
    params: the model's parameters.
    state: a `RolloutState` between calls of `generate`, or a `Memory`.
    prompts: int32[N, P], padded at the end.
    prompt_lengths: int32[N], 1 .. P, or 0 if all completions of the prompt have
      the length 0.
    completions: int32[N, G, R], padded at the end.
    completion_lengths: int32[N, G], 0 .. R.
    model: see `Model`. In `Batch.rows`, sequences have the numbers and ids
      0 .. N * G - 1. The length in a column includes the column's token, but no
      later token of the completion.
    temperature: float32[], divides the logits before the softmax; 0 means 1.
    entropy: static; True to compute the entropy of each distribution.
    top_log_probs: static; the number of most likely tokens to return.
    chunk: static; a call of the model computes at most `chunk` tokens, plus one
      for each slot.
    salts: uint32[N, 4], see `jaxkv.salt`; None for no salts.
    extra: values of each group for the model, a pytree of arrays [N, ...].
    version: int32[], the version of the weights, as in `init`. If it differs
      from `cache.epoch`, the call raises, or in a traced call all valid groups
      are STALE. None to skip the check.

  Returns:
    The state, and a `Scored` with a code for each group: OK; OUT_OF_PAGES, if
    no slot is empty, or the pool has too few free pages for the prompt and a
    completion; SLOT_FULL, if the prompt and its longest completion, without
    the last token, exceed a slot; BAD_LENGTH, if a length is out of range;
    BAD_LOGITS, if a log-prob is NaN; or STALE. A group that fails has NaN
    log-probs and holds no pages.

  Raises:
    ValueError: an argument is out of range; the cache is not supported, such as
      one with several page sizes; the memory does not fit the cache; or
      `version` is not `cache.epoch`.

  Examples:
    >>> import functools, jax, jaxkv
    >>> import jax.numpy as jnp
    >>> from jaxkv import models, rollout
    >>> config = models.llama(vocab_size=11, num_layers=2, embed_dim=8,
    ...                       num_heads=4, num_kv_heads=2, head_dim=2,
    ...                       mlp_dim=16)
    >>> sizes = jaxkv.CacheConfig(
    ...   num_pages=20, page_size=2, num_slots=4, pages_per_slot=6
    ... )
    >>> state = rollout.Memory(
    ...   cache=jaxkv.init(sizes), kv=models.init_kv(config, sizes)
    ... )
    >>> model = functools.partial(models.forward, config=config)
    >>> scores = jax.jit(
    ...   functools.partial(rollout.score, model=model), donate_argnums=1
    ... )
    >>> params = models.init_params(jax.random.key(0), config)
    >>> group = [[3, 1, 4, 1, 5]], [5], [[[9, 2], [6, 0]]], [[2, 1]]
    >>> group = [jnp.asarray(array, jnp.int32) for array in group]
    >>> state, scored = scores(params, state, *group)
    >>> scored.log_probs.shape, int(scored.computed_tokens)  # Prompt: 4
    ((1, 2, 2), 7)
    >>> state, again = scores(params, state, *group)
    >>> int(again.computed_tokens)
    3
  """
  _check_state(state)
  check_bool("entropy", entropy)
  top_log_probs = as_count("top_log_probs", top_log_probs, 0)
  chunk = as_count("chunk", chunk, 1)
  groups = _as_groups(
    prompts, prompt_lengths, completions, completion_lengths, salts, extra
  )
  vocab_size = vocab_size_of(model)
  check_tokens(
    "prompts", groups.prompts, groups.prompt_lengths, vocab_size=vocab_size
  )
  check_tokens(
    "completions", groups.completions, groups.lengths, vocab_size=vocab_size
  )
  num_prompts, samples, columns = groups.completions.shape
  num_tokens = num_prompts * samples * (groups.prompts.shape[1] + columns)
  config = RolloutConfig(
    max_new_tokens=0,
    prefill_chunk=max(1, min(chunk, num_tokens)),
    # Completions of a prompt wait together until one has computed the prompt.
    window=max(32, 8 * samples),
    entropy=entropy,
    top_log_probs=top_log_probs,
  )
  check_model(model, config)
  if isinstance(state, RolloutState):
    state = _without_waiting_forks(state)
    memory = state.memory
  else:
    memory = state
  is_current = jnp.ones((), bool)
  if version is not None:
    is_current = has_version(memory.cache, version)
  work = _begin(memory, groups, config, is_current)
  # If the temperature is the number 1, the logits are taken as they are.
  if isinstance(temperature, Array) or temperature != 1:
    params = params, divisor(as_temperature(temperature))
    model = functools.partial(_at_temperature, model=model)
  work = generate(params, work, model=model)
  scored = _scored(work, groups)
  memory = work.memory
  if isinstance(state, RolloutState):
    memory = dataclasses.replace(state, memory=memory)
  return memory, scored


def _at_temperature(params: Any, batch: Batch, kv: Any, *, model: Model) -> Any:
  """Calls a model; `params` are its weights and a temperature, float32[]."""
  weights, temperature = params
  logits, kv = model(weights, batch, kv)
  logits = logits.astype(jnp.float32)
  # The maximum is subtracted first, so that division cannot overflow to +inf.
  return (logits - reductions.maxima(logits)[:, None]) / temperature, kv


def _without_waiting_forks(state: RolloutState) -> RolloutState:
  """Returns samples that wait in a slot to fork, without pages, to the queue.

  Only their pages tell which slots of a cache are in use.
  """
  waits = state.slots.leader < state.slots.no_slot
  status = SequenceStatus.WAITING
  queue = set_status(state.queue, state.slots.row, waits, status)
  slots = vacate(state.slots, waits, queue.no_row)
  return dataclasses.replace(state, queue=queue, slots=slots)


def _check_state(state: Any) -> None:
  """Raises unless `score` supports the cache and the memory of `state`."""
  hint = "make a Memory of a cache and its K/V memory"
  expected = "a RolloutState or a Memory"
  check_type("state", state, RolloutState | Memory, expected, hint)
  memory = state.memory if isinstance(state, RolloutState) else state
  check_pools(memory, RolloutConfig(), "state")


def _as_groups(
  prompts: Any,
  prompt_lengths: Any,
  completions: Any,
  completion_lengths: Any,
  salts: Any,
  extra: Any,
) -> _Groups:
  """Returns the arguments as arrays; raises for invalid ones."""
  prompts = as_int32("prompts", prompts, ("N", "P"))
  num_prompts = prompts.shape[0]
  per_prompt = ", one for each prompt"
  prompt_lengths = as_int32(
    "prompt_lengths", prompt_lengths, (num_prompts,), per_prompt
  )
  completions = as_int32(
    "completions", completions, (num_prompts, "G", "R"), per_prompt
  )
  shape = completions.shape[:2]
  lengths = as_int32(
    "completion_lengths", completion_lengths, shape, ", one for each"
  )
  if num_prompts * shape[1] >= 2**31:
    raise ValueError(
      "`completions` must be fewer than 2**31, got "
      f"{num_prompts} * {shape[1]}; score fewer prompts in a call."
    )
  if salts is not None:
    salts = jnp.asarray(as_key("salts", salts))
    check_shape("salts", salts, (num_prompts, hashing.KEY_WORDS), per_prompt)
  return _Groups(
    prompts=jnp.asarray(prompts),
    prompt_lengths=jnp.asarray(prompt_lengths),
    completions=jnp.asarray(completions),
    lengths=jnp.asarray(lengths),
    salts=salts,
    extra=as_extra("extra", extra, num_prompts),
  )


def _begin(
  memory: Memory, groups: _Groups, config: RolloutConfig, is_current: Array
) -> RolloutState:
  """Returns a rollout with a sequence for each completion and its prompt.

  If `is_current`, bool[], is False, other weights computed the cached pages.
  """
  _, samples, columns = groups.completions.shape

  def of_samples(array: Array) -> Array:
    return jnp.repeat(array, samples, axis=0)

  prompt_lengths = of_samples(groups.prompt_lengths)
  lengths = groups.lengths.reshape(-1)
  rows = jnp.arange(lengths.shape[0], dtype=jnp.int32)
  column = jnp.arange(columns, dtype=jnp.int32)[None]
  tokens = jnp.pad(of_samples(groups.prompts), ((0, 0), (0, columns)))
  position = indexing.where_valid(
    column < lengths[:, None], prompt_lengths[:, None] + column
  )
  requests = Requests(
    indexing.put(
      tokens,
      rows[:, None],
      position,
      values=groups.completions.reshape(-1, columns),
    ),
    prompt_lengths + lengths,
    sampling=Sampling(),
    # A first token has no log-prob.
    log_probs_from=jnp.maximum(prompt_lengths, 1),
    salts=None if groups.salts is None else of_samples(groups.salts),
    extra=jax.tree.map(of_samples, groups.extra),
  )
  # Nothing is sampled, so the key does not matter.
  key = jax.random.key(0)
  width = tokens.shape[1]
  queue = new_queue(requests, rows, key, width, memory.cache, memory.kv, config)
  slots = init_slots(memory.cache.config.num_slots, queue)
  code = of_samples(_codes(groups, memory.cache.config.slot_tokens, is_current))
  is_empty = lengths == 0
  # The loop frees no slot of other sequences, so it would never end.
  is_full = ~jnp.any(empty_slots(queue, slots, memory.cache))
  code = first_code(
    (code != Status.OK, code),
    (is_full & ~is_empty, Status.OUT_OF_PAGES),
  )
  done = jnp.int32(SequenceStatus.DONE)
  queue = dataclasses.replace(
    queue, status=jnp.where(is_empty, done, queue.status)
  )
  queue = fail(queue, rows, code != Status.OK, code)
  num_widths = len(schedule.widths(config, records=True))
  return RolloutState(
    config=config,
    queue=queue,
    slots=slots,
    memory=memory,
    key=key,
    counters=init_counters(num_widths, memory.cache.config.num_pools),
  )


def _codes(groups: _Groups, slot_tokens: int, is_current: Array) -> Array:
  """Checks the arguments of each group; returns its `Status`, int32[N]."""
  prompt, lengths = groups.prompt_lengths, groups.lengths
  # For a prompt without samples, `rollout.grouped` returns length 0.
  is_void = (prompt == 0) & jnp.all(lengths == 0, axis=1)
  is_bad = ((prompt < 1) & ~is_void) | (prompt > groups.prompts.shape[1])
  longest = groups.completions.shape[2]
  is_bad |= jnp.any((lengths < 0) | (lengths > longest), axis=1)
  num_tokens = prompt + jnp.max(lengths, axis=1) - 1
  return first_code(
    (is_bad, Status.BAD_LENGTH),
    (num_tokens > slot_tokens, Status.SLOT_FULL),
    (~is_current, Status.STALE),
  )


def _scored(state: RolloutState, groups: _Groups) -> Scored:
  """Returns the results, with NaN for the tokens of failed groups."""
  queue, counters = state.queue, state.counters
  shape = groups.completions.shape
  failed = queue.status == SequenceStatus.FAILED
  code = jnp.where(failed, queue.code, jnp.int32(Status.OK))
  # A failed completion fails its group, because a loss needs the whole group.
  code = jnp.max(code.reshape(shape[:2]), axis=1)
  column = jnp.arange(shape[2], dtype=jnp.int32)[None]
  prompt_lengths = jnp.repeat(groups.prompt_lengths, shape[1])
  position = prompt_lengths[:, None] + column
  row = jnp.arange(queue.size, dtype=jnp.int32)[:, None]
  lengths = groups.lengths[..., None]
  # All columns of a completion with a negative length get NaN.
  is_real = (column[None] < lengths) | (lengths < 0)

  def of_groups(array: Any, failure: float) -> Any:
    if array is None:
      return None
    values = indexing.take(array, row, position)
    values = values.reshape(*shape, *values.shape[2:])
    axes = (1,) * (values.ndim - 3)
    ok = (code == Status.OK).reshape(-1, 1, 1, *axes)
    real = is_real.reshape(*shape, *axes)
    fill = jnp.where(real, failure, 0).astype(values.dtype)
    return jnp.where(ok & real, values, fill)

  records = queue.records
  num_computed = counters.prefilled.low + counters.recomputed.low
  return Scored(
    code=code,
    log_probs=of_groups(queue.log_probs, jnp.nan),
    entropy=of_groups(records.entropy, jnp.nan),
    top_tokens=of_groups(records.top_tokens, 0),
    top_log_probs=of_groups(records.top_log_probs, jnp.nan),
    computed_tokens=num_computed.astype(jnp.int32),
  )
