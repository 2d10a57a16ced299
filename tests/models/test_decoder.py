"""The decoder: with pages, with a dense cache, with none, and in numpy."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import kv as paged
from jaxkv import models
from tests.models import numpy_decoder
from tests.models import tiny_decoders as tiny

_VOCAB = 23


def _config(**changes: Any) -> models.Decoder:
  dims: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "num_layers": 2,
    "embed_dim": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_dim": 48,
  }
  return models.llama(**(dims | changes))


@functools.cache
def _params(config: models.Decoder) -> Any:
  return models.init_params(jax.random.key(0), config)


def _assert_close(actual: Any, expected: Any) -> None:
  # Float32 sums of at most 64 terms of order 1, added in another order.
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def _tokens(num_rows: int, num_tokens: int, vocab: int = _VOCAB) -> np.ndarray:
  shape = (num_rows, num_tokens)
  return np.random.default_rng(1).integers(0, vocab, shape).astype(np.int32)


def _model(
  num_rows: int, num_tokens: int, **changes: Any
) -> tuple[models.Decoder, Any, np.ndarray]:
  """Returns a decoder, its parameters and tokens."""
  config = _config(**changes)
  return config, _params(config), _tokens(num_rows, num_tokens)


def _positions(starts: Any, num_tokens: int) -> jax.Array:
  starts = jnp.asarray(starts, jnp.int32)
  return starts[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)[None]


def _pages(
  config: models.Decoder, num_rows: int, max_len: int, page_size: int
) -> tuple[paged.KVPages, jax.Array]:
  """Poisoned pages, and a table that hands them out in scattered order."""
  per_row = -(-max_len // page_size)
  num_pages = num_rows * per_row + 5
  cache_config = jaxkv.CacheConfig(
    num_pages=num_pages,
    page_size=page_size,
    num_slots=num_rows,
    pages_per_slot=per_row,
  )
  kv = models.init_kv(config, cache_config)
  pages = np.random.default_rng(2).permutation(np.arange(1, num_pages))
  table = pages[: num_rows * per_row].reshape(num_rows, per_row)
  return jax.tree.map(_poisoned, kv), jnp.asarray(table, jnp.int32)


def _poisoned(leaf: jax.Array) -> jax.Array:
  if jnp.issubdtype(leaf.dtype, jnp.floating):
    return jnp.full_like(leaf, jnp.nan)
  if leaf.dtype == jnp.uint16:  # the bits of a bfloat16 NaN
    return jnp.full_like(leaf, 0x7FC0)
  return leaf


def _whole(params: Any, tokens: Any, config: models.Decoder) -> np.ndarray:
  tokens = jnp.asarray(tokens)
  positions = _positions(np.zeros(len(tokens)), tokens.shape[1])
  return np.asarray(
    models.forward_uncached(params, tokens, positions, config=config)
  )


class _Paged:
  """`forward` with its pages, as a function of a step."""

  def __init__(self, params, config, num_rows, max_len, page_size=4):
    self.run = functools.partial(models.forward, config=config)
    self.params = params
    self.kv, self.table = _pages(config, num_rows, max_len, page_size)

  def __call__(self, tokens, starts, num_tokens, columns=None):
    starts, num_tokens = (
      jnp.asarray(x, jnp.int32) for x in (starts, num_tokens)
    )
    view = paged.View(
      page_table=self.table, starts=starts, num_tokens=num_tokens
    )
    tokens = jnp.asarray(tokens)
    positions = _positions(starts, tokens.shape[1])
    batch = paged.Batch(
      tokens=tokens, positions=positions, views=(view,), columns=columns
    )
    logits, self.kv = self.run(self.params, batch, self.kv)
    return np.asarray(logits)


class TestDecoder:
  @pytest.mark.parametrize(
    "changes",
    [
      {"tied_embeddings": True},
      {"tied_embeddings": False, "num_heads": 6, "num_kv_heads": 2},
    ],
  )
  def test_equals_the_decoder_in_numpy(self, changes):
    config, params, tokens = _model(1, 12, **changes)
    _assert_close(
      _whole(params, tokens, config)[0],
      numpy_decoder.logits(params, tokens[0], config),
    )

  @pytest.mark.parametrize(
    ("page_size", "num_heads", "num_kv_heads"),
    [
      # Every head has its own keys.
      pytest.param(1, 4, 4, marks=pytest.mark.slow),
      (4, 4, 2),  # grouped
      # One key head for all.
      pytest.param(16, 4, 1, marks=pytest.mark.slow),
    ],
  )
  def test_pages_change_nothing(self, page_size, num_heads, num_kv_heads):
    config, params, tokens = _model(
      3, 21, num_heads=num_heads, num_kv_heads=num_kv_heads
    )
    expected = _whole(params, tokens, config)
    step = _Paged(params, config, 3, 24, page_size)
    logits = tiny.in_steps(step, tokens, [17, 5, 9], chunk=6)
    _assert_close(logits, expected)

  def test_pages_change_nothing_in_bfloat16(self):
    config, params, tokens = _model(3, 21, dtype=jnp.bfloat16)
    expected = _whole(params, tokens, config)
    # Eight bits of mantissa through two layers; logits are of order 1.
    step = _Paged(params, config, 3, 24)
    logits = tiny.in_steps(step, tokens, [21] * 3, chunk=6)
    np.testing.assert_allclose(logits, expected, atol=0.06, rtol=0)

  def test_rows_do_not_depend_on_each_other(self):
    config, params, tokens = _model(3, 6)
    changed_tokens = tokens.copy()
    changed_tokens[[0, 2]] = (changed_tokens[[0, 2]] + 7) % _VOCAB
    logits = _Paged(params, config, 3, 24)(tokens, [0] * 3, [6, 6, 5])
    changed_logits = _Paged(params, config, 3, 24)(
      changed_tokens, [0] * 3, [2, 6, 0]
    )
    np.testing.assert_array_equal(logits[1], changed_logits[1])
    row_logits = _Paged(params, config, 1, 24)(tokens[1:2], [0], [6])
    _assert_close(row_logits[0], logits[1])
    np.testing.assert_array_equal(
      _whole(params, tokens, config)[1],
      _whole(params, changed_tokens, config)[1],
    )

  def test_logits_of_all_tokens_or_of_columns(self):
    config, params, tokens = _model(3, 6)
    num_tokens = [6, 3, 0]
    steps = [_Paged(params, config, 3, 24) for _ in range(3)]
    all_, last_logits, no_logits = (
      step(tokens, [0] * 3, num_tokens, columns)
      for step, columns in zip(
        steps,
        (None, jnp.asarray([[5], [2], [0]]), jnp.zeros((3, 0), jnp.int32)),
        strict=True,
      )
    )
    assert last_logits.shape == (3, 1, _VOCAB)
    assert no_logits.shape == (3, 0, _VOCAB)
    _assert_close(last_logits[0, 0], all_[0, 5])
    _assert_close(last_logits[1, 0], all_[1, 2])
    # The same keys and values are kept, whichever logits are asked for.
    next_logits = [step(tokens[:, :1], num_tokens, [1] * 3) for step in steps]
    _assert_close(next_logits[1], next_logits[0])
    _assert_close(next_logits[2], next_logits[0])

  def test_a_token_outside_the_vocabulary_is_not_clamped(self):
    config, params, tokens = _model(3, 6)
    tokens[[0, 1], [2, 1]] = [_VOCAB, -1]
    logits = _Paged(params, config, 3, 24)(tokens, [0] * 3, [6] * 3)
    assert np.isnan(logits[0, 2:]).all()
    assert np.isnan(logits[1, 1:]).all()
    assert np.isfinite(logits[2]).all()

  def test_padding_may_be_anything(self):
    config, params, tokens = _model(3, 6)
    num_tokens = [2, 6, 4]
    padded = np.where(np.arange(6) < np.array(num_tokens)[:, None], tokens, -1)
    runs = [_Paged(params, config, 3, 24) for _ in range(2)]
    for run, inputs in zip(runs, (tokens, padded), strict=True):
      run(inputs.astype(np.int32), [0] * 3, num_tokens)
    logits, padded_logits = (
      run(tokens[:, :1], num_tokens, [1] * 3) for run in runs
    )
    np.testing.assert_array_equal(logits, padded_logits)


class TestConfig:
  def test_other_values_than_decoders_are_refused(self):
    config = _config()
    params, tokens = _params(config), jnp.zeros((1, 2), jnp.int32)
    sizes = jaxkv.CacheConfig(
      num_pages=3, page_size=4, num_slots=1, pages_per_slot=2
    )
    batch = paged.Batch(tokens=tokens, positions=tokens, views=())
    calls = [
      lambda wrong: models.forward(params, batch, (), config=wrong),
      lambda wrong: models.forward_uncached(
        params, tokens, tokens, config=wrong
      ),
      lambda wrong: models.init_kv(wrong, sizes),
      models.cache_groups,
      lambda wrong: models.init_params(jax.random.key(0), wrong),
    ]
    for call in calls:
      for wrong in ([], None, params):
        with pytest.raises(
          TypeError, match=r"`(config|decoder)` must be a Decoder, .*`models"
        ):
          call(wrong)

  def test_is_static_under_jit(self):
    assert hash(_config()) == hash(_config(dtype="float32"))
    assert _config() == _config(dtype=np.float32)
    windows = _config(windows=(3, None))
    assert hash(windows) == hash(_config(windows=(np.int32(3), None)))
    assert windows == _config(windows=(np.int32(3), None)) != _config()

  @pytest.mark.parametrize(
    ("name", "value"),
    [
      ("vocab_size", 0),
      ("num_layers", 1.5),
      ("mlp_dim", True),
      ("num_kv_heads", 3),  # does not divide 4 heads
      ("head_dim", 7),
      ("windows", [3, None]),
      ("windows", ()),
      ("windows", (0, None)),
      ("windows", (True, None)),
      ("windows", (3.0, None)),
      ("windows", (2**31, None)),
      ("vocab_size", 2**31),
      ("rope_base", 0.0),
      ("rope_base", [1e4, 1e6]),
      ("rope_base", "1e4"),
      ("rope_base", (1e4, -1e6)),
      ("rope_base", (1e4, 1e4, 1e6)),
      ("norm_eps", -1.0),
      ("norm_eps", "1e-5"),
      ("norm_eps", np.inf),
      ("dtype", jnp.int32),
    ],
  )
  def test_names_the_wrong_argument(self, name, value):
    windows = {} if name == "dtype" else {"windows": (3, None)}
    # Of the part of the description that it is put in.
    field = {"mlp_dim": "inner_dim", "windows": "windows?"}.get(name, name)
    with pytest.raises(ValueError, match=f"^`{field}` must"):
      _config(**(windows | {name: value}))

  @pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
      (models.Attention, {"rope": models.Rope(dim=10)}, "`rope.dim` must"),
      (models.Attention, {"rope": models.Rope(dim=3)}, "`rope.dim` must"),
      (models.Experts, {"num_chosen": 5}, "`num_chosen` must be at most"),
      (models.Experts, {"num_groups": 3}, "`num_groups` must divide"),
      (models.Experts, {"scores": "sigmod"}, "`scores` must be one of"),
      (models.Experts, {"activation": "swish"}, "`activation` must be one of"),
      (models.Experts, {"num_chosen_groups": 2}, "`num_chosen_groups` must be"),
      (
        models.Experts,
        {"num_groups": 4, "num_chosen_groups": 1},
        "`num_chosen_groups` must be 2 .. 4",
      ),
      (
        models.Experts,
        {"num_groups": 4, "num_chosen_groups": 2, "group_score": "best_two"},
        "`group_score` must be",
      ),
      (models.LatentAttention, {"latent_dim": 0}, "`latent_dim` must"),
      (
        models.LatentAttention,
        {"scale": None, "query_rank": 0},
        "`query_rank`",
      ),
      (models.LatentAttention, {"scale": "1"}, "`scale` must be a finite"),
      (models.Attention, {"window": 2**31}, "`window` must be an int of"),
      (models.Attention, {"scale": np.nan}, "`scale` must be a finite number"),
      (models.Attention, {"soft_cap": 0}, "`soft_cap` must be a positive and"),
      (models.Experts, {"scale": np.inf}, "`scale` must be a finite number"),
      (models.Experts, {"limit": -1.0}, "`limit` must be a positive and"),
      (models.Experts, {"shared_dim": 0}, "`shared_dim` must be an int"),
      (models.Layer, {"attention": 5}, "`attention` must be of Attention or"),
      (
        models.Layer,
        {"mlp": None},
        "`mlp` must be of Mlp or Experts",
      ),
      (models.Decoder, {"logit_cap": 0.0}, "`logit_cap` must be a positive"),
      (models.Decoder, {"embed_scale": "2"}, "`embed_scale` must be a finite"),
      (models.DeltaNet, {"kernel_size": -1}, "`kernel_size` must"),
      (models.DeltaNet, {"kernel_size": 1}, "`kernel_size` must be at least 2"),
      (models.Decoder, {"layers": ()}, "`layers` must be a tuple"),
      (models.Decoder, {"layers": (1,)}, "`layers` must hold Layers"),
    ],
  )
  def test_parts_name_the_wrong_argument(self, cls, changes, message):
    defaults = {
      models.Attention: {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
      models.Experts: {"num_experts": 4, "num_chosen": 2, "inner_dim": 8},
      models.LatentAttention: {
        "num_heads": 4, "latent_dim": 8, "plain_dim": 4, "rotated_dim": 4,
        "value_dim": 4,
      },
      models.DeltaNet: {
        "num_key_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 8,
        "kernel_size": 4,
      },
      models.Layer: {
        "attention": models.Attention(num_heads=1, num_kv_heads=1, head_dim=2),
        "mlp": models.Mlp(inner_dim=2),
      },
      models.Decoder: {
        "vocab_size": 5, "embed_dim": 8, "layers": _config().layers
      },
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
      cls(**(defaults[cls] | changes))

  @pytest.mark.parametrize(
    "value", [[[1, 2]], ((1, 2),), None, jnp.ones((1, 2)), jnp.ones((1, 2)) > 0]
  )
  @pytest.mark.parametrize("name", ["tokens", "positions"])
  def test_inputs_that_are_no_integers_are_refused(self, name, value):
    config = _config()
    params = _params(config)
    call = dict.fromkeys(("tokens", "positions"), jnp.zeros((1, 2), jnp.int32))
    call |= {name: value}
    with pytest.raises(TypeError, match=f"^`{name}` must be"):
      models.forward_uncached(params, **call, config=config)
    kv, table = _pages(config, 1, 4, 4)
    ones = jnp.ones(1, jnp.int32)
    view = paged.View(page_table=table, starts=ones - 1, num_tokens=ones)
    with pytest.raises(TypeError, match=f"^`{name}` must be"):
      models.forward(
        params, paged.Batch(**call, views=(view,)), kv, config=config
      )

  def test_inputs_of_other_shapes_are_refused(self):
    config = _config()
    params = _params(config)
    tokens, positions = jnp.zeros((2, 3), jnp.int32), _positions([0, 0], 3)
    run = models.forward_uncached
    with pytest.raises(ValueError, match="tokens"):
      run(params, tokens[0], positions, config=config)
    with pytest.raises(ValueError, match="positions"):
      run(params, tokens, positions[:1], config=config)
    with pytest.raises(ValueError, match="embed"):
      run(params, tokens, positions, config=_config(vocab_size=5))
    kv, table = _pages(config, 2, 4, 4)
    counts = jnp.full(2, 3, jnp.int32)
    view = paged.View(page_table=table, starts=counts - 3, num_tokens=counts)
    batch = paged.Batch(
      tokens=tokens, positions=positions, views=(view,), columns=counts
    )
    with pytest.raises(ValueError, match=r"columns` must be int32\[2, X\]"):
      models.forward(params, batch, kv, config=config)
