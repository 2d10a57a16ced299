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
  """Log-probabilities of G completions of each of N prompts.

  A prompt is computed once for all its completions, and what is cached of it
  is not computed at all: P - 1 tokens for a prompt, and as many as it has for
  a completion. What is computed is cached for others. So scoring what a rollout
  has just drawn costs little more than the completions.

  One loop without a host round trip. Call it under `jax.jit`, with the state
  donated so that the K/V memory is updated in place, as
  `jax.jit(functools.partial(score, model=model), donate_argnums=1)`. Outside of
  `jax.jit`, every call compiles it again.

  Not differentiable: `jaxkv.models.grouped_log_probs` is, for the same groups.

  What fails is data: see `Scored.ok`. The numbers of a group that fails are
  NaN, so they do not pass for probabilities of 1.

  Only empty slots are used, and they are empty again afterwards; sequences in
  other slots stay as they are. The completions of a group share the prompt's
  pages in as many slots as are empty, 8 at most, and take turns in them. With
  very few slots or pages they are computed one after another, and the end of
  the prompt, which fills no page, with each of them.

  After a change of the weights, call `update_weights` with a rollout, or
  `jaxkv.new_epoch` with the cache of a `ScoreState`, as before `generate`:
  otherwise pages of the old weights are hit.

  Several models of one kind, such as a policy and its reference, have memories
  of their own: with a tuple of states, `params` is a tuple as long, and a tuple
  of states and a tuple of results come back. Each state needs a cache of its
  own, from another `jaxkv.init`: XLA cannot donate two states that hold the
  same arrays ("donate the same buffer twice").

  Args:
    params: the model's.
    state: a `RolloutState`, between two calls of `generate`; or a `ScoreState`
      where there is no rollout.
    prompts: int32[N, P], padded at the end.
    prompt_lengths: int32[N], 1 .. P; 0 for a group without completions.
    completions: int32[N, G, R], padded at the end.
    completion_lengths: int32[N, G], 0 .. R.
    model: the one that `generate` takes; see `Model`. Its `rows` count
      sequences from 0 to N * G - 1, with the same lengths as when the tokens
      were drawn.
    temperature: float32[]: the distribution is softmax(logits / temperature),
      as `Sampling.temperature` has it; for 0, that at temperature 1.
    entropy: static; whether to compute the entropy of that distribution. That
      of `RolloutConfig.entropy` is at temperature 1.
    top_log_probs: static; how many of its most likely tokens to find. Those of
      `RolloutConfig.top_log_probs` are at temperature 1.
    chunk: static; the most tokens of a call of the model.
    salts: uint32[N, 4], see `jaxkv.salt`; None for no salt.
    user: what the model is to know of each group, a pytree of arrays [N, ...].
    version: int32[], the version of the weights, as for `init`: if the cache is
      of another one, groups are STALE. None to trust the cache.

  Returns:
    The state, and a `Scored` with a code for each group: OK, also for one
    without completions; OUT_OF_PAGES, if no slot is empty, or the pool has too
    few free pages for the prompt and a completion; SLOT_FULL, if those have
    more tokens than a slot; BAD_LENGTH, if a length is out of range; or STALE.
    `ok` says which groups are OK. The others have NaN for their tokens, and
    hold no pages.

  Raises:
    TypeError: an argument has the wrong dtype, or is something else.
    ValueError: an argument has the wrong shape; the cache has a group
      of CrossAttention, or is known to be of another version; the memory is not
      that of the cache; or the model's logits have another shape.

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
  """`score` with one state."""
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
  """Raises unless there is a cache for `score`, and its memory."""
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
  """The arguments as arrays, or refused by name."""
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
  """int32[N]: the statuses of groups before anything is computed."""
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
  """NaN for the tokens of groups that are not OK, and zeros around them."""
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
