"""check_model: compares a model with its own pass without a cache."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.hooks import Model
from jaxkv._src.kv.view import Batch
from jaxkv._src.sampling.settings import Sampling
from jaxkv._src.service import prompts as prompt_arrays
from jaxkv._src.service import served_model
from jaxkv._src.service.engine import Engine

_LONGEST = 48
_NUM_PROMPTS = 4


class _Sequences(NamedTuple):
  """Random sequences, and the log-probs of their tokens without a cache.

  Attributes:
    tokens: lists of tokens, the first of which is the longest.
    log_probs: float32[L - 1] for each list of L tokens.
  """

  tokens: list[np.ndarray]
  log_probs: list[np.ndarray]


class _Case(NamedTuple):
  """A comparison of log-probs that an engine computed in one way.

  Attributes:
    name: a name for the error.
    num_wrong: the number of tokens whose log-probs differ.
    num_tokens: the number of all tokens.
    largest: the largest difference.
  """

  name: str
  num_wrong: int
  num_tokens: int
  largest: float


def check_model(
  params: Any,
  model: Model,
  uncached: Callable[..., Any],
  cache: CacheConfig,
  *,
  init_kv: Callable[[CacheConfig], Any] | None = None,
  longest: int | None = None,
  tolerance: float | None = None,
) -> None:
  """Raises unless a model computes what it computes without a cache.

  Call it once for each model of your own: a wrong position or mask raises no
  error, and only changes what is sampled. Prompts in several chunks, prompts
  with a cached start, and sampled tokens are compared, several sequences in a
  call. This compiles for about a minute.

  Args:
    params: the model's parameters.
    model: see `Model`.
    uncached: returns the logits [B, T, V] of `params`, tokens int32[B, T] and
      positions int32[B, T], where padding follows the tokens of a row, such as
      `functools.partial(jaxkv.models.forward_uncached, config=config)`.
    cache: the sizes of a small cache with the groups of layers and the page
      size of the real one.
    init_kv: see `Engine`.
    longest: the tokens of the longest sequence, more than a page and a sliding
      window have; None for 48 or three pages, or what a slot holds.
    tolerance: the largest difference of two log-probs; None for 0.001, or 0.1
      if the logits are 16-bit floats.

  Raises:
    ValueError: a log-prob differs. The message names the case that differs,
      and the likely reason.

  Examples:
    >>> import functools
    >>> from jaxkv import models, rollout
    >>> decoder = models.llama(
    ...   vocab_size=11, num_layers=1, embed_dim=8, num_heads=4,
    ...   num_kv_heads=2, head_dim=2, mlp_dim=16
    ... )
    >>> rollout.check_model(
    ...   models.init_params(jax.random.key(0), decoder),
    ...   functools.partial(models.forward, config=decoder),
    ...   functools.partial(models.forward_uncached, config=decoder),
    ...   models.cache_config(decoder, num_slots=4, max_length=48),
    ... )
  """
  page_size = cache.page_size
  if longest is None:
    longest = min(cache.slot_tokens, max(_LONGEST, 3 * page_size))
  # A hit has a page, and sampled tokens follow prompts of several lengths.
  longest = as_count("longest", longest, max(page_size, _NUM_PROMPTS) + 6)
  init_kv = served_model.served(model, RolloutConfig(), init_kv).init_kv
  logits = jax.eval_shape(
    uncached, params, *(jax.ShapeDtypeStruct((1, 1), jnp.int32),) * 2
  )
  if tolerance is None:
    tolerance = 1e-3 if logits.dtype == jnp.float32 else 0.1
  rng = np.random.default_rng(0)
  lengths = [longest - rows for rows in range(_NUM_PROMPTS)]
  rows = [
    rng.integers(0, logits.shape[-1], length).astype(np.int32)
    for length in lengths
  ]
  read = functools.partial(_log_probs, jax.jit(uncached), params)
  scores = functools.partial(
    _scores, params, cache=cache, init_kv=init_kv, longest=longest
  )
  sequences = _Sequences(rows, read(rows))
  in_chunks, with_hits = scores(model, sequences.tokens, num_calls=2)
  drawn = _drawn(params, model, cache, init_kv, longest, sequences.tokens)
  cases = [
    _compared("prompts in chunks", in_chunks, sequences.log_probs, tolerance),
    _compared(
      "prompts with a cached start", with_hits, sequences.log_probs, tolerance
    ),
    _compared("sampled tokens", drawn.log_probs, read(drawn.tokens), tolerance),
  ]
  wrong = [case for case in cases if case.num_wrong]
  if not wrong:
    return
  reason = _reason(model, sequences, in_chunks, scores, read, tolerance)
  differences = ", ".join(
    f"{case.num_wrong} of {case.num_tokens} {case.name} (by up to "
    f"{case.largest:.3g})"
    for case in wrong
  )
  raise ValueError(
    f"`model` must compute the log-probs of `uncached`, got others for "
    f"{differences}; {reason}"
  )


def _compared(
  name: str,
  actual: list[np.ndarray],
  expected: list[np.ndarray],
  tolerance: float,
) -> _Case:
  """Counts the last tokens of `expected` that differ from `actual`."""
  differences = [
    np.abs(row - other[len(other) - len(row) :])
    for row, other in zip(actual, expected, strict=True)
  ]
  joined = np.nan_to_num(np.concatenate(differences), nan=np.inf)
  num_wrong = int(np.sum(joined > tolerance))
  return _Case(name, num_wrong, joined.size, float(joined.max()))


def _reason(
  model: Model,
  sequences: _Sequences,
  in_chunks: list[np.ndarray],
  scores: Callable[..., list[list[np.ndarray]]],
  read: Callable[..., list[np.ndarray]],
  tolerance: float,
) -> str:
  """Returns the likely reason for a difference, and the remedy."""

  def differ(rows: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return _compared("", rows, others, tolerance).num_wrong > 0

  def doubled(params: Any, batch: Batch, kv: Any) -> Any:
    batch = dataclasses.replace(batch, positions=2 * batch.positions)
    return model(params, batch, kv)

  tokens = sequences.tokens
  depends = differ(read(tokens, scale=2), sequences.log_probs)
  if depends and not differ(scores(doubled, tokens)[0], in_chunks):
    return "it ignores `batch.positions`; use them in place of 0, 1, 2, ..."
  if differ(scores(model, tokens[:1])[0], in_chunks[:1]):
    return (
      "other sequences of the call change a sequence; only attention with "
      "`batch.views` may combine columns"
    )
  return (
    "it differs for a sequence alone; compare the weights, the scale of "
    "queries, the masks, and each layer's group of pages"
  )


def _scores(
  params: Any,
  model: Model,
  tokens: list[np.ndarray],
  *,
  cache: CacheConfig,
  init_kv: Callable[[CacheConfig], Any] | None,
  longest: int,
  num_calls: int = 1,
) -> list[list[np.ndarray]]:
  """Returns the log-probs of all but the first token, by call."""
  config = RolloutConfig(max_length=longest)
  chunk = max(longest // 3, 1)
  # Prompts of a page, of which the last token is never part of a hit.
  later_start = max(chunk, cache.page_size + 1)
  calls = []
  with Engine(params, model, cache, config, init_kv=init_kv) as engine:
    for call in range(num_calls):
      # Later calls begin with more tokens, which the first one has cached.
      start = 1 if not call else later_start
      scored = engine.score(
        [row[:start] for row in tokens],
        [[row[start:]] for row in tokens],
        chunk=chunk,
      )
      pairs = zip(scored.log_probs[:, 0], tokens, strict=True)
      calls.append([values[: len(row) - start] for values, row in pairs])
  return calls


def _drawn(
  params: Any,
  model: Model,
  cache: CacheConfig,
  init_kv: Callable[[CacheConfig], Any] | None,
  longest: int,
  tokens: list[np.ndarray],
) -> _Sequences:
  """Samples after the first tokens, and returns the log-probs recorded."""
  config = RolloutConfig(max_length=longest, raw_log_probs=True)
  prompts = [row[: 1 + index] for index, row in enumerate(tokens)]
  with Engine(params, model, cache, config, init_kv=init_kv) as engine:
    results = engine.generate(
      prompts,
      sampling=Sampling(temperature=1.0),
      max_new_tokens=longest - len(prompts),
    ).results
  raw = results.records.raw_log_probs
  assert raw is not None  # `config` requests them.
  rows = range(len(prompts))
  return _Sequences(
    [np.asarray(results.tokens)[row, : results.lengths[row]] for row in rows],
    [np.asarray(raw)[row][results.mask[row]] for row in rows],
  )


def _log_probs(
  uncached: Callable[..., Any],
  params: Any,
  rows: list[np.ndarray],
  scale: int = 1,
) -> list[np.ndarray]:
  """Returns the log-prob of each token but the first, without a cache.

  Positions are multiplied by `scale`.
  """
  tokens, _ = prompt_arrays.stacked(rows, rounds_up=False)
  positions = scale * np.arange(tokens.shape[1], dtype=np.int32)
  positions = np.broadcast_to(positions, tokens.shape)
  logits = jnp.asarray(uncached(params, tokens, positions), jnp.float32)
  log_probs = jax.nn.log_softmax(logits[:, :-1])
  log_probs = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=2)
  return [
    np.asarray(values[: len(row) - 1])
    for values, row in zip(log_probs[..., 0], rows, strict=True)
  ]
