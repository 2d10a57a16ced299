"""Records of the experts of tokens: read from pages and used again."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec

import jaxkv
from jaxkv import kv as paged
from jaxkv import models
from jaxkv._src.models.decoder import mlp as mlps
from tests.models import tiny_decoders as tiny
from tests.models.chosen_experts import chosen_experts

pytestmark = pytest.mark.slow

_TOKENS, _ROWS = 13, 2
_ATTENTION = tiny.attention()
_WINDOW = tiny.attention(window=5, sinks=True)
_EXPERTS = {
  "plain": tiny.EXPERTS,
  "limit": models.Experts(
    num_experts=5, num_chosen=3, inner_dim=12, scores="chosen_softmax",
    router_biased=True, biased=True, limit=2.0,
  ),
  "groups": models.Experts(
    num_experts=8, num_chosen=2, inner_dim=12, scores="sigmoid", scale=2.5,
    corrected=True, num_groups=4, num_chosen_groups=2, group_score="best_two",
    shared_dim=12,
  ),
  "shared": models.Experts(
    num_experts=300, num_chosen=4, inner_dim=4, shared_dim=12,
    shared_gated=True,
  ),
}  # fmt: skip


def _layers(
  attentions: tuple[Any, ...], experts: str
) -> tuple[models.Layer, ...]:
  return tuple(tiny.layer(mixer, _EXPERTS[experts]) for mixer in attentions)


_DENSE = tiny.layer(tiny.LATENTS)
# As in Mixtral, gpt-oss, DeepSeek-V3 and Qwen3-Next.
_LAYERS = {
  "plain": _layers((_ATTENTION,) * 3, "plain"),
  "windows": _layers((_WINDOW, _ATTENTION) * 2, "limit"),
  "latents": (_DENSE, *_layers((tiny.LATENTS,) * 2, "groups")),
  "states": _layers((tiny.DELTA_NET, tiny.DELTA_NET, _ATTENTION), "shared"),
}
over_decoders = pytest.mark.parametrize("name", _LAYERS)


def _decoder(name: str) -> models.Decoder:
  return tiny.decoder(_LAYERS[name])


@functools.cache
def _params(name: str) -> Any:
  """Router and correction are large, so that experts differ."""
  params = models.init_params(jax.random.key(0), _decoder(name))

  def louder(path: Any, leaf: jax.Array) -> jax.Array:
    label = path[-1].key
    if label == "correction":
      return jax.random.normal(jax.random.key(1), leaf.shape, leaf.dtype)
    return leaf * 5 if label == "router" else leaf

  return jax.tree_util.tree_map_with_path(louder, params)


def _inputs() -> tuple[jax.Array, jax.Array]:
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, tiny.VOCABULARY, (_ROWS, _TOKENS)).astype(np.int32)
  column = jnp.arange(_TOKENS, dtype=jnp.int32)[None]
  return jnp.asarray(tokens), jnp.broadcast_to(column, tokens.shape)


@functools.cache
def _chosen(name: str) -> jax.Array:
  return chosen_experts(_params(name), *_inputs(), config=_decoder(name))


@functools.cache
def _others(name: str) -> jax.Array:
  """Experts that tokens would not choose; every third token chooses."""
  chosen = _chosen(name)
  num_experts = _LAYERS[name][-1].mlp.num_experts  # pyright: ignore
  rolled = (chosen + 1) % num_experts
  is_unset = jnp.arange(_TOKENS, dtype=jnp.int32) % 3 == 0
  return jnp.where(is_unset[None, :, None, None], -1, rolled).astype(jnp.int16)


def _in_pages(
  name: str, experts: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Logits [B, T, V] and experts [B, T, J, k] of prompts in two chunks."""
  config, (tokens, positions) = _decoder(name), _inputs()
  cache_config = _sizes(config)
  columns = 4
  kv = models.init_kv(config, cache_config, record_experts=True)
  rng = np.random.default_rng(4)
  numbers = cache_config.numbers
  free_pages = [
    first_page + rng.permutation(np.arange(1, num_pages)).astype(np.int32)
    for first_page, num_pages in zip(
      numbers.first_pages, numbers.sizes, strict=True
    )
  ]
  tables = []
  for kind in cache_config.groups:
    pages, free_pages[kind.pool] = np.split(
      free_pages[kind.pool], [_ROWS * columns]
    )
    tables.append(jnp.asarray(pages.reshape(_ROWS, columns)))
  logits = []
  width = -(-_TOKENS // 2)
  for start in (0, width):
    part = (slice(None), np.arange(start, start + width) % _TOKENS)
    starts = jnp.full((_ROWS,), start, jnp.int32)
    num_tokens = jnp.minimum(width, _TOKENS - starts)
    views = tuple(
      paged.View(page_table=table, starts=starts, num_tokens=num_tokens)
      for table in tables
    )
    batch = paged.Batch(
      tokens=tokens[part], positions=positions[part], views=views
    )
    chunk_logits, kv = models.forward(
      _params(name), batch, kv,
      config=config, experts=None if experts is None else experts[part],
    )  # fmt: skip
    logits.append(chunk_logits)
  lengths = jnp.full((_ROWS,), _TOKENS, jnp.int32)
  read = paged.read_expert_ids(kv[-1], tables[kv[-1].group], lengths)
  assert np.all(np.asarray(read[:, _TOKENS:]) == -1)
  return jnp.concatenate(logits, axis=1)[:, :_TOKENS], read[:, :_TOKENS]


def _sizes(config: models.Decoder) -> jaxkv.CacheConfig:
  return tiny.cache_config(
    config, num_pages=40, page_size=4, num_slots=1, pages_per_slot=5
  )


@over_decoders
def test_pages_have_the_experts_of_a_prompt_in_chunks(name):
  """Equal to those without a memory."""
  _, read = _in_pages(name)
  expected = _chosen(name)
  assert expected.shape[2] == sum(
    isinstance(layer.mlp, models.Experts) for layer in _LAYERS[name]
  )
  np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize("name", ["windows", "latents"])
def test_given_experts_are_used_and_recorded(name):
  """With and without pages; those below 0 are chosen by the tokens."""
  experts = _others(name)
  config, inputs = _decoder(name), _inputs()
  run = functools.partial(models.forward_uncached, config=config)
  logits = run(_params(name), *inputs, experts=experts)
  used = chosen_experts(_params(name), *inputs, config=config, experts=experts)
  expected = np.asarray(experts, np.int32)
  np.testing.assert_array_equal(np.where(expected < 0, -1, used), expected)
  assert np.all(np.asarray(used) >= 0)
  # Float32 sums of at most 64 terms of order 1, added in another order.
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  paged_logits, read = _in_pages(name, experts)
  np.testing.assert_array_equal(read, used)
  close(paged_logits, logits)
  free_logits = run(_params(name), *inputs)
  assert float(jnp.max(jnp.abs(free_logits - logits))) > 1e-2
  close(run(_params(name), *inputs, experts=_chosen(name)), free_logits)


def _sigmoid(x: Any) -> Any:
  return 1 / (1 + np.exp(-x))


def _expert(token: Any, w: Any, mlp: models.Experts, index: int) -> Any:

  def project(x: Any, name: str) -> Any:
    out = x @ w[name][index]
    return out + w[f"{name}_bias"][index] if mlp.biased else out

  gate, up = project(token, "expert_gate"), project(token, "expert_up")
  if mlp.limit is None:
    inner = gate * _sigmoid(gate) * up
  else:
    gate = np.minimum(gate, mlp.limit)
    up = np.clip(up, -mlp.limit, mlp.limit)
    inner = (up + 1) * gate * _sigmoid(1.702 * gate)
  return project(inner, "expert_down")


def _mixture(token: Any, w: Any, mlp: models.Experts, chosen: Any) -> Any:
  """The experts that are given, and the one that all tokens share."""
  scores = token @ w["router"] + w.get("router_bias", 0)
  scores = _sigmoid(scores) if mlp.scores == "sigmoid" else np.exp(scores)
  factors = scores[chosen] / scores[chosen].sum() * mlp.scale
  out = np.zeros_like(token)
  for index, factor in zip(chosen, factors, strict=True):
    out = out + factor * _expert(token, w, mlp, index)
  if mlp.shared_dim is None:
    return out
  gate = token @ w["shared_gate"]
  shared = gate * _sigmoid(gate) * (token @ w["shared_up"]) @ w["shared_down"]
  if mlp.shared_gated:
    shared = shared * _sigmoid(token @ w["shared_switch"])
  return out + shared


@pytest.mark.fast
@over_decoders
def test_given_experts_in_numpy(name):
  mlp = _LAYERS[name][-1].mlp
  assert isinstance(mlp, models.Experts)
  segment = _params(name)["layers"][-1]
  weights = jax.tree.map(lambda leaf: leaf[-1], segment[-1])
  x = np.random.default_rng(2).normal(size=(1, _TOKENS, 16)).astype(np.float32)
  ids = np.random.default_rng(3).permuted(
    np.tile(np.arange(mlp.num_experts), (_TOKENS, 1)), axis=1
  )[:, : mlp.num_chosen]
  chosen = jnp.asarray(ids, jnp.int32)[None]
  mixture = jax.jit(mlps.mixture, static_argnums=2)
  out, used = mixture(jnp.asarray(x), weights, mlp, chosen)
  np.testing.assert_array_equal(used, chosen)
  doubles = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)
  expected = [
    _mixture(token.astype(np.float64), doubles, mlp, experts)
    for token, experts in zip(x[0], ids, strict=True)
  ]
  np.testing.assert_allclose(out[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.fast
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_each_expert_runs_on_its_own_device():
  mlp = models.Experts(num_experts=4, num_chosen=2, inner_dim=8)
  rng = np.random.default_rng(4)
  shapes = {"expert_gate": (4, 6, 8), "expert_up": (4, 6, 8)}
  shapes |= {"expert_down": (4, 8, 6), "router": (6, 4)}
  weights = {
    name: jnp.asarray(rng.normal(size=shape), jnp.float32)
    for name, shape in shapes.items()
  }
  x = jnp.asarray(rng.normal(size=(2, 5, 6)), jnp.float32)
  expected, _ = mlps.mixture(x, weights, mlp)
  mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
  split = PartitionSpec("data")
  specs = dict.fromkeys(weights, split) | {"router": PartitionSpec()}
  out, _ = jax.shard_map(
    functools.partial(mlps.mixture, axis="data", experts=mlp),
    mesh=mesh,
    in_specs=(split, specs),
    out_specs=(split, split),
  )(x, weights)
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["latents"])
def test_gradients_with_experts_that_are_given(name):
  """Given the chosen experts: as without. Given others: the routers' slope."""
  inputs, config = _inputs(), _decoder(name)

  @jax.jit
  def loss(params: Any, experts: jax.Array | None) -> jax.Array:
    logits = models.forward_uncached(
      params, *inputs, config=config, experts=experts
    )
    return -jnp.mean(jax.nn.log_softmax(logits)[:, :, 3])

  params = _params(name)
  gradient = jax.jit(jax.grad(loss))
  plain, replayed = (gradient(params, x) for x in (None, _chosen(name)))
  check = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
  jax.tree.map(check, plain, replayed)
  fixed = chosen_experts(params, *inputs, config=config, experts=_others(name))
  slope = jax.tree_util.tree_map_with_path(
    lambda path, leaf: leaf * float(path[-1].key == "router"),
    gradient(params, fixed),
  )
  squared_norm = sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(slope))
  step = 0.02 / squared_norm**0.5
  ends = [
    jax.tree.map(lambda p, g, s=sign: p + s * step * g, params, slope)
    for sign in (1.0, -1.0)
  ]
  measured = float(loss(ends[0], fixed) - loss(ends[1], fixed)) / (2 * step)
  # The third derivative along routers, which are of order 1.
  np.testing.assert_allclose(measured, squared_norm, rtol=1e-2)


def test_an_expert_id_out_of_range_gives_nan():
  experts = _chosen("plain").at[0, 5, 0, 1].set(6)
  logits = models.forward_uncached(
    _params("plain"), *_inputs(), config=_decoder("plain"), experts=experts
  )
  assert np.all(np.isnan(logits[0, 5:]))


@pytest.mark.fast
class TestArguments:
  def test_a_decoder_without_experts_is_refused(self):
    config = tiny.decoder((_DENSE,))
    cache_config = _sizes(config)
    with pytest.raises(
      ValueError, match=r"`decoder` .* got none; leave out `record_"
    ):
      models.init_kv(config, cache_config, record_experts=True)
    with pytest.raises(
      ValueError, match=r"`config` .* got none; leave out `experts`"
    ):
      models.forward_uncached(
        {}, *_inputs(), config=config, experts=jnp.zeros((2, 13, 1, 2), int)
      )

  def test_a_decoder_of_windows_alone_is_refused(self):
    layers = _layers((_WINDOW,), "plain")
    config = tiny.decoder(layers)
    cache_config = _sizes(config)
    with pytest.raises(ValueError, match=r"`decoder` must .* full attention"):
      models.init_kv(config, cache_config, record_experts=True)

  def test_different_numbers_of_chosen_experts_are_refused(self):
    layers = _layers((_ATTENTION,), "plain") + _layers((_ATTENTION,), "limit")
    config = tiny.decoder(layers)
    with pytest.raises(ValueError, match=r"one `num_chosen` .* got \[2, 3\]"):
      chosen_experts({}, *_inputs(), config=config)

  def test_experts_of_another_shape_are_refused(self):
    run = functools.partial(
      models.forward_uncached, {}, *_inputs(), config=_decoder("plain")
    )
    with pytest.raises(ValueError, match=r"`experts` must .* \[2, 13, 3, 2\]"):
      run(experts=jnp.zeros((2, 13, 3, 1), jnp.int32))
    with pytest.raises(TypeError, match=r"`experts` must be signed .* uint8"):
      run(experts=jnp.zeros((2, 13, 3, 2), jnp.uint8))

  def test_a_memory_of_another_decoder_is_refused(self):
    config, tokens = _decoder("plain"), jnp.zeros((1, 1), jnp.int32)
    cache_config = _sizes(config)
    kv = models.init_kv(config, cache_config)
    expert_ids = paged.init_expert_ids(cache_config, num_layers=3, width=4)
    view = jaxkv.view(jaxkv.init(cache_config), num_tokens=[1])
    batch = paged.Batch(tokens=tokens, positions=tokens, views=(view,))
    with pytest.raises(
      ValueError, match="`kv` must have ExpertIdPages with num_layers=3, width"
    ):
      models.forward({}, batch, (kv, expert_ids), config=config)

  def test_pretrained_models_record_experts_on_request(self):
    config = _decoder("plain")
    model = models.Pretrained(
      config=config, params={}, max_length=20, stop_tokens=(),
      open_tokenizer=NotImplemented,
    )  # fmt: skip
    kv = model.init_kv(_sizes(config), record_experts=True)
    assert isinstance(kv[-1], paged.ExpertIdPages)
    assert isinstance(model.init_kv(_sizes(config)), paged.KVPages)

  def test_records_have_the_smallest_dtype(self):
    for name, dtype in (("plain", np.uint8), ("states", np.uint16)):
      config = _decoder(name)
      cache_config = _sizes(config)
      kv = models.init_kv(config, cache_config, record_experts=True)
      assert kv[-1].values.dtype == dtype
      assert kv[-1].group == len(cache_config.groups) - 1
