"""Log-probs of completions that share prompts, against whole sequences."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv import models
from jaxkv import rl
from jaxkv._src.models.decoder import log_probs
from tests.models import tiny_decoders as tiny
from tests.tools.collectives import collectives
from tests.tools.tiers import slow_except

pytestmark = pytest.mark.slow

over_decoders = pytest.mark.parametrize("name", tiny.LAYERS)

_N, _P = 3, 7
_PROMPTS = np.array([7, 1, 4], np.int32)
_LENGTHS = np.array([[5, 2, 0, 1], [3, 5, 4, 4], [0, 0, 1, 5]], np.int32)
# Two levels: branches that stop, and one that has no tokens of its own.
_TREE = (
  np.array([[3, 1], [2, 0], [0, 3]], np.int32),
  np.array(
    [[[4, 0, 1], [2, 3, 4]], [[1, 1, 1], [2, 0, 4]], [[0, 0, 0], [0, 4, 2]]],
    np.int32,
  ),
)
_COLUMNS = (3, 4)


def _config(name: str) -> models.Decoder:
  return tiny.decoder(
    tiny.LAYERS[name], logit_cap=3.0, tied_embeddings=name != "latents"
  )


@functools.cache
def _params(name: str) -> Any:
  params = models.init_params(jax.random.key(0), _config(name))
  draw = np.random.default_rng(5)
  return jax.tree.map(
    lambda leaf: leaf + 0.1 * draw.normal(size=leaf.shape).astype(np.float32),
    params,
  )


def _tokens(*shape: int) -> np.ndarray:
  """Tokens; there is also nonsense behind the lengths."""
  draw = np.random.default_rng(len(shape))
  return draw.integers(0, tiny.VOCABULARY, shape).astype(np.int32)


def _nonsense(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  columns = np.arange(tokens.shape[-1])
  return np.where(columns < lengths[..., None], tokens, -7).astype(np.int32)


def _completions() -> tuple[Any, Any, Any, Any]:
  """Arguments: N prompts and their completions."""
  prompts, completions = _tokens(_N, _P), _tokens(*_LENGTHS.shape, 5)
  return (
    _nonsense(prompts, _PROMPTS),
    _PROMPTS,
    _nonsense(completions, _LENGTHS),
    _LENGTHS,
  )


def _trees() -> tuple[Any, Any, Any, Any]:
  """Arguments: N prompts and trees of two levels."""
  levels = tuple(
    _nonsense(_tokens(*lengths.shape, columns), lengths)
    for lengths, columns in zip(_TREE, _COLUMNS, strict=True)
  )
  return _nonsense(_tokens(_N, _P), _PROMPTS), _PROMPTS, levels, _TREE


def _grouped(name: str, params: Any, arguments: Any, **options: Any) -> Any:
  return models.grouped_log_probs(
    params,
    *arguments,
    config=_config(name),
    **options,
  )


def _as_tuples(arguments: Any) -> tuple[Any, Any]:
  """Levels and lengths, the prompts' first."""
  prompts, prompt_lengths, levels, lengths = arguments
  if not isinstance(levels, tuple):
    levels, lengths = (levels,), (lengths,)
  return (prompts, *levels), (prompt_lengths, *lengths)


def _rows(levels: Any, lengths: Any) -> tuple[np.ndarray, dict]:
  """Whole sequences, padded with 0, and (row, column) where branches begin."""
  paths, rows = {}, []
  for branch in itertools.product(*map(range, lengths[-1].shape)):
    parts, column = [], 0
    for level, (array, counts) in enumerate(zip(levels, lengths, strict=True)):
      prefix = branch[: level + 1]
      paths.setdefault((level, prefix), (len(rows), column))
      parts.append(array[prefix][: counts[prefix]])
      column += counts[prefix]
    rows.append(np.concatenate(parts))
  shape = (len(rows), max(map(len, rows)), *rows[0].shape[1:])
  padded = np.zeros(shape, rows[0].dtype)
  for row, values in zip(padded, rows, strict=True):
    row[: len(values)] = values
  return padded, paths


def _whole(
  name: str, params: Any, arguments: Any, temperature: float = 1.0, **more: Any
) -> list[Any]:
  """The same of whole sequences, one for each path; a list of levels."""
  levels, lengths = _as_tuples(arguments)
  tokens, paths = _rows(levels, lengths)
  width = tokens.shape[1]
  positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
  logits = models.forward_uncached(
    params, tokens, positions, config=_config(name), **more
  )
  logits = jax.nn.log_softmax(logits[:, :-1] / temperature)
  next_tokens = jnp.asarray(tokens)[:, 1:, None]
  scores = jnp.take_along_axis(logits, next_tokens, axis=2)[..., 0]
  outputs = []
  for level, (array, counts) in enumerate(zip(levels, lengths, strict=True)):
    flat = []
    for prefix in itertools.product(*map(range, counts.shape)):
      row, column = paths[level, prefix]
      part = scores[row, column - 1 : column - 1 + counts[prefix]]
      flat.append(jnp.pad(part, (0, array.shape[-1] - len(part))))
    outputs.append(jnp.stack(flat).reshape(array.shape) if level else None)
  return outputs[1:]


def _assert_close(actual: Any, expected: Any) -> None:
  # Float32 sums of at most 64 terms of order 1, in another order.
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.fast
@slow_except("name", tiny.LAYERS, "sinks and experts")
@over_decoders
def test_trees_equal_whole_sequences(name):
  levels = _grouped(name, _params(name), _trees())
  expected = _whole(name, _params(name), _trees())
  for out, target, lengths in zip(levels, expected, _TREE, strict=True):
    assert (np.asarray(target) < 0).sum() == lengths.sum()
    _assert_close(out, target)


@pytest.mark.parametrize(
  ("name", "arguments"),
  [
    ("llama", _completions),
    *(
      pytest.param(name, _trees, marks=pytest.mark.deep)
      if name in ("states", "latents")
      else (name, _trees)
      for name in tiny.LAYERS
    ),
    # A tree of two levels has the branches of completions, and its own.
    *(
      pytest.param(name, _completions, marks=pytest.mark.deep)
      for name in tiny.LAYERS
      if name != "llama"
    ),
  ],
)
def test_gradients_are_those_of_whole_sequences(name, arguments):
  _, lengths = _as_tuples(arguments())
  columns = (5,) if len(lengths) == 2 else _COLUMNS
  factors = [
    np.random.default_rng(9).normal(size=(*rows.shape, width)).astype("float32")
    for rows, width in zip(lengths[1:], columns, strict=True)
  ]

  def loss(of: Any, params: Any, **options: Any) -> jax.Array:
    out = of(name, params, arguments(), temperature=0.7, **options)
    levels = out if isinstance(out, tuple | list) else (out,)
    weighted_sum = jnp.float32(0)
    for level, factor in zip(levels, factors, strict=True):
      weighted_sum = weighted_sum + jnp.sum(level * factor)
    return weighted_sum

  expected = jax.jit(jax.grad(functools.partial(loss, _whole)))(_params(name))
  largest = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(expected))
  # A recurrence carries the rounding of each token on to all later ones: on
  # CPUs that sum in another order, gradients through it differ by 5e-6.
  rounding = 1e-5 if name == "states" else 3e-6
  for remat in (False, True):
    grouped_loss = functools.partial(loss, _grouped, remat=remat)
    gradient = jax.jit(jax.grad(grouped_loss))(_params(name))
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(
        x, y, rtol=0, atol=rounding * max(largest, 1)
      ),
      gradient,
      expected,
    )


def test_completions_of_one_token():
  """Choices of one token each: the prompt alone matters."""
  prompts, prompt_lengths, completions, lengths = _completions()
  completions = np.maximum(completions[..., :1], 0)
  arguments = prompts, prompt_lengths, completions, np.ones_like(lengths)
  for name in ("llama", "states"):
    out = _grouped(name, _params(name), arguments)
    (expected,) = _whole(name, _params(name), arguments)
    _assert_close(out, expected)


def test_rows_without_tokens_change_nothing():
  """A rollout may have no sequence of a prompt."""
  prompts, prompt_lengths, completions, lengths = _completions()
  empty = np.array([0, *prompt_lengths[1:]]), np.array([[0] * 4, *lengths[1:]])
  arguments = prompts, empty[0], completions, empty[1]

  def loss(params: Any) -> jax.Array:
    return jnp.sum(_grouped("states", params, arguments))

  value, gradient = jax.value_and_grad(loss)(_params("states"))
  (expected,) = _whole("states", _params("states"), _completions())
  _assert_close(value, jnp.sum(expected[1:]))
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
  ("prompt", "lengths"),
  [(8, (5, 2, 0, 1)), (-1, (5, 2, 0, 1)), (7, (6, 2, 0, 1)), (0, (0, 1, 0, 0))],
)
def test_lengths_out_of_range_give_nan(prompt, lengths):
  arguments = [array.copy() for array in _completions()]
  arguments[1][0] = prompt
  arguments[3][0] = lengths
  out = np.asarray(_grouped("llama", _params("llama"), arguments))
  assert np.isnan(out[0]).all()
  (expected,) = _whole("llama", _params("llama"), _completions())
  _assert_close(out[1:], expected[1:])


@pytest.mark.parametrize("name", ["llama", "states", "latents"])
def test_lengths_out_of_range_are_left_out_of_a_loss(name):
  """As a user does it: that prompt changes nothing, nor does its gradient."""
  prompts, prompt_lengths, completions, lengths = _completions()
  wrong = np.where(np.arange(_N) == 1, _P + 1, prompt_lengths).astype(np.int32)
  empty = np.where(np.arange(_N) == 1, 0, prompt_lengths).astype(np.int32)
  empty_lengths = np.where(np.arange(_N)[:, None] == 1, 0, lengths)
  params = _params(name)

  @jax.jit
  def run(prompt_lengths: Any, lengths: Any) -> Any:
    def loss(params: Any) -> jax.Array:
      scores = _grouped(
        name, params, (prompts, prompt_lengths, completions, lengths)
      )
      mask = jnp.arange(5)[None, None] < lengths[..., None]
      mask &= ~jnp.isnan(scores)
      good = jnp.ones(lengths.shape, jnp.float32)
      return rl.grpo_loss(scores, scores - 0.1, good, mask)[0]

    return jax.value_and_grad(loss)(params)

  out = run(wrong, lengths)
  expected = run(empty, empty_lengths.astype(np.int32))
  assert float(out[0]) != 0
  jax.tree.map(np.testing.assert_array_equal, out, expected)


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize(
  "mixer", [tiny.attention(), tiny.DELTA_NET], ids=["attention", "delta_net"]
)
def test_under_shard_map(mixer, numerics):
  """Nothing is gathered, and exact numbers are those of one device."""
  layers = (tiny.layer(mixer), tiny.layer(tiny.attention()))
  config = dataclasses.replace(
    _config("llama"), layers=layers, numerics=numerics
  )
  params = models.init_params(jax.random.key(0), config)
  arguments = _completions()
  arguments = [np.concatenate([array, array[:1]]) for array in arguments]
  call = functools.partial(models.grouped_log_probs, config=config)
  mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
  split = jax.shard_map(
    call, mesh=mesh, in_specs=(P(), *[P("data")] * 4), out_specs=P("data")
  )
  shardings = [NamedSharding(mesh, P()), *[NamedSharding(mesh, P("data"))] * 4]
  compiled = (
    jax.jit(split, in_shardings=shardings).lower(params, *arguments).compile()
  )
  assert collectives(compiled.as_text()) == {}
  out = compiled(*jax.device_put((params, *arguments), tuple(shardings)))
  expected = call(params, *arguments)
  _assert_close(out, expected)
  if numerics == "exact":
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("name", ["sinks and experts", "states"])
def test_given_experts_are_used(name):
  count = 2 if name == "sinks and experts" else 1
  prompts, _, completions, lengths = _completions()
  draw = np.random.default_rng(2)
  used = [
    draw.permuted(np.broadcast_to(np.arange(6), (*x.shape, count, 6)), axis=-1)
    for x in (prompts, completions)
  ]
  # There is nonsense behind the lengths, here, too.
  used = [
    np.where((x >= 0)[..., None, None], ids[..., :2], 99).astype(np.int16)
    for x, ids in zip((prompts, completions), used, strict=True)
  ]
  out = _grouped(
    name, _params(name), _completions(), experts=tuple(map(jnp.asarray, used))
  )
  chosen, _ = _rows(tuple(used), *_as_tuples(_completions())[1:])
  (expected,) = _whole(
    name, _params(name), _completions(), experts=jnp.asarray(chosen)
  )
  assert (np.asarray(expected) < 0).sum() == lengths.sum()
  _assert_close(out, expected)


def test_the_head_runs_over_some_rows_at_a_time():
  config, params = _config("llama"), _params("llama")
  draw = np.random.default_rng(3)
  x = jnp.asarray(draw.normal(size=(2, 5, 16)).astype(np.float32))
  tokens = jnp.asarray(_tokens(2, 5, 3))
  warm = jnp.float32(1.5)

  def loss(params: Any, x: jax.Array, max_logits: int) -> Any:
    scores = log_probs.of_tokens(
      params, x, tokens, warm, config, max_logits=max_logits
    )
    return jnp.sum(jnp.sin(scores)), scores

  run = jax.value_and_grad(loss, (0, 1), has_aux=True)
  expected = run(params, x, 10**6)
  for rows in (0, 1, 3, 4, 10):
    out = run(params, x, rows * tiny.VOCABULARY)
    jax.tree.map(_assert_close, out, expected)
  text = (
    jax.jit(run, static_argnums=2)
    .lower(params, x, 3 * tiny.VOCABULARY)
    .as_text()
  )
  assert f"tensor<3x{tiny.VOCABULARY}xf32>" in text
  for shape in (
    f"10x{tiny.VOCABULARY}",
    f"2x5x{tiny.VOCABULARY}",
    f"12x{tiny.VOCABULARY}",
  ):
    assert f"tensor<{shape}xf32>" not in text


def test_a_prompt_is_computed_once():
  """No array of the program has as many tokens as whole sequences have."""
  group, width, columns = 6, 61, 5
  arguments = (
    _tokens(1, width),
    np.full(1, width, np.int32),
    _tokens(1, group, columns),
    np.full((1, group), columns, np.int32),
  )

  def loss(params: Any) -> jax.Array:
    return jnp.sum(_grouped("llama", params, arguments))

  text = jax.jit(jax.grad(loss)).lower(_params("llama")).as_text()
  num_tokens = width + group * (columns - 1)
  assert f"tensor<1x{num_tokens}x16xf32>" in text
  # The queries of all completions meet the prompt's keys in one product.
  scores = f"tensor<1x1x2x2x{group * (columns - 1)}x{width}xf32>"
  assert scores in text
  whole = (group * width, group * (width + columns), group * (num_tokens - 1))
  for count in whole:
    assert f"x{count}x" not in text
  for rows in (f"{group}x{width}x", f"{group}x{width + columns}x"):
    assert rows not in text
  # Logits: of the prompt's last token, and of the completions'.
  assert f"tensor<1x{tiny.VOCABULARY}xf32>" in text
  assert f"tensor<{group * (columns - 1)}x{tiny.VOCABULARY}xf32>" in text
  assert f"tensor<{group * columns}x{tiny.VOCABULARY}xf32>" not in text
