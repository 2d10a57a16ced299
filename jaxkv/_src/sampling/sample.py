"""Samples a token from logits, with its log-probability.

The V tokens of a row are divided into blocks of about sqrt(V) tokens.
`sample_tokens` first draws a block, then a token of this block, each by inverse
transform sampling, which inverts a cumulative distribution at one uniform
number. So a row needs only two random numbers for any V, and neither Gumbel
noise nor a sort.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax

from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.arguments import as_floats
from jaxkv._src.exact import log_probs
from jaxkv._src.exact import row_loop
from jaxkv._src.sampling import filters
from jaxkv._src.sampling import reductions
from jaxkv._src.sampling import statistics
from jaxkv._src.sampling.settings import Sampling
from jaxkv._src.sampling.statistics import Records
from jaxkv._src.sampling.temperature import HIGHEST
from jaxkv._src.sampling.temperature import LEAST


class SampledTokens(NamedTuple):
  """Sampled tokens and their statistics.

  Attributes:
    tokens: int32[R].
    log_probs: float32[R], log-probs of `tokens` in the distribution that they
      were drawn from.
    records: statistics with R rows in place of [Q, W]; None unless requested.
  """

  tokens: Array
  log_probs: Array
  records: Records


class _Weights(NamedTuple):
  """The unnormalized distribution of each row.

  Attributes:
    logits: float32[R, V].
    best: float32[R, 1], the highest logit of each row.
    divisor: float32[R, 1], the temperature, or 1 for temperature 0; None if no
      temperature is set.
    greedy: bool[R], True for rows that take the most likely token; None if no
      row can be greedy.
    unfiltered: float32[R, V], exp of the scaled logits, 1 for the highest; None
      if no filter is set.
    cutoff: float32[R, 1], the lowest weight that can be drawn; None if no
      filter is set.
    parts: static; see `reductions`.
  """

  logits: Array
  best: Array
  divisor: Array | None = None
  greedy: Array | None = None
  unfiltered: Array | None = None
  cutoff: Array | None = None
  parts: int = 1

  def scaled(self, logits: Array) -> Array:
    """Returns the log-weights of logits [R, X]; the highest logit has 0."""
    # The division comes after the subtraction. Differences are at most 0, so a
    # low temperature cannot make them overflow to +inf.
    scaled = logits - self.best
    return scaled if self.divisor is None else scaled / self.divisor

  def filtered(self) -> Array:
    """Returns the weights, float32[R, V]; 0 for filtered tokens."""
    if self.unfiltered is None or self.cutoff is None:
      return jnp.exp(self.scaled(self.logits))
    return jnp.where(self.unfiltered >= self.cutoff, self.unfiltered, 0)

  def block_weights(self, block_index: Array) -> tuple[Array, Array]:
    """Returns weights and token ids of one block of each row, [R, Y] each."""
    if self.unfiltered is None or self.cutoff is None:
      block = reductions.read_block(self.logits, block_index, self.parts)
      weights = jnp.exp(self.scaled(block.values))
    else:
      # Weights are not recomputed, because they could be rounded differently
      # and cross the cutoff. The block was drawn by the sum of these weights.
      block = reductions.read_block(self.unfiltered, block_index, self.parts)
      weights = jnp.where(block.values >= self.cutoff, block.values, 0)
    return jnp.where(block.valid, weights, 0), block.columns


def sample_tokens(
  keys: Array,
  counts: Array,
  logits: Array,
  sampling: Sampling,
  *,
  raw_logits: Array | None = None,
  raw_log_probs: bool = False,
  unfiltered_log_probs: bool = False,
  entropy: bool = False,
  top_log_probs: int = 0,
  exact: bool = False,
  parts: int = 1,
) -> SampledTokens:
  """Draws one token for each row with the row's settings.

  Applies `temperature`, `min_p`, `top_k` and `top_p`; `penalties.adjust`
  applies the other settings. A draw depends only on the row's logits, settings,
  key and count, not on its position in the batch. The rounding of its log-probs
  can depend on the other rows, unless `exact`. A row with temperature 0 takes
  its most likely token.

  A row with a NaN or +inf, or with -inf only, gets an arbitrary token of the
  vocabulary and the log-probability NaN.

  `keys`, key[R], are those of the rows' sequences, which have generated
  `counts`, int32[R], tokens. `sampling` has the settings of these R rows.
  `raw_logits` are the model's logits before `penalties.adjust`, None if
  `logits`, floats [R, V], are. `RolloutConfig` documents the options from
  `raw_log_probs` to `top_log_probs`.

  With `exact`, the bits of a row's result do not depend on other rows. Without
  filters, `log_probs` are then those of `log_probs.of_tokens`. Otherwise
  `parts` devices can split rows by vocabulary, see `reductions`; 1 is used if
  `parts` does not divide V.

  Returns:
    The tokens and their statistics. The log-prob of a greedy token is taken at
    temperature 1.
  """
  logits = as_floats("logits", logits)
  keys, counts, logits, sampling = sharding.match_varying_axes(
    (keys, counts, logits, sampling)
  )
  if raw_logits is None:
    raw_logits = logits
  raw_logits = as_floats("raw_logits", raw_logits)
  if exact:
    return _sample_exactly(
      keys,
      counts,
      logits,
      sampling,
      raw_logits,
      raw_log_probs,
      unfiltered_log_probs,
      functools.partial(
        sample_tokens, entropy=entropy, top_log_probs=top_log_probs
      ),
    )
  if logits.shape[1] % parts:
    parts = 1
  weights = _weights(logits, sampling)._replace(parts=parts)
  masses = reductions.block_sums(weights.filtered(), parts)
  tokens = _sample_or_greedy(keys, counts, weights, masses)
  token_logits = jnp.take_along_axis(logits, tokens[:, None], axis=1)
  scores = weights.scaled(token_logits)[:, 0] - jnp.log(reductions.sums(masses))
  unfiltered = None
  records = Records()
  if unfiltered_log_probs:
    unfiltered = _unfiltered(logits, tokens, sampling)
  if raw_log_probs or entropy or top_log_probs:
    records = statistics.observe(
      raw_logits,
      tokens,
      scores,
      entropy=entropy,
      top_log_probs=top_log_probs,
      parts=parts,
    )
  records = dataclasses.replace(
    records,
    raw_log_probs=records.raw_log_probs if raw_log_probs else None,
    unfiltered_log_probs=unfiltered,
  )
  return SampledTokens(tokens, scores, records)


def _sample_exactly(
  keys: Array,
  counts: Array,
  logits: Array,
  sampling: Sampling,
  raw_logits: Array,
  raw_log_probs: bool,
  unfiltered_log_probs: bool,
  of_tile: Callable[..., SampledTokens],
) -> SampledTokens:
  """Runs `sample_tokens` on tiles of a fixed number of rows."""

  def sample_tile(carry: tuple[()], keys: Array, *rows: Any) -> SampledTokens:
    del carry
    counts, logits, sampling, raw = rows
    return of_tile(keys, counts, logits, sampling, raw_logits=raw)

  # Passes only the fields that `sample_tokens` reads, which have R rows to
  # slice.
  names = ("temperature", "min_p", "top_k", "top_p")
  sampling = Sampling(**{name: getattr(sampling, name) for name in names})
  rows = (keys, counts, logits, sampling, raw_logits)
  sampled = row_loop.loop(sample_tile, (), rows, tile=log_probs.ROWS)
  records = sampled.records
  ones = jnp.ones(counts.shape, jnp.float32)
  filters = sampling.top_k, sampling.top_p, sampling.min_p
  has_filters = any(setting is not None for setting in filters)
  if unfiltered_log_probs or not has_filters:
    scores = _unfiltered(logits, sampled.tokens, sampling)
    if unfiltered_log_probs:
      records = dataclasses.replace(records, unfiltered_log_probs=scores)
    if not has_filters:
      sampled = sampled._replace(log_probs=scores)
  if raw_log_probs:
    scores = log_probs.of_tokens(raw_logits, sampled.tokens, ones)
    records = dataclasses.replace(records, raw_log_probs=scores)
  return sampled._replace(records=records)


def _unfiltered(logits: Array, tokens: Array, sampling: Sampling) -> Array:
  """Returns log-probs of tokens int32[R] at each row's temperature."""
  divisor = jnp.ones(tokens.shape, jnp.float32)
  if sampling.temperature is not None:
    # The log-prob of a greedy token is taken at temperature 1.
    divisor = jnp.where(sampling.temperature == 0, 1, sampling.temperature)
  return log_probs.of_tokens(logits, tokens, divisor)


_OFF = {"min_p": 0, "top_k": 0, "top_p": 1}
"""The value that turns each filter off."""


def _is_allowed(sampling: Sampling) -> Array | None:
  """Returns bool[R], True for rows whose temperature and filters are valid.

  Returns None if none of them is set. Traced settings can only be checked here.
  With settings out of range, the search for a cutoff might not terminate.
  """
  checks = []
  if (t := sampling.temperature) is not None:
    checks.append((t == 0) | ((t >= LEAST) & (t <= HIGHEST)))
  if (min_p := sampling.min_p) is not None:
    checks.append((min_p >= 0) & (min_p <= 1))
  if (top_p := sampling.top_p) is not None:
    # 0 is allowed, because some devices flush a subnormal `top_p` to 0.
    checks.append((top_p >= 0) & (top_p <= 1))
  return functools.reduce(jnp.logical_and, checks) if checks else None


def _weights(logits: Array, sampling: Sampling) -> _Weights:
  allowed = _is_allowed(sampling)
  best = reductions.maxima(logits)
  if allowed is not None:
    # With NaN as the highest logit, a row with settings out of range gets NaN
    # weights and a NaN log-prob, which the caller can see.
    best = jnp.where(allowed, best, jnp.nan)
  weights = _Weights(logits, best[:, None])
  temperature = sampling.temperature
  filters_apply = allowed
  if temperature is not None:
    divisor = jnp.where(temperature == 0, 1, temperature)[:, None]
    weights = weights._replace(divisor=divisor, greedy=temperature == 0)
    # A greedy row gets no filter, so it does not prolong the cutoff search.
    filters_apply = allowed & (temperature != 0)
  options = {}
  for name, neutral in _OFF.items():
    value = getattr(sampling, name)
    if value is not None and filters_apply is not None:
      value = jnp.where(filters_apply, value, jnp.asarray(neutral, value.dtype))
    if value is not None:
      options[name] = value
  if options:
    unfiltered = weights.filtered()
    cutoff = filters.cutoff(unfiltered, **options)[:, None]
    weights = weights._replace(unfiltered=unfiltered, cutoff=cutoff)
  return weights


def _sample_or_greedy(
  keys: Array, counts: Array, weights: _Weights, masses: Array
) -> Array:
  """Returns the token of each row, int32[R]."""
  greedy = weights.greedy
  if greedy is None:
    return _sample(keys, counts, weights, masses)

  def sample() -> Array:
    return _sample(keys, counts, weights, masses)

  def select(sampled: Array) -> Array:
    return jnp.where(greedy, _most_likely(weights), sampled)

  def with_conditions() -> Array:
    # If all rows are greedy, no row is sampled; if none is, no argmax is taken.
    # `& 0` gives zeros that vary over the mesh axes of `greedy`.
    sampled = lax.cond(
      jnp.all(greedy), lambda: greedy.astype(jnp.int32) & 0, sample
    )
    return lax.cond(jnp.any(greedy), select, lambda sampled: sampled, sampled)

  # On a GPU a condition waits for the host, which takes longer than the work.
  return lax.platform_dependent(
    cpu=with_conditions, default=lambda: select(sample())
  )


def _most_likely(weights: _Weights) -> Array:
  return reductions.first_of(weights.logits == weights.best)


def _sample(
  keys: Array, counts: Array, weights: _Weights, masses: Array
) -> Array:
  for_block, for_token = _uniforms(keys, counts)
  inside, columns = weights.block_weights(_inverse_cdf(masses, for_block))
  index = _inverse_cdf(inside, for_token)
  return jnp.take_along_axis(columns, index[:, None], axis=1)[:, 0]


def _uniforms(keys: Array, counts: Array) -> tuple[Array, Array]:
  """Returns two uniform numbers in [0, 1) for each row, float32[R] each."""
  keys = jax.vmap(jax.random.fold_in)(keys, counts)
  bits = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(keys)
  # 24 bits fill a float32's significand, so the product is exact and below 1.
  uniforms = (bits >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2**-24)
  return uniforms[:, 0], uniforms[:, 1]


def _inverse_cdf(weights: Array, uniforms: Array) -> Array:
  """Inverts the cumulative distribution of each row at a uniform number.

  `weights`, float32[R, X], are not negative, with a positive one in every row,
  and `uniforms`, float32[R], are in [0, 1). Returns int32[R], indices of
  positive weights.
  """
  # A matmul computes the prefix sums, because `cumsum` takes ten times as long
  # on a CPU. The triangle is a host constant, because XLA would otherwise build
  # it in every step, on another thread.
  upper_triangle = np.triu(np.ones((weights.shape[1],) * 2, np.float32))
  ends = jnp.matmul(weights, upper_triangle, precision=lax.Precision.HIGHEST)
  exceeds = (ends > uniforms[:, None] * ends[:, -1:]) & (weights > 0)
  # Prefix sums are rounded independently, so the last one can exceed the one at
  # the last positive weight. Where `exceeds` is all False, `heaviest` is drawn.
  heaviest = weights == reductions.maxima(weights)[:, None]
  return reductions.first_of(
    jnp.where(jnp.any(exceeds, axis=1)[:, None], exceeds, heaviest)
  )
