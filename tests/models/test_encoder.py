"""Encoder-decoders: pages of an encoder's tokens, none, and in numpy."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import kv as paged
from jaxkv import models
from tests.models import numpy_encoder_decoder as by_definition

pytestmark = pytest.mark.slow

_VOCAB, _PAGE, _CHUNK = 13, 2, 4
_LENGTHS = np.array([7, 0, 3], np.int32)  # tokens of each row's encoder
_PROMPTS = np.array([6, 1, 3], np.int32)
_ROWS, _INPUT, _TOTAL = 3, 7, 9


def _attention(**changes: Any) -> models.Attention:
  sizes: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "soft_cap": 5.0,
    "scale": 0.4,
  }
  return models.Attention(**(sizes | changes))


def _layer(window: int | None, cross: bool, **changes: Any) -> models.Layer:
  return models.Layer(
    attention=_attention(window=window),
    cross=_attention(rope=None, **changes) if cross else None,
    mlp=models.Mlp(inner_dim=24, activation="gelu_tanh"),
    post_norms=True,
  )


def _config(**changes: Any) -> models.Decoder:
  """Like T5Gemma: an encoder of another width, every second layer a window."""
  shared: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "norm_offset": 1.0,
    "norm_eps": 1e-6,
  }
  encoder = models.Encoder(
    embed_dim=12,
    embed_scale=12**0.5,
    layers=(_layer(3, False), _layer(None, False)) * 2,
    **shared,
  )
  layers = (_layer(3, True), _layer(None, True)) * 2
  sizes = {
    "embed_dim": 16,
    "embed_scale": 4.0,
    "layers": layers,
    "logit_cap": 3.0,
    "encoder": encoder,
  }
  return models.Decoder(**(shared | sizes | changes))


# The second has layers that do not repeat, some without cross-attention, and
# two pools of memory.
_CONFIGS = {
  "t5gemma": _config(),
  "some layers": _config(
    layers=(
      _layer(None, False),
      _layer(None, True, num_kv_heads=1, head_dim=8),
      _layer(3, True, num_kv_heads=1, head_dim=8),
    )
  ),
}


@functools.cache
def _params(name: str) -> Any:
  params = models.init_params(jax.random.key(0), _CONFIGS[name])
  # Norms that are not ones.
  draws = np.random.default_rng(5)
  return jax.tree.map(
    lambda leaf: leaf + 0.1 * draws.normal(size=leaf.shape).astype(np.float32),
    params,
  )


def _tokens(columns: int, seed: int) -> np.ndarray:
  draws = np.random.default_rng(seed)
  return draws.integers(0, _VOCAB, (_ROWS, columns)).astype(np.int32)


def _inputs() -> tuple[jax.Array, jax.Array]:
  """Tokens of the encoder; padding names none."""
  tokens = _tokens(_INPUT, 1)
  tokens[np.arange(_INPUT)[None] >= _LENGTHS[:, None]] = -1
  return jnp.asarray(tokens), jnp.asarray(_LENGTHS)


@functools.cache
def _expected(name: str) -> tuple[list[np.ndarray], np.ndarray]:
  """What the encoder gives for each row, and logits [B, T, V]."""
  params, config = _params(name), _CONFIGS[name]
  inputs, encoded, logits = np.asarray(_inputs()[0]), [], []
  for row, length in enumerate(_LENGTHS):
    encoded.append(by_definition.encode(params, inputs[row, :length], config))
    tokens = _tokens(_TOTAL, 2)[row]
    logits.append(by_definition.logits(params, tokens, encoded[row], config))
  return encoded, np.array(logits)


def _assert_close(found: Any, expected: Any) -> None:
  # Float32 sums through at most 4 layers; logits are of order 1.
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def _positions(starts: Any, columns: int) -> jax.Array:
  starts = jnp.asarray(starts, jnp.int32)
  return starts[:, None] + jnp.arange(columns, dtype=jnp.int32)[None]


def _cache(config: models.Decoder, num_pages: int = 80) -> jaxkv.CacheState:
  return jaxkv.init(
    jaxkv.CacheConfig(
      num_pages=num_pages,
      page_size=_PAGE,
      num_slots=_ROWS,
      pages_per_slot=8,
      groups=models.cache_groups(config),
      prefix_caching=False,
    )
  )


def _views(state: jaxkv.CacheState, counts: Any, lengths: Any) -> Any:
  return tuple(
    jaxkv.view(
      state,
      group=group,
      counts=counts,
      num_encoder_tokens=lengths if kind.holds_encoder else None,
    )
    for group, kind in enumerate(state.config.groups)
  )


class _Paged:
  """`forward` over a cache whose pages are NaN at first."""

  def __init__(self, name: str):
    self.params, self.config = _params(name), _CONFIGS[name]
    self.state = _cache(self.config)
    kv = models.init_kv(self.config, self.state.config)
    self.kv = jax.tree.map(lambda leaf: leaf * jnp.nan, kv)
    self.state, out = jaxkv.admit(
      self.state,
      np.arange(_ROWS),
      _tokens(_TOTAL, 2),
      _PROMPTS,
      num_tokens=[1] * _ROWS,
      num_encoder_tokens=_LENGTHS,
    )
    assert np.all(out.ok)
    inputs, lengths = _inputs()
    self.kv = models.write_encoded(
      self.params,
      models.encode(self.params, inputs, lengths, config=self.config),
      lengths,
      self.kv,
      _views(self.state, [0] * _ROWS, lengths),
      config=self.config,
    )

  def __call__(self, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Logits of int32[B, T] tokens, of which each row has some."""
    self.state, _ = jaxkv.recycle(self.state)
    self.state, out = jaxkv.allocate(self.state, counts)
    assert np.all(out.ok)
    views = _views(self.state, counts, _LENGTHS)
    positions = np.asarray(_positions(self.state.length, tokens.shape[1]))
    logits = self.forward(tokens, positions, counts, views)
    self.state, out = jaxkv.commit(self.state, tokens, counts)
    assert np.all(out.ok)
    return logits

  def forward(self, tokens, positions, counts, views):
    """Logits [B, T, V]."""
    logits, self.kv = models.forward(
      self.params,
      jnp.asarray(tokens),
      jnp.asarray(positions),
      self.kv,
      views,
      config=self.config,
    )
    return np.asarray(logits)


class _Packed(_Paged):
  """Rows with one token stand among the single columns, others in chunks."""

  def forward(self, tokens, positions, counts, views):
    single, chunks = (
      jnp.asarray(np.where(kind, counts, 0).astype(np.int32))
      for kind in (counts == 1, counts > 1)
    )
    packed = tuple(
      paged.PackedView(
        decode=dataclasses.replace(view, counts=single),
        prefill=dataclasses.replace(view, counts=chunks),
      )
      for view in views
    )
    places = [(row, 0) for row in range(_ROWS)]
    for row in np.flatnonzero(counts > 1):
      places += [(row, column) for column in range(counts[row])]
    padding = _ROWS * (1 + _CHUNK) - len(places)
    index = tuple(np.array(places + [(0, 0)] * padding).T)
    out, self.kv = models.forward(
      self.params,
      jnp.asarray(tokens[index][None]),
      jnp.asarray(positions[index][None]),
      self.kv,
      packed,
      jnp.arange(len(index[0]), dtype=jnp.int32),
      config=self.config,
    )
    logits = np.full((*tokens.shape, _VOCAB), np.nan, np.float32)
    for i, (row, column) in enumerate(places):
      if i >= _ROWS or counts[row] == 1:
        logits[row, column] = out[i]
    return logits


def _in_steps(step: Any) -> np.ndarray:
  """Logits of all tokens: prompts in chunks, then one token at a time."""
  tokens = _tokens(_TOTAL, 2)
  found = np.full((*tokens.shape, _VOCAB), np.nan, np.float32)
  starts = np.zeros(_ROWS, np.int32)
  while np.any(starts < _TOTAL):
    counts = np.where(starts < _PROMPTS, _PROMPTS - starts, _TOTAL > starts)
    counts = np.minimum(counts, _CHUNK).astype(np.int32)
    width = _CHUNK if np.any(counts > 1) else 1
    piece = np.zeros((_ROWS, width), np.int32)
    for row, count in enumerate(counts):
      piece[row, :count] = tokens[row, starts[row] : starts[row] + count]
    logits = step(piece, counts)
    for row, count in enumerate(counts):
      found[row, starts[row] : starts[row] + count] = logits[row, :count]
    starts += counts
  return found


class TestTokens:
  @pytest.mark.parametrize("name", _CONFIGS)
  def test_without_memory(self, name):
    params, config = _params(name), _CONFIGS[name]
    inputs, lengths = _inputs()
    encoded = models.encode(params, inputs, lengths, config=config)
    expected, logits = _expected(name)
    for row, length in enumerate(_LENGTHS):
      _assert_close(encoded[row, :length], expected[row][:length])
      assert not np.any(encoded[row, length:])
    found = models.forward_uncached(
      params,
      jnp.asarray(_tokens(_TOTAL, 2)),
      _positions([0] * _ROWS, _TOTAL),
      encoded.at[1].set(jnp.nan),  # padding may be anything
      lengths,
      config=config,
    )
    _assert_close(found, logits)

  @pytest.mark.parametrize("name", _CONFIGS)
  @pytest.mark.parametrize("way", [_Paged, _Packed])
  def test_in_pages(self, way, name):
    step = way(name)
    _assert_close(_in_steps(step), _expected(name)[1])
    jaxkv.check(step.state)

  def test_forks_read_the_same_pages(self):
    step = _Paged("t5gemma")
    tokens = _tokens(_TOTAL, 2)
    step(tokens[:, :3], np.array([3, 0, 0], np.int32))
    state, _ = jaxkv.free(step.state, mask=jnp.asarray([False, True, True]))
    state, out = jaxkv.fork(state, [0], [2])
    assert np.all(out.ok)
    step.state = state
    step.kv = paged.copy(step.kv, out.copies.src, out.copies.dst)
    lengths = np.array([7, 0, 7], np.int32)
    counts = np.array([1, 0, 1], np.int32)
    step.state, _ = jaxkv.allocate(step.state, counts)
    views = _views(step.state, counts, lengths)
    piece = np.repeat(tokens[:1, 3:4], _ROWS, axis=0)
    logits = step.forward(piece, np.full((3, 1), 3, np.int32), counts, views)
    for row in (0, 2):
      _assert_close(logits[row, 0], _expected("t5gemma")[1][0, 3])

  def test_gradients_reach_the_encoder(self):
    params, config = _params("t5gemma"), _CONFIGS["t5gemma"]
    inputs, lengths = _inputs()
    tokens = jnp.asarray(_tokens(3, 2))

    def loss(params):
      encoded = models.encode(params, inputs, lengths, config=config)
      positions = _positions([0] * _ROWS, 3)
      logits = models.forward_uncached(
        params, tokens, positions, encoded, lengths, config=config
      )
      return jnp.sum(jax.nn.log_softmax(logits)[..., 0])

    gradient = jax.jit(jax.grad(loss))(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
      assert np.all(np.isfinite(leaf)) and np.any(leaf), path


class TestMemory:
  def test_groups(self):
    near, far, cross = (
      jaxkv.SlidingWindow(3),
      jaxkv.FullAttention(),
      jaxkv.CrossAttention(),
    )
    config = _CONFIGS["t5gemma"]
    assert models.cache_groups(config) == (near, far, cross, cross)
    kv = models.init_kv(config, _cache(config).config)
    assert (kv.num_layers, kv.num_pages) == (2, 80)
    config = _CONFIGS["some layers"]
    assert models.cache_groups(config) == (far, far, near, cross, cross)
    kv = models.init_kv(config, _cache(config).config)
    assert [(pool.num_kv_heads, pool.head_dim) for pool in kv] == [
      (2, 4),
      (1, 8),
    ]

  def test_in_a_loop_of_one_program(self):
    """Greedy tokens of a `while_loop` are those without any memory."""
    step, config = _Paged("t5gemma"), _CONFIGS["t5gemma"]
    params, lengths = step.params, jnp.asarray(_LENGTHS)
    begin = jnp.asarray(_tokens(1, 2))

    def one(carry, _):
      state, kv, token = carry
      counts = jnp.ones((_ROWS,), jnp.int32)
      state, _ = jaxkv.recycle(state)
      state, _ = jaxkv.allocate(state, counts)
      logits, kv = models.forward(
        params,
        token,
        state.length[:, None],
        kv,
        _views(state, counts, lengths),
        config=config,
      )
      state, _ = jaxkv.commit(state, token, counts)
      token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
      return (state, kv, token), token[:, 0]

    @jax.jit
    def loop(state, kv):
      return jax.lax.scan(one, (state, kv, begin), length=6)[1]

    found = np.asarray(loop(step.state, step.kv)).T
    encoded, _ = _expected("t5gemma")
    for row in range(_ROWS):
      tokens = [int(begin[row, 0])]
      for _ in range(6):
        logits = by_definition.logits(params, tokens, encoded[row], config)
        tokens.append(int(logits[-1].argmax()))
      assert found[row].tolist() == tokens[1:]


class TestErrors:
  def test_descriptions(self):
    cross = _attention(rope=None)
    plain = _layer(None, False)
    with pytest.raises(ValueError, match=r"`cross.window` must be None"):
      dataclasses.replace(plain, cross=dataclasses.replace(cross, window=3))
    with pytest.raises(ValueError, match=r"`cross.rope` must be None"):
      dataclasses.replace(plain, cross=_attention())
    with pytest.raises(ValueError, match="`cross` must be an Attention"):
      models.Layer(attention=cross, mlp=plain.mlp, cross=3)  # pyright: ignore
    with pytest.raises(ValueError, match="`encoder` must be an Encoder"):
      _config(encoder=None)
    with pytest.raises(ValueError, match="`encoder` must be None"):
      _config(layers=(plain,))
    with pytest.raises(ValueError, match=r"`encoder.dtype` must be bfloat16"):
      _config(dtype=jnp.bfloat16)
    encoder = _config().encoder
    with pytest.raises(ValueError, match="`layers` of an Encoder must have"):
      dataclasses.replace(encoder, layers=(_layer(None, True),))
    with pytest.raises(ValueError, match="`vocab_size` must be an int"):
      dataclasses.replace(encoder, vocab_size=0)

  def test_arguments(self):
    params, config = _params("t5gemma"), _CONFIGS["t5gemma"]
    inputs, lengths = _inputs()
    bare = _config(encoder=None, layers=(_layer(None, False),))
    with pytest.raises(ValueError, match="`config` must be a Decoder with an"):
      models.encode(params, inputs, lengths, config=bare)
    with pytest.raises(ValueError, match=r"`tokens` must be \[B, X\]"):
      models.encode(params, inputs[0], lengths, config=config)
    with pytest.raises(TypeError, match="`tokens` must be an array, got list"):
      models.encode(params, [[1, 2]], lengths, config=config)
    with pytest.raises(TypeError, match="`lengths` must be integers"):
      models.encode(params, inputs, lengths > 0, config=config)
    with pytest.raises(ValueError, match="`lengths` must have shape"):
      models.encode(params, inputs, lengths[:1], config=config)
    tokens = jnp.zeros((_ROWS, 1), jnp.int32)
    with pytest.raises(ValueError, match="`encoded` and `encoded_lengths`"):
      models.forward_uncached(params, tokens, tokens, config=config)
    wide = jnp.zeros((_ROWS, 2, 5))
    with pytest.raises(ValueError, match=r"`encoded` must be \[3, X, 12\]"):
      models.forward_uncached(
        params, tokens, tokens, wide, lengths, config=config
      )
    step = _Paged("t5gemma")
    encoded = jnp.zeros((_ROWS, 2, 12))
    views = _views(step.state, [0] * _ROWS, lengths)
    with pytest.raises(ValueError, match="`view` must have a view for each of"):
      models.write_encoded(
        params, encoded, lengths, step.kv, views[:2], config=config
      )
    with pytest.raises(ValueError, match=r"`kv` must have .* pools"):
      models.write_encoded(
        params, encoded, lengths, (step.kv,) * 3, views, config=config
      )
    with pytest.raises(ValueError, match="repeat the row of a prompt"):
      models.forward_uncached(
        params, tokens, tokens, encoded[:1], lengths[:1], config=config
      )

    with pytest.raises(ValueError, match="`decoder` must have no encoder"):
      models.init_dense(config, batch_size=1, max_len=4)

  def test_tokens_that_an_input_lacks_are_nan(self):
    """Behind an input, pages hold what they held before."""
    params, config = _params("t5gemma"), _CONFIGS["t5gemma"]
    inputs, lengths = _inputs()
    encoded = models.encode(params, inputs, lengths, config=config)
    more = lengths.at[1].set(_INPUT + 1)
    tokens = jnp.zeros((_ROWS, 1), jnp.int32)
    logits = models.forward_uncached(
      params, tokens, tokens, encoded, more, config=config
    )
    nan = np.isnan(logits).any(axis=(1, 2))
    np.testing.assert_array_equal(nan, [False, True, False])
    step = _Paged("t5gemma")
    views = _views(step.state, [0] * _ROWS, more)
    kv = models.write_encoded(
      params, encoded, more, step.kv, views, config=config
    )
    pools = kv if isinstance(kv, tuple) else (kv,)
    assert any(np.isnan(np.asarray(pool.k)).any() for pool in pools)

  def test_packed_calls_have_no_last_token(self):
    config = models.llama(
      vocab_size=11, num_layers=1, embed_dim=8, num_heads=2, num_kv_heads=1,
      head_dim=4, mlp_dim=8,
    )  # fmt: skip
    params = models.init_params(jax.random.key(0), config)
    sizes = jaxkv.CacheConfig(
      num_pages=4, page_size=4, num_slots=2, pages_per_slot=1
    )
    cache, _ = jaxkv.allocate(jaxkv.init(sizes), [1, 1])
    view = jaxkv.kv.PackedView(decode=jaxkv.view(cache, counts=[1, 1]))
    call = functools.partial(
      models.forward, params, jnp.zeros((1, 2), jnp.int32),
      jnp.zeros((1, 2), jnp.int32), models.init_kv(config, sizes), view,
      config=config,
    )  # fmt: skip
    assert call(logits="none")[0].shape == (1, 0, 11)
    assert call()[0].shape == (1, 2, 11)
    with pytest.raises(ValueError, match="give `columns`"):
      call(logits="last")

  def test_views(self):
    state = _cache(_CONFIGS["t5gemma"])
    with pytest.raises(ValueError, match="must be given for group 2"):
      jaxkv.view(state, group=2, counts=[0] * _ROWS)
    with pytest.raises(ValueError, match="must be None for group 0"):
      jaxkv.view(state, counts=[0] * _ROWS, num_encoder_tokens=_LENGTHS)
    with pytest.raises(ValueError, match="`num_encoder_tokens` must have"):
      jaxkv.view(state, group=2, counts=[0] * _ROWS, num_encoder_tokens=[1])
