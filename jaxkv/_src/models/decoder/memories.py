"""Four ways to keep keys and values, which differ in nothing else.

| way        | where                                        | used for     |
|------------|----------------------------------------------|--------------|
| `Paged`    | pages (`jaxkv.kv`)                           | decoding     |
| `Dense`    | a stretch for each sequence                  | the baseline |
| `Nowhere`  | those of the same call                       | training     |
| `BothWays` | those of the same call, also of later tokens | encoders     |
"""

import dataclasses
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv import kv as paged
from jaxkv._src.kv.view import AnyView
from jaxkv._src.kv.view import FreshView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import rows_of
from jaxkv._src.models import dense
from jaxkv._src.models.decoder import delta_net
from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import DeltaNet
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.params import Params

Run = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
"""A recurrence, see `Nowhere.recurrent`."""


Project = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""What an encoder gives, [B, X, E'], as keys and values [B, X, K, D]."""


class Place(NamedTuple):
  """Where a layer keeps what it keeps.

  Attributes:
    group: the layer group of the cache.
    layer: int32[], the memory layer.
    pool: which pool of the memory.
    cross_group: the layer group of its cross-attention; None without.
    cross_pool: the pool of that group.
  """

  group: int
  layer: jax.Array | int
  pool: int
  cross_group: int | None = None
  cross_pool: int | None = None


@dataclasses.dataclass(frozen=True)
class Paged:
  """Keys and values in pages.

  Attributes:
    views: of each layer group.
    backend: see `jaxkv.kv.attend`.
    heads: see `jaxkv.kv.attend`.
  """

  views: tuple[AnyView, ...]
  backend: str
  heads: jax.sharding.NamedSharding | None

  def softmax(
    self,
    attention: Attention,
    place: Place,
    weights: Params,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    memory: tuple[Any, ...],
  ) -> tuple[jax.Array, tuple[Any, ...]]:
    """Keeps k and v [B, T, K, D]; what q [B, T, H, D] reads, alike."""
    view = self.views[place.group]
    pool = paged.write(memory[place.pool], view, place.layer, k, v)
    out = paged.attend(
      pool,
      view,
      place.layer,
      q,
      options=_kernel_options(attention, weights),
      backend=self.backend,
      heads=self.heads,
    )
    return out, with_pool(memory, place.pool, pool)

  def cross(
    self,
    attention: Attention,
    place: Place,
    weights: Params,
    q: jax.Array,
    project: Project,
    memory: tuple[Any, ...],
  ) -> jax.Array:
    """What q [B, T, H, D] reads of an encoder's tokens, alike.

    Their keys and values are there since `write_encoded`.
    """
    del project
    assert place.cross_group is not None and place.cross_pool is not None
    return paged.attend(
      memory[place.cross_pool],
      self.views[place.cross_group],
      place.layer,
      q,
      options=_kernel_options(attention, weights),
      causal=False,
      backend=self.backend,
      heads=self.heads,
    )

  def latent(
    self,
    attention: LatentAttention,
    place: Place,
    weights: Params,
    q: tuple[jax.Array, jax.Array],
    latent: jax.Array,
    rotated: jax.Array,
    memory: tuple[Any, ...],
  ) -> tuple[jax.Array, tuple[Any, ...]]:
    """Keeps latents; see `Nowhere.latent`.

    Queries are multiplied by the projection of the keys, so that no key is
    made.
    """
    plain, turned = q
    vector = jnp.concatenate([latent[:, :, None], rotated], axis=-1)
    absorbed = jnp.einsum("bthd,lhd->bthl", plain, weights["key"])
    query = jnp.concatenate([absorbed, turned], axis=-1)
    view = self.views[place.group]
    pool = paged.write(memory[place.pool], view, place.layer, vector)
    out = paged.attend(
      pool,
      view,
      place.layer,
      query,
      options=kernels.AttentionOptions(scale=scale_of(attention)),
      backend=self.backend,
    )
    out = jnp.einsum("bthl,lhv->bthv", out, weights["value"])
    return out, with_pool(memory, place.pool, pool)

  def recurrent(
    self,
    attention: DeltaNet,
    place: Place,
    run: Run,
    inputs: tuple[jax.Array, ...],
    memory: tuple[Any, ...],
  ) -> tuple[jax.Array, tuple[Any, ...]]:
    """Keeps states; see `Nowhere.recurrent`.

    In a `PackedView` no row of the prefill may go past the end of a page; a
    rollout keeps to that.
    """
    del attention
    pool, view = memory[place.pool], self.views[place.group]
    if isinstance(view, paged.PackedView):
      out, pool = _packed(run, inputs, pool, view, place.layer)
    else:
      out, pool = _by_page(run, inputs, pool, view, place.layer)
    return out, with_pool(memory, place.pool, pool)


@dataclasses.dataclass(frozen=True)
class Dense:
  """Keys and values of layers that are all alike, in a `DenseCache`.

  Attributes:
    starts: int32[B], tokens of each row kept before.
    counts: int32[B], tokens of this call to keep.
    num_groups: C, of the cache that it stands for.
  """

  starts: jax.Array
  counts: jax.Array
  num_groups: int

  def softmax(
    self,
    attention: Attention,
    place: Place,
    weights: Params,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    memory: tuple[dense.DenseCache, ...],
  ) -> tuple[jax.Array, tuple[dense.DenseCache, ...]]:
    """See `Paged`."""
    layer = place.layer * self.num_groups + place.group
    cache = dense.write(memory[0], layer, self.starts, self.counts, k, v)
    out = dense.attend(
      cache, layer, self.starts, q, **_options(attention, weights)
    )
    return out, (cache,)

  def latent(self, *_: Any) -> Any:
    """Raises: the baseline knows keys and values alone."""
    raise NotImplementedError(
      "`forward_dense` serves layers with `Attention` alone; use "
      "forward_uncached."
    )

  cross = recurrent = latent


@dataclasses.dataclass(frozen=True)
class Nowhere:
  """No memory: tokens attend to those of the same call.

  Attributes:
    encoded: [B, X, E'], what an encoder gives; None without one.
    lengths: int32[B], the tokens of it.
  """

  encoded: jax.Array | None = None
  lengths: jax.Array | None = None

  def softmax(
    self,
    attention: Attention,
    place: Place,
    weights: Params,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    memory: tuple[()],
  ) -> tuple[jax.Array, tuple[()]]:
    """See `Paged`."""
    del place
    return dense.attend_causal(q, k, v, **_options(attention, weights)), memory

  def cross(
    self,
    attention: Attention,
    place: Place,
    weights: Params,
    q: jax.Array,
    project: Project,
    memory: tuple[()],
  ) -> jax.Array:
    """See `Paged`."""
    del place, memory
    assert self.encoded is not None and self.lengths is not None
    k, v = project(self.encoded)
    options = _options(attention, weights)
    return dense.attend_all(q, k, v, self.lengths, **options)

  def latent(
    self,
    attention: LatentAttention,
    place: Place,
    weights: Params,
    q: tuple[jax.Array, jax.Array],
    latent: jax.Array,
    rotated: jax.Array,
    memory: tuple[()],
  ) -> tuple[jax.Array, tuple[()]]:
    """What queries read from latents.

    Args:
      attention: its sizes.
      place: where it keeps them.
      weights: of the layer.
      q: [B, T, H, plain_dim] and [B, T, H, rotated_dim].
      latent: [B, T, latent_dim].
      rotated: [B, T, 1, rotated_dim], the part of keys that heads share.
      memory: none.

    Returns:
      [B, T, H, value_dim], and the memory.
    """
    del place
    keys = jnp.einsum("btl,lhd->bthd", latent, weights["key"])
    values = jnp.einsum("btl,lhv->bthv", latent, weights["value"])
    shape = (*keys.shape[:3], rotated.shape[3])
    keys = jnp.concatenate([keys, jnp.broadcast_to(rotated, shape)], axis=-1)
    query = jnp.concatenate(q, axis=-1)
    scale = scale_of(attention)
    return dense.attend_causal(query, keys, values, scale=scale), memory

  def recurrent(
    self,
    attention: DeltaNet,
    place: Place,
    run: Run,
    inputs: tuple[jax.Array, ...],
    memory: tuple[()],
  ) -> tuple[jax.Array, tuple[()]]:
    """What a recurrence gives for tokens.

    Args:
      attention: its sizes.
      place: where it keeps states.
      run: takes inputs [R, T, ...], states and counts int32[R]; returns outputs
        [R, T, ...] and the states after so many tokens.
      inputs: [B, T, ...] each.
      memory: none.

    Returns:
      [B, T, ...], and the memory.
    """
    del place
    rows, tokens = inputs[0].shape[:2]
    counts = jnp.full((rows,), tokens, jnp.int32)
    return run(inputs, _zeros(attention, rows), counts)[0], memory


@dataclasses.dataclass(frozen=True)
class BothWays:
  """No memory: tokens attend to all of the same call, to later ones, too.

  Attributes:
    lengths: int32[B], tokens of each row; those after them are padding.
  """

  lengths: jax.Array

  def softmax(
    self,
    attention: Attention,
    place: Place,
    weights: Params,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    memory: tuple[()],
  ) -> tuple[jax.Array, tuple[()]]:
    """See `Paged`."""
    del place
    options = _options(attention, weights)
    return dense.attend_all(q, k, v, self.lengths, **options), memory


def _by_page(
  run: Run,
  inputs: tuple[jax.Array, ...],
  pool: paged.StatePages,
  view: View | FreshView,
  layer: jax.Array | int,
) -> tuple[jax.Array, paged.StatePages]:
  """Rows of tokens, and the states after them.

  A page that is full is found by others, and must hold the state at its end. So
  tokens up to the end of an open page are computed first.
  """
  rows, size = rows_of(view), pool.page_size
  if inputs[0].shape[1] == 1:
    return _once(run, inputs, pool, rows, layer)
  room = -rows.starts % size
  first = jnp.where(room < rows.counts, room, 0)

  def begin(pool: paged.StatePages) -> tuple[jax.Array, paged.StatePages]:
    head = dataclasses.replace(rows, counts=first)
    return _once(run, inputs, pool, head, layer)

  def nothing(pool: paged.StatePages) -> tuple[jax.Array, paged.StatePages]:
    shape = jax.eval_shape(begin, pool)[0]
    return jnp.zeros(shape.shape, shape.dtype), pool

  early, pool = jax.lax.cond(jnp.any(first > 0), begin, nothing, pool)
  column = jnp.arange(inputs[0].shape[1], dtype=jnp.int32)[None]
  later = _columns(inputs, first[:, None] + column)
  rest = dataclasses.replace(
    rows, starts=rows.starts + first, counts=rows.counts - first
  )
  out, pool = _once(run, later, pool, rest, layer)
  (out,) = _columns((out,), jnp.maximum(column - first[:, None], 0))
  mask = (column < first[:, None]).reshape(*out.shape[:2], 1, 1)
  return jnp.where(mask, early, out), pool


def _columns(
  arrays: tuple[jax.Array, ...], column: jax.Array
) -> tuple[jax.Array, ...]:
  """The columns int32[B, T] of arrays [B, T, ...]."""
  row = jnp.arange(column.shape[0], dtype=jnp.int32)[:, None]
  return tuple(array.at[row, column].get(mode="clip") for array in arrays)


def _packed(
  run: Run,
  inputs: tuple[jax.Array, ...],
  pool: paged.StatePages,
  view: paged.PackedView,
  layer: jax.Array | int,
) -> tuple[jax.Array, paged.StatePages]:
  """Single tokens [1, B, ...] as rows, then those of prompts."""
  decode = rows_of(view.decode)
  count = decode.starts.shape[0]
  single = tuple(array[0, :count, None] for array in inputs)
  out, pool = _once(run, single, pool, decode, layer)
  out = out[:, 0]
  if view.prefill is not None:
    columns = inputs[0].shape[1] - count
    counts = view.prefill.counts
    width = min(pool.page_size, columns)
    rows = tuple(
      delta_net.to_rows(array[0, count:], counts, width) for array in inputs
    )
    more, pool = _once(run, rows, pool, view.prefill, layer)
    more = delta_net.to_columns(more, counts, columns)
    out = jnp.concatenate([out, more])
  return out[None], pool


def _once(
  run: Run,
  inputs: tuple[jax.Array, ...],
  pool: paged.StatePages,
  rows: View,
  layer: jax.Array | int,
) -> tuple[jax.Array, paged.StatePages]:
  states = paged.read_state(pool, rows, layer)
  out, states = run(inputs, states, rows.counts)
  return out, paged.write_state(pool, rows, layer, states)


def _zeros(attention: DeltaNet, rows: int) -> dict[str, jax.Array]:
  """The states of sequences without tokens."""
  return {
    name: jnp.zeros((rows, *shape), dtype)
    for name, (shape, dtype) in state_shapes(attention).items()
  }


def state_shapes(
  attention: DeltaNet,
) -> dict[str, tuple[tuple[int, ...], Any]]:
  """For `jaxkv.kv.init_states`: what a recurrent layer carries."""
  a = attention
  return {
    "convolution": ((a.num_channels, a.kernel_size - 1), jnp.float32),
    "delta": ((a.num_value_heads, a.key_dim, a.value_dim), jnp.float32),
  }


def scale_of(attention: LatentAttention) -> float:
  """The factor of the logits."""
  if attention.scale is not None:
    return attention.scale
  return (attention.plain_dim + attention.rotated_dim) ** -0.5


def _options(attention: Attention, weights: Params) -> dict[str, Any]:
  return {
    "window": attention.window,
    "scale": attention.scale,
    "soft_cap": attention.soft_cap,
    "sinks": weights.get("sinks"),
  }


def _kernel_options(
  attention: Attention, weights: Params
) -> kernels.AttentionOptions:
  return kernels.AttentionOptions(**_options(attention, weights))


def with_pool(
  memory: tuple[Any, ...], number: int, pool: Any
) -> tuple[Any, ...]:
  """The memory with another pool in place of one."""
  return (*memory[:number], pool, *memory[number + 1 :])
