"""score: computes log-probs of given completions, with a paged cache."""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
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
from jaxkv._src.engine.admit import empty_slots
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.counters import init_counters
from jaxkv._src.engine.enqueue import new_queue
from jaxkv._src.engine.given_answers import AnswerCounts
from jaxkv._src.engine.given_answers import Scoring
from jaxkv._src.engine.hooks import Model
from jaxkv._src.engine.hooks import check_model
from jaxkv._src.engine.hooks import vocab_size_of
from jaxkv._src.engine.memory import Memory
from jaxkv._src.engine.memory import check_pools
from jaxkv._src.engine.memory import has_version
from jaxkv._src.engine.queue import SequenceStatus
from jaxkv._src.engine.queue import fail
from jaxkv._src.engine.requests import Requests
from jaxkv._src.engine.requests import as_extra
from jaxkv._src.engine.requests import check_tokens
from jaxkv._src.engine.run_steps import run_steps
from jaxkv._src.engine.schedule import Width
from jaxkv._src.engine.slots import init_slots
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import is_done
from jaxkv._src.engine.step import Buffers
from jaxkv._src.engine.step import no_bad_rows
from jaxkv._src.engine.step import step
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
    computed_tokens: tokens that the model computed for each group, without
      padding.  # int32[N]
    cached_tokens: tokens of each group that lookups found in the cache. If
      slots or pages are scarce, a group is looked up several times, and the
      tokens of all lookups are added. After a preemption a lookup can also find
      tokens of a completion.  # int32[N]
  """

  log_probs: Array
  entropy: Array | None
  top_tokens: Array | None
  top_log_probs: Array | None
  computed_tokens: Array
  cached_tokens: Array


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

  The model computes each prompt once for all of its completions, and skips its
  cached prefix. Computed pages become cached. So scoring the samples of a
  rollout costs little more than computing the completions.

  The loop is a `while_loop` on the device. Jit `score` with the state donated,
  as `jax.jit(functools.partial(score, model=model), donate_argnums=1)`, so that
  the K/V memory is updated in place. For gradients, call
  `jaxkv.models.grouped_log_probs` instead.

  Scoring uses only empty slots and frees them at the end. Running sequences are
  unchanged. Completions share the pages of their prompt. If only one slot is
  empty, or pages are scarce, completions may recompute tokens of the prompt.

  After a change of the weights, call `update_weights`, or `jaxkv.new_epoch` for
  the cache of a `Memory`; otherwise pages of the old weights are reused.

  To score with several models, such as a policy and its reference, pass tuples
  of `params` and `state`; states and results are then tuples too. Each state
  needs a separate cache and memory, because XLA cannot donate a buffer twice.

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
    >>> scored.log_probs.shape, scored.computed_tokens.tolist()  # Prompt: 4
    ((1, 2, 2), [7])
    >>> state, again = scores(params, state, *group)
    >>> again.cached_tokens.tolist(), again.computed_tokens.tolist()
    ([4], [3])
  """
  is_single = not isinstance(state, tuple)
  if not is_single:
    _check_params(params, len(state))
  all_params, states = ((params,), (state,)) if is_single else (params, state)
  for target in states:
    _check_state(target)
  check_bool("entropy", entropy)
  top_log_probs = as_count("top_log_probs", top_log_probs, 0)
  chunk = as_count("chunk", chunk, 1)
  groups = _as_groups(
    prompts, prompt_lengths, completions, completion_lengths, salts, extra
  )
  _, samples, columns = groups.completions.shape
  config = RolloutConfig(
    num_samples=samples,
    max_new_tokens=columns,
    prefill_chunk=chunk,
    # All samples of a prompt can be admitted in one step, and then fork.
    admissions=max(samples, 16),
    window=max(samples, 32),
    entropy=entropy,
    top_log_probs=top_log_probs,
  )
  check_model(model, config)
  vocab_size = vocab_size_of(model)
  check_tokens(
    "prompts", groups.prompts, groups.prompt_lengths, vocab_size=vocab_size
  )
  check_tokens(
    "completions", groups.completions, groups.lengths, vocab_size=vocab_size
  )
  scoring = Scoring(
    widths=_widths(groups, chunk),
    temperature=divisor(as_temperature(temperature)),
  )
  results = [
    _score(weights, target, groups, config, scoring, model, version)
    for weights, target in zip(all_params, states, strict=True)
  ]
  if is_single:
    return results[0]
  return tuple(state for state, _ in results), tuple(out for _, out in results)


def _check_params(params: Any, count: int) -> None:
  """Raises ValueError unless `params` has one entry for each state."""
  if isinstance(params, tuple | list) and len(params) == count:
    return
  type_name = type(params).__name__
  if isinstance(params, tuple | list):
    type_name += f" of {len(params)}"
  raise ValueError(
    f"`params` must be a tuple of {count}, one for each state, got a "
    f"{type_name}."
  )


def _score(
  params: Any,
  state: Any,
  groups: _Groups,
  config: RolloutConfig,
  scoring: Scoring,
  model: Model,
  version: Array | int | None,
) -> tuple[Any, Scored]:
  """Computes the result of `score` for one state."""
  memory = state.memory if isinstance(state, RolloutState) else state
  is_current = jnp.ones((), bool)
  if version is not None:
    is_current = has_version(memory.cache, version)
  busy = jnp.zeros((memory.cache.config.num_slots,), bool)
  if isinstance(state, RolloutState):
    # A slot without pages is in use if its sequence waits to fork.
    busy = state.slots.row < state.queue.no_row
  work = _begin(memory, groups, config, busy, is_current)
  is_usable = empty_slots(work.queue, work.slots, memory.cache)
  num_usable = jnp.sum(is_usable, dtype=jnp.int32)
  # The loop frees no slot of other sequences, so it would never end.
  is_full = num_usable == 0
  rows = jnp.arange(work.queue.size, dtype=jnp.int32)
  waits = work.queue.status == SequenceStatus.WAITING
  code = jnp.full_like(rows, Status.OUT_OF_PAGES)
  queue = fail(work.queue, rows, waits & is_full, code)
  work = dataclasses.replace(work, queue=queue)
  counts = jnp.zeros((2, groups.completions.shape[0]), jnp.int32)
  buffers = Buffers(
    answers=AnswerCounts(counts[0], counts[1], num_usable > 1),
    bad_rows=no_bad_rows(work),
  )
  params, work, temperature, buffers = sharding.match_varying_axes(
    (params, work, scoring.temperature, buffers)
  )
  scoring = scoring._replace(temperature=temperature)
  work, buffers = run_steps(
    lambda state: ~is_done(state),
    lambda loop: step(params, *loop, model=model, scoring=scoring),
    work,
    buffers,
  )
  scored = _scored(work, groups, buffers)
  memory = work.memory
  if isinstance(state, RolloutState):
    memory = dataclasses.replace(state, memory=memory)
  return memory, scored


def _check_state(state: Any) -> None:
  """Raises unless `score` supports the cache and the memory of `state`."""
  is_list = isinstance(state, list)
  hint = "make a Memory of a cache and its K/V memory"
  if is_list:
    hint = "use a tuple"
  expected = "a RolloutState, a Memory or a tuple of them"
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


def _widths(groups: _Groups, chunk: int) -> tuple[Width, Width]:
  """Returns the widths for prompts and for completions, limited to `chunk`."""
  num_prompts, columns = groups.prompts.shape
  prompt = min(chunk, max(num_prompts * (columns - 1), 1))
  return Width(0, prompt), Width(0, min(chunk, groups.completions.size))


def _begin(
  memory: Memory,
  groups: _Groups,
  config: RolloutConfig,
  busy: Array,
  is_current: Array,
) -> RolloutState:
  """Returns a rollout whose sequences are prompts with their completions.

  Scoring must not use slots in `busy`, bool[B]. If `is_current`, bool[], is
  False, other weights computed the cached pages.
  """
  num_prompts, samples, columns = groups.completions.shape
  width = groups.prompts.shape[1] + columns

  def of_samples(array: Array) -> Array:
    return jnp.repeat(array, samples, axis=0)

  requests = Requests(
    groups.prompts,
    groups.prompt_lengths,
    sampling=Sampling(),
    salts=None if groups.salts is None else of_samples(groups.salts),
    extra=jax.tree.map(of_samples, groups.extra),
  )
  ids = jnp.arange(num_prompts, dtype=jnp.int32) * samples
  # Nothing is sampled, so the key does not matter.
  key = jax.random.key(0)
  queue = new_queue(requests, ids, key, width, memory.cache, memory.kv, config)
  code = of_samples(_codes(groups, memory.cache.config.slot_tokens, is_current))
  lengths = groups.lengths.reshape(-1)
  column = jnp.arange(columns, dtype=jnp.int32)[None]
  exists = (column < lengths[:, None]) & (code == Status.OK)[:, None]
  rows = jnp.arange(queue.size, dtype=jnp.int32)[:, None]
  position = indexing.where_valid(exists, queue.prompt_length[:, None] + column)
  answers = groups.completions.reshape(-1, columns)
  status = jnp.where(
    lengths > 0,
    jnp.int32(SequenceStatus.WAITING),
    jnp.int32(SequenceStatus.DONE),
  )
  failed = jnp.int32(SequenceStatus.FAILED)
  queue = dataclasses.replace(
    queue,
    tokens=indexing.put(queue.tokens, rows, position, values=answers),
    # The last token is never an input of the model.
    length=queue.prompt_length + lengths - 1,
    status=jnp.where(code == Status.OK, status, failed),
    code=code,
  )
  slots = init_slots(busy.shape[0], queue)
  # The row `no_row + 1` makes a slot count as neither running nor empty.
  row = jnp.where(busy, queue.no_row + 1, slots.row)
  return RolloutState(
    config=config,
    queue=queue,
    slots=dataclasses.replace(slots, row=row),
    memory=memory,
    key=key,
    counters=init_counters(2, memory.cache.config.num_pools),
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


def _scored(state: RolloutState, groups: _Groups, buffers: Buffers) -> Scored:
  """Returns the results, with NaN for the tokens of failed groups."""
  queue, answers = state.queue, buffers.answers
  assert answers is not None
  shape = groups.completions.shape
  failed = queue.status == SequenceStatus.FAILED
  code = jnp.where(failed, queue.code, jnp.int32(Status.OK))
  # A failed completion fails its group, because a loss needs the whole group.
  code = jnp.max(code.reshape(shape[:2]), axis=1)
  column = jnp.arange(shape[2], dtype=jnp.int32)[None]
  position = queue.prompt_length[:, None] + column
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
  return Scored(
    code=code,
    log_probs=of_groups(queue.log_probs, jnp.nan),
    entropy=of_groups(records.entropy, jnp.nan),
    top_tokens=of_groups(records.top_tokens, 0),
    top_log_probs=of_groups(records.top_log_probs, jnp.nan),
    computed_tokens=answers.computed,
    cached_tokens=answers.cached,
  )
