"""score: log-probabilities of completions, through the cache of a rollout."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax
from jax.core import Tracer

from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import as_key
from jaxkv._src.arrays.arguments import check_bool
from jaxkv._src.arrays.arguments import check_shape
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.rollout.checks import as_version
from jaxkv._src.rollout.checks import check_pools
from jaxkv._src.rollout.config import RolloutConfig
from jaxkv._src.rollout.model import Model
from jaxkv._src.rollout.model import check_model
from jaxkv._src.rollout.scoring.calls import compute
from jaxkv._src.rollout.scoring.group import Group
from jaxkv._src.rollout.scoring.group import Turn
from jaxkv._src.rollout.scoring.group import is_under_way
from jaxkv._src.rollout.scoring.group import start
from jaxkv._src.rollout.scoring.group import step
from jaxkv._src.rollout.scoring.group import widths_of
from jaxkv._src.rollout.scoring.group import with_group
from jaxkv._src.rollout.scoring.scored import Given
from jaxkv._src.rollout.scoring.scored import Scored
from jaxkv._src.rollout.scoring.scored import ScoreState
from jaxkv._src.rollout.scoring.scored import nothing_scored
from jaxkv._src.rollout.state import RolloutState
from jaxkv._src.rollout.state import as_user
from jaxkv._src.sampling.temperature import as_temperature


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
  user: Any = None,
  version: Array | int | None = None,
) -> tuple[Any, Any]:
  """Computes log-probs of G completions of each of N prompts.

  A prompt is computed once for all its completions, and only beyond its cached
  prefix; computed pages are cached. So scoring a rollout's own samples costs
  little more than the completions.

  One loop without host round trips. Jit it with the state donated, as
  `jax.jit(functools.partial(score, model=model), donate_argnums=1)`, so that
  the K/V memory is updated in place. Not differentiable;
  `jaxkv.models.grouped_log_probs` is.

  Uses empty slots only, and frees them afterwards; running sequences are
  unchanged. Up to 8 completions share their prompt's pages at a time. If slots
  or pages are scarce, completions are computed one by one, and each recomputes
  the end of the prompt, which fills no page.

  After a change of the weights, call `update_weights`, or `jaxkv.new_epoch` for
  the cache of a `ScoreState`; otherwise pages of the old weights are hit.

  To score with several models, such as a policy and its reference, pass tuples
  of `params` and `state`; states and results are then tuples too. Each state
  needs a separate cache and memory, because XLA cannot donate a buffer twice.

  Args:
    params: the model's parameters.
    state: a `RolloutState` between calls of `generate`, or a `ScoreState`.
    prompts: int32[N, P], padded at the end.
    prompt_lengths: int32[N], 1 .. P; 0 for a group without completions.
    completions: int32[N, G, R], padded at the end.
    completion_lengths: int32[N, G], 0 .. R.
    model: see `Model`. Its `rows` number the sequences 0 .. N * G - 1, with the
      same lengths as during sampling.
    temperature: float32[]: the distribution is softmax(logits / temperature); 0
      means temperature 1.
    entropy: static; whether to compute the distribution's entropy.
    top_log_probs: static; the number of most likely tokens to return.
    chunk: static; the maximum number of tokens in a call of the model.
    salts: uint32[N, 4], see `jaxkv.salt`; None for no salts.
    user: values of each group for the model, a pytree of arrays [N, ...].
    version: int32[], the version of the weights, as in `init`; groups are STALE
      if the cache has another one. None to skip the check.

  Returns:
    The state, and a `Scored` with a code for each group: OK; OUT_OF_PAGES, if
    no slot is empty, or the pool has too few free pages for the prompt and a
    completion; SLOT_FULL, if both exceed a slot; BAD_LENGTH, if a length is out
    of range; or STALE. A group that fails has NaN log-probs and holds no pages.

  Raises:
    TypeError: an argument has the wrong type or dtype.
    ValueError: an argument or the logits have the wrong shape; the cache has a
      CrossAttention group or is known to have another version; or the memory
      does not fit the cache.

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
    >>> state = rollout.ScoreState(
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
    >>> scored.log_probs.shape, scored.computed_tokens.tolist()  # 4 + 2 + 1
    ((1, 2, 2), [7])
    >>> state, again = scores(params, state, *group)
    >>> again.cached_tokens.tolist(), again.computed_tokens.tolist()
    ([4], [3])
  """
  options = {
    "model": model,
    "temperature": temperature,
    "entropy": entropy,
    "top_log_probs": top_log_probs,
    "chunk": chunk,
    "salts": salts,
    "user": user,
    "version": version,
  }
  groups = prompts, prompt_lengths, completions, completion_lengths
  if not isinstance(state, tuple):
    return _score(params, state, *groups, **options)
  if not isinstance(params, tuple | list) or len(params) != len(state):
    found = type(params).__name__
    if isinstance(params, tuple | list):
      found += f" of {len(params)}"
    raise ValueError(
      f"`params` must be a tuple of {len(state)}, one for each state, got a "
      f"{found}."
    )
  results = [
    _score(own, one, *groups, **options)
    for own, one in zip(params, state, strict=True)
  ]
  return tuple(one for one, _ in results), tuple(out for _, out in results)


def _score(
  params: Any,
  state: Any,
  prompts: Array,
  prompt_lengths: Array,
  completions: Array,
  completion_lengths: Array,
  *,
  model: Model,
  temperature: Array | float,
  entropy: bool,
  top_log_probs: int,
  chunk: int,
  salts: Array | None,
  user: Any,
  version: Array | int | None,
) -> tuple[Any, Scored]:
  """Scores with one state."""
  _check_state(state)
  check_model(model)
  check_bool("entropy", entropy)
  given = _given(
    state,
    prompts,
    prompt_lengths,
    completions,
    completion_lengths,
    temperature,
    salts,
    user,
  )
  stale = jnp.zeros((), bool)
  if version is not None:
    stale = ~as_version(state.cache, version)
  scored = nothing_scored(
    given,
    _codes(given, state.cache.config.slot_tokens, stale),
    entropy=entropy,
    top_log_probs=as_count("top_log_probs", top_log_probs, 0),
  )
  params, cache, kv, scored, given = sharding.match_varying_axes(
    (params, state.cache, state.kv, scored, given)
  )
  widths = widths_of(given, cache, as_count("chunk", chunk, 1))

  def called(group: Group, turn: Turn) -> Group:
    return compute(params, group, turn, given, widths, model=model)

  def one(number: Array, group: Group) -> Group:
    return lax.while_loop(
      is_under_way,
      lambda group: step(group, given, widths, called),
      with_group(group, number, given),
    )

  group = sharding.match_varying_axes(start(cache, kv, scored, given))
  group = lax.fori_loop(0, given.prompts.shape[0], one, group)
  state = dataclasses.replace(state, cache=group.cache, kv=group.kv)
  return state, _without_failed(group.scored, given)


def _check_state(state: Any) -> None:
  """Raises unless `state` has a cache and a memory that `score` can use."""
  if not isinstance(state, RolloutState | ScoreState):
    what = "make a ScoreState of a cache and its memory"
    if isinstance(state, list):
      what = "use a tuple"
    raise TypeError(
      "`state` must be a RolloutState, a ScoreState or a tuple of them, got "
      f"{type(state).__name__}; {what}."
    )
  # A memory that a rollout may use, whatever its options are.
  check_pools(state.cache, state.kv, RolloutConfig())


def _given(
  state: RolloutState | ScoreState,
  prompts: Any,
  prompt_lengths: Any,
  completions: Any,
  completion_lengths: Any,
  temperature: Any,
  salts: Any,
  user: Any,
) -> Given:
  """Returns the arguments as arrays; raises for invalid ones."""
  prompts = as_int32("prompts", prompts)
  prompt_lengths = as_int32("prompt_lengths", prompt_lengths)
  completions = as_int32("completions", completions)
  lengths = as_int32("completion_lengths", completion_lengths)
  check_shape("prompts", prompts, ("N", "P"))
  groups = prompts.shape[0]
  each = ", one for each prompt"
  check_shape("prompt_lengths", prompt_lengths, (groups,), each)
  check_shape("completions", completions, (groups, "G", "R"), each)
  wanted = completions.shape[:2]
  check_shape("completion_lengths", lengths, wanted, ", one for each")
  if groups * wanted[1] >= 2**31:
    raise ValueError(
      "`completions` must be fewer than 2**31, got "
      f"{groups} * {wanted[1]}; score fewer prompts in a call."
    )
  if salts is not None:
    salts = jnp.asarray(as_key("salts", salts))
    check_shape("salts", salts, (groups, hashing.KEY_WORDS), each)
  busy = jnp.zeros((state.cache.config.num_slots,), bool)
  if isinstance(state, RolloutState):
    # A sequence that has just entered may hold no page yet.
    busy = state.running < state.sequences.length.shape[0]
  heat = as_temperature(temperature)
  plain = (
    not isinstance(temperature, Tracer) and float(np.asarray(temperature)) == 1
  )
  return Given(
    prompts=jnp.asarray(prompts),
    prompt_lengths=jnp.asarray(prompt_lengths),
    completions=jnp.asarray(completions),
    lengths=jnp.asarray(lengths),
    salts=salts,
    user=as_user(user, groups, each="prompt"),
    busy=busy,
    temperature=None if plain else heat,
  )


def _codes(given: Given, slot_tokens: int, stale: Array) -> Array:
  """Returns the statuses of groups before any computation, int32[N]."""
  prompt, lengths = given.prompt_lengths, given.lengths
  most = given.prompts.shape[1], given.completions.shape[2]
  # `grouped` gives such a group where a prompt has no samples.
  empty = (prompt == 0) & jnp.all(lengths == 0, axis=1)
  bad = ((prompt < 1) & ~empty) | (prompt > most[0])
  bad |= jnp.any((lengths < 0) | (lengths > most[1]), axis=1)
  # The last token of a completion is never computed.
  total = prompt + jnp.max(lengths, axis=1) - 1
  return first_code(
    (bad, Status.BAD_LENGTH),
    (total > slot_tokens, Status.SLOT_FULL),
    (stale, Status.STALE),
  )


def _without_failed(scored: Scored, given: Given) -> Scored:
  """Sets the tokens of failed groups to NaN, and their padding to 0."""
  column = jnp.arange(given.completions.shape[2], dtype=jnp.int32)[None, None]
  lengths = given.lengths[..., None]
  # Of a length that is out of range, nobody knows which columns are real.
  real = (column < lengths) | (lengths < 0)

  def cleared(array: Array | None, failed: float) -> Array | None:
    if array is None:
      return None
    more = (1,) * (array.ndim - 3)
    ok = scored.ok.reshape(-1, 1, 1, *more)
    fill = jnp.where(real, failed, 0).astype(array.dtype)
    return jnp.where(ok, array, fill.reshape(*real.shape, *more))

  return dataclasses.replace(
    scored,
    log_probs=cleared(scored.log_probs, jnp.nan),
    entropy=cleared(scored.entropy, jnp.nan),
    top_tokens=cleared(scored.top_tokens, 0),
    top_log_probs=cleared(scored.top_log_probs, jnp.nan),
  )
