"""From logits to a token and its log-probability.

A row is cut into blocks of about the square root of its tokens. A block is
chosen first, then a token in it, so nothing is sorted and no noise is made for
a token. A token is drawn by inverting the cumulative distribution at two
uniform numbers, one for each choice, whatever the size of the vocabulary.
"""

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
from jaxkv._src.exact import log_probs
from jaxkv._src.exact import row_loop
from jaxkv._src.sampling import filters
from jaxkv._src.sampling import reductions
from jaxkv._src.sampling import statistics
from jaxkv._src.sampling.logits import as_logits
from jaxkv._src.sampling.settings import Sampling
from jaxkv._src.sampling.temperature import LEAST


class Drawn(NamedTuple):
  """Tokens, and what is kept of them.

  Attributes:
    tokens: int32[R].
    log_probs: float32[R], of the tokens in the distribution that they were
      drawn from.
    raw_log_probs: float32[R], of the tokens in the model's own distribution.
    entropy: float32[R], of the model's own distribution, in nats.
    top_tokens: int32[R, X], its most likely tokens, descending.
    top_log_probs: float32[R, X], of those.
  """

  tokens: Array
  log_probs: Array
  raw_log_probs: Array | None = None
  entropy: Array | None = None
  top_tokens: Array | None = None
  top_log_probs: Array | None = None


class _Weights(NamedTuple):
  """The distribution of each row, up to a factor.

  Attributes:
    logits: float32[R, V].
    best: float32[R, 1], the highest of each row.
    divisor: float32[R, 1], the temperature; None for 1.
    greedy: bool[R], rows that take the most likely token; None for none.
    all: float32[R, V], 1 for the highest logit; None where nothing is left out.
    cutoff: float32[R, 1], the smallest of `all` that may be drawn; None where
      nothing is left out.
  """

  logits: Array
  best: Array
  divisor: Array | None = None
  greedy: Array | None = None
  all: Array | None = None
  cutoff: Array | None = None

  def scaled(self, logits: Array) -> Array:
    """Some logits of each row, [R, X], as logarithms of their weights."""
    # Of the differences none overflows upwards, however low the temperature.
    scaled = logits - self.best
    return scaled if self.divisor is None else scaled / self.divisor

  def kept(self) -> Array:
    """float32[R, V]: 0 for what is left out."""
    if self.all is None or self.cutoff is None:
      return jnp.exp(self.scaled(self.logits))
    return jnp.where(self.all >= self.cutoff, self.all, 0)

  def kept_in(self, number: Array) -> tuple[Array, Array]:
    """The weights in a block of each row, and the tokens' numbers, [R, Y]."""
    if self.all is None or self.cutoff is None:
      block = reductions.read_block(self.logits, number)
      weights = jnp.exp(self.scaled(block.values))
    else:
      # Not computed again: rounding could decide otherwise about a token.
      block = reductions.read_block(self.all, number)
      weights = jnp.where(block.values >= self.cutoff, block.values, 0)
    return jnp.where(block.valid, weights, 0), block.columns


def draw(
  keys: Array,
  counts: Array,
  logits: Array,
  sampling: Sampling,
  *,
  raw_logits: Array | None = None,
  raw_log_probs: bool = False,
  entropy: bool = False,
  top_log_probs: int = 0,
  exact: bool = False,
) -> Drawn:
  """Draws a token for every row, each with its own settings.

  Of the settings, `temperature`, `min_p`, `top_k` and `top_p` count here;
  `processors.adjust` is about the others. The draw depends on the row's own
  key and count alone, never on its place in the batch or on the rows beside it.
  A row with temperature 0 draws nothing.

  A row whose logits are all -inf, or in which one is NaN, gets some token of
  the vocabulary, with the log-probability NaN.

  Args:
    keys: key[R], a sequence's own key.
    counts: int32[R], tokens the sequence has generated so far.
    logits: floats [R, V] of any width; computed with in float32.
    sampling: of these R rows, see `settings.rows`.
    raw_logits: floats [R, V], the model's own; None if `logits` are.
    raw_log_probs: whether to give log-probabilities in the model's own
      distribution.
    entropy: whether to give the entropy of that distribution.
    top_log_probs: X, how many of its most likely tokens to give.
    exact: whether the numbers of a row, bit for bit, are those that it would
      have beside other rows, and log-probs those of `log_probs.of_tokens`,
      unless some tokens are left out.

  Returns:
    What was drawn. For temperature 0, the log-probability is that of the token
    at temperature 1.

  Raises:
    TypeError: `logits` holds no floats.
    ValueError: `top_log_probs` is more than V.
  """
  logits = as_logits(logits)
  keys, counts, logits, sampling = sharding.match_varying_axes(
    (keys, counts, logits, sampling)
  )
  if exact:
    return _draw_exactly(
      keys,
      counts,
      logits,
      sampling,
      logits if raw_logits is None else as_logits(raw_logits),
      raw_log_probs,
      functools.partial(draw, entropy=entropy, top_log_probs=top_log_probs),
    )
  weights = _weights(logits, sampling)
  masses = reductions.by_block(reductions.sums, weights.kept())
  tokens = _tokens(keys, counts, weights, masses)
  chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
  own = weights.scaled(chosen)[:, 0] - jnp.log(reductions.sums(masses))
  drawn = Drawn(tokens=tokens, log_probs=own)
  raw_logits = logits if raw_logits is None else as_logits(raw_logits)
  if raw_log_probs or entropy or top_log_probs:
    known = statistics.observe(
      raw_logits,
      tokens,
      own,
      entropy=entropy,
      top_log_probs=top_log_probs,
    )
    drawn = drawn._replace(
      raw_log_probs=known.log_probs if raw_log_probs else None,
      entropy=known.entropy,
      top_tokens=known.top_tokens,
      top_log_probs=known.top_log_probs,
    )
  return drawn


def _draw_exactly(
  keys: Array,
  counts: Array,
  logits: Array,
  sampling: Sampling,
  raw_logits: Array,
  raw_log_probs: bool,
  draw_some: Callable[..., Drawn],
) -> Drawn:
  """What `draw` gives, a few rows at a time."""

  def some(none: tuple[()], keys: Array, *rows: Any) -> Drawn:
    del none
    counts, logits, sampling, raw = rows
    return draw_some(keys, counts, logits, sampling, raw_logits=raw)

  names = ("temperature", "min_p", "top_k", "top_p")
  sampling = Sampling(**{name: getattr(sampling, name) for name in names})
  rows = (keys, counts, logits, sampling, raw_logits)
  drawn = row_loop.loop(some, (), rows, tile=log_probs.ROWS)
  ones = jnp.ones(counts.shape, jnp.float32)
  if (
    sampling.top_k is None and sampling.top_p is None and sampling.min_p is None
  ):
    heat = sampling.temperature
    heat = ones if heat is None else jnp.where(heat == 0, 1, heat)
    own = log_probs.of_tokens(logits, drawn.tokens, heat)
    drawn = drawn._replace(log_probs=own)
  if raw_log_probs:
    own = log_probs.of_tokens(raw_logits, drawn.tokens, ones)
    drawn = drawn._replace(raw_log_probs=own)
  return drawn


_OFF = {"min_p": 0, "top_k": 0, "top_p": 1}
"""The values of filters that leave nothing out."""


def _is_allowed(sampling: Sampling) -> Array | None:
  """bool[R]: rows whose settings are in range; None for no settings.

  Traced settings are not checked before, and the search for a cutoff needs not
  end for some that are not.
  """
  heat, min_p, top_p = sampling.temperature, sampling.min_p, sampling.top_p
  checks = []
  if heat is not None:
    checks.append((heat == 0) | ((heat >= LEAST) & (heat < jnp.inf)))
  if min_p is not None:
    checks.append((min_p >= 0) & (min_p <= 1))
  if top_p is not None:
    # On some devices the smallest numbers above 0 are 0.
    checks.append((top_p >= 0) & (top_p <= 1))
  return functools.reduce(jnp.logical_and, checks) if checks else None


def _weights(logits: Array, sampling: Sampling) -> _Weights:
  allowed, best = _is_allowed(sampling), reductions.maxima(logits)
  if allowed is not None:
    # All weights of other rows become NaN, and so does the log-prob.
    best = jnp.where(allowed, best, jnp.nan)
  weights = _Weights(logits, best[:, None])
  heat, used = sampling.temperature, allowed
  if heat is not None:
    divisor = jnp.where(heat == 0, 1, heat)[:, None]
    weights = weights._replace(divisor=divisor, greedy=heat == 0)
    # For a greedy row all filters are off.
    used = allowed & (heat != 0)
  options = {}
  for name, off in _OFF.items():
    value = getattr(sampling, name)
    if value is not None and used is not None:
      value = jnp.where(used, value, jnp.asarray(off, value.dtype))
    if value is not None:
      options[name] = value
  if options:
    every = weights.kept()
    cutoff = filters.cutoff(every, **options)[:, None]
    weights = weights._replace(all=every, cutoff=cutoff)
  return weights


def _tokens(
  keys: Array, counts: Array, weights: _Weights, masses: Array
) -> Array:
  """int32[R]: the token of each row."""
  greedy = weights.greedy
  if greedy is None:
    return _sampled(keys, counts, weights, masses)

  def mixed(sampled: Array) -> Array:
    return jnp.where(greedy, _most_likely(weights), sampled)

  sampled = lax.cond(
    jnp.all(greedy),
    lambda: greedy.astype(jnp.int32) & 0,
    lambda: _sampled(keys, counts, weights, masses),
  )
  return lax.cond(jnp.any(greedy), mixed, lambda sampled: sampled, sampled)


def _most_likely(weights: _Weights) -> Array:
  return reductions.first_of(weights.logits == weights.best)


def _sampled(
  keys: Array, counts: Array, weights: _Weights, masses: Array
) -> Array:
  block_number, token_number = _uniforms(keys, counts)
  inside, columns = weights.kept_in(_inverse(masses, block_number))
  place = _inverse(inside, token_number)
  return jnp.take_along_axis(columns, place[:, None], axis=1)[:, 0]


def _uniforms(keys: Array, counts: Array) -> tuple[Array, Array]:
  """Two numbers of [0, 1) for each row, float32[B] each."""
  keys = jax.vmap(jax.random.fold_in)(keys, counts)
  bits = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(keys)
  uniforms = (bits >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2**-24)
  return uniforms[:, 0], uniforms[:, 1]


def _inverse(weights: Array, uniforms: Array) -> Array:
  """The index at which the cumulative distribution exceeds a number.

  Args:
    weights: float32[B, X], not negative, some positive in every row.
    uniforms: float32[B], in [0, 1).

  Returns:
    int32[B], never of an index whose weight is 0.
  """
  # A product with a triangle: `cumsum` takes ten times as long on a CPU. Made
  # on the host, because XLA would make it in every step, on another thread.
  before = np.triu(np.ones((weights.shape[1],) * 2, np.float32))
  ends = jnp.matmul(weights, before, precision=lax.Precision.HIGHEST)
  inside = (ends > uniforms[:, None] * ends[:, -1:]) & (weights > 0)
  # Sums are rounded in any order, so the last one need not be the largest.
  heaviest = weights == reductions.maxima(weights)[:, None]
  return reductions.first_of(
    jnp.where(jnp.any(inside, axis=1)[:, None], inside, heaviest)
  )
