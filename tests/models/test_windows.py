"""The decoder with windows and rotary bases by layer, over a real cache."""

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
from tests.models import numpy_decoder
from tests.models import tiny_decoders as tiny
from tests.tools.tiers import slow_except

pytestmark = pytest.mark.slow

_VOCAB = 13
_PAGE = 2
_CHUNK = 5
_ROWS = 3
_TOTAL = 19
# Rows end their prompts at different times: some steps do both.
_PROMPTS = (14, 1, 6)

# Five local layers and a global one, as in Gemma 3; neighbours that differ, in
# layers that do not repeat; windows alone.
_PATTERNS: dict[str, dict[str, Any]] = {
  "five and one": {
    "num_layers": 12,
    "windows": (3, 3, 3, 3, 3, None),
    "rope_base": (10.0,) * 5 + (1000.0,),
  },
  "once": {
    "num_layers": 3,
    "windows": (4, None, 1),
    "rope_base": (10.0, 100.0, 1000.0),
  },
  "windows alone": {"num_layers": 2, "windows": (4,)},
}


_config = functools.partial(
  tiny.llama, vocab_size=_VOCAB, num_layers=4, num_heads=4, num_kv_heads=2
)


def _windows(config: models.Decoder) -> list[int | None]:
  """Of each layer group."""
  return list(dict.fromkeys(layer.attention.window for layer in config.layers))


def _params(config: models.Decoder) -> Any:
  return models.init_params(jax.random.key(0), config)


def _tokens() -> np.ndarray:
  shape = (_ROWS, _TOTAL)
  return np.random.default_rng(1).integers(0, _VOCAB, shape).astype(np.int32)


@functools.cache
def _expected(pattern: str) -> np.ndarray:
  config = _config(**_PATTERNS[pattern])
  params = _params(config)
  return np.array([numpy_decoder.logits(params, t, config) for t in _tokens()])


def _assert_close(actual: Any, expected: Any) -> None:
  # Float32 sums through at most 12 layers; logits are of order 1.
  np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


def _most_pages(window: int | None) -> int:
  """Pages that a sequence may hold for the layers of one window."""
  if window is None:
    return -(-_TOTAL // _PAGE)
  return -(-(window - 1 + _CHUNK) // _PAGE) + 1


class _Paged:
  """`forward` and the cache, in a pool without a page to spare."""

  def __init__(self, config: models.Decoder):
    self.config = config
    self.params = _params(config)
    self.most = np.array([_most_pages(window) for window in _windows(config)])
    groups = models.cache_groups(config)
    num_pages = np.ones(1 + max(kind.pool for kind in groups), int)
    np.add.at(num_pages, [kind.pool for kind in groups], _ROWS * self.most)
    cache_config = jaxkv.CacheConfig(
      num_pages=tuple(num_pages.tolist()),
      page_size=_PAGE,
      num_slots=_ROWS,
      pages_per_slot=-(-_TOTAL // _PAGE),
      groups=groups,
    )
    self.state = jaxkv.init(cache_config)
    self.kv = models.init_kv(config, cache_config)
    self.num_recycled = 0

  def __call__(self, tokens: np.ndarray, starts: Any, num_tokens: Any) -> Any:
    """Logits of int32[B, T] tokens, of which each row has some."""
    self.state, recycled = jaxkv.recycle(self.state)
    self.num_recycled += int(recycled.num_recycled_pages.sum())
    self.state, out = jaxkv.allocate(self.state, num_tokens)
    assert np.all(out.ok)
    num_held = self.state.num_pages - self.state.num_skipped_pages
    assert np.all(np.asarray(num_held) <= self.most)
    self._poison_free_pages()
    views = tuple(
      jaxkv.view(self.state, group=group, num_tokens=num_tokens)
      for group in range(len(models.cache_groups(self.config)))
    )
    columns = np.arange(tokens.shape[1], dtype=np.int32)
    positions = starts[:, None] + columns
    logits = self.forward(tokens, positions, num_tokens, views)
    self.state, out = jaxkv.commit(self.state, tokens, num_tokens)
    assert np.all(out.ok)
    return logits

  def forward(self, tokens, positions, num_tokens, views):
    """Logits [B, T, V]."""
    batch = paged.Batch(
      tokens=jnp.asarray(tokens), positions=jnp.asarray(positions), views=views
    )
    logits, self.kv = models.forward(
      self.params, batch, self.kv, config=self.config
    )
    return np.asarray(logits)

  def _poison_free_pages(self) -> None:
    """Poisons free pages and those behind a window."""
    is_free = np.ones(self.state.config.total_pages + 1, bool)
    is_free[np.asarray(self.state.page_table)] = False
    is_free[0] = True

    def poisoned(pool: paged.KVPages) -> paged.KVPages:
      rows = is_free[pool.first_page :][: pool.num_pages]
      rows = jnp.tile(jnp.asarray(rows), pool.num_layers).reshape(-1, 1, 1, 1)
      return dataclasses.replace(
        pool,
        k=jnp.where(rows, jnp.nan, pool.k),
        v=jnp.where(rows, jnp.nan, pool.v),
      )

    self.kv = jax.tree.map(
      poisoned, self.kv, is_leaf=lambda pool: isinstance(pool, paged.KVPages)
    )


class TestTokens:
  @pytest.mark.fast
  @slow_except("pattern", _PATTERNS, "once")
  @pytest.mark.parametrize("pattern", _PATTERNS)
  def test_equal_the_decoder_in_numpy(self, pattern):
    step = _Paged(_config(**_PATTERNS[pattern]))
    logits = tiny.in_steps(step, _tokens(), _PROMPTS, _CHUNK)
    _assert_close(logits, _expected(pattern))
    assert step.num_recycled > 0
    jaxkv.check(step.state)

  @pytest.mark.parametrize("pattern", _PATTERNS)
  def test_logits_without_memory(self, pattern):
    config = _config(**_PATTERNS[pattern])
    tokens = jnp.asarray(_tokens())
    positions = jnp.arange(_TOTAL, dtype=jnp.int32)[None]
    logits = models.forward_uncached(
      _params(config),
      tokens,
      jnp.broadcast_to(positions, tokens.shape),
      config=config,
    )
    _assert_close(logits, _expected(pattern))


class TestMemory:
  def test_weights_are_copied_a_layer_at_a_time(self):
    """Not those of all layers of a repetition, before the first one."""
    tokens = jnp.zeros((1, 1), jnp.int32)

    def temporary(windows):
      config = _config(num_layers=6, mlp_dim=4096, windows=windows)
      run = functools.partial(models.forward_uncached, config=config)
      compiled = jax.jit(run).lower(_params(config), tokens, tokens).compile()
      return compiled.memory_analysis().temp_size_in_bytes

    assert temporary((3,) * 5 + (None,)) < 1.5 * temporary((None,))

  @pytest.mark.fast
  def test_wrong_numbers_of_views_and_layers_are_refused(self):
    config = _config(windows=(3, None))
    cache_config = jaxkv.CacheConfig(
      num_pages=9,
      page_size=_PAGE,
      num_slots=1,
      pages_per_slot=4,
      groups=models.cache_groups(config),
    )

    def call(num_views, num_layers):
      kv = paged.init(
        cache_config,
        num_layers=num_layers,
        num_kv_heads=2,
        head_dim=4,
        dtype=config.dtype,
      )
      views = tuple(
        jaxkv.view(jaxkv.init(cache_config), group=group % 2, num_tokens=[1])
        for group in range(num_views)
      )
      token = jnp.zeros((1, 1), jnp.int32)
      batch = paged.Batch(tokens=token, positions=token, views=views)
      models.forward(_params(config), batch, kv, config=config)

    call(2, 2)
    for num_views in (0, 1, 3):
      with pytest.raises(
        ValueError, match=r"`batch.views` must .* cache_groups"
      ):
        call(num_views, 2)
    with pytest.raises(ValueError, match=r"`kv` must have 2 layers .* got 1"):
      call(2, 1)

  def test_groups_of_different_page_sizes_are_refused(self):
    cache_config = jaxkv.CacheConfig(
      num_pages=9,
      page_size=_PAGE,
      num_slots=1,
      pages_per_slot=4,
      groups=(jaxkv.SlidingWindow(3, page_size=4), jaxkv.FullAttention()),
    )
    message = r"`config` must have one page size .* got \(4, 2\)"
    with pytest.raises(ValueError, match=message):
      models.init_kv(_config(windows=(3, None)), cache_config)
