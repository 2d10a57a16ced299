"""Inside a shard, and in a process with 64-bit types, verbs do the same."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxkv
from tests.cache.by_hand import config
from tests.cache.by_hand import ints
from tests.cache.by_hand import life


class TestPlaces:
  @pytest.mark.deep
  @pytest.mark.parametrize("fresh", ["state", "tokens", "neither"])
  def test_inside_a_shard(self, fresh):
    """Arrays made inside, `fresh`, vary over no axis until they must."""
    mesh = jax.make_mesh(
      (4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    cache_config = config()
    states = jax.tree.map(
      lambda leaf: jnp.stack([leaf] * 4), jaxkv.init(cache_config)
    )
    tokens = jnp.arange(36, dtype=jnp.int32).reshape(4, 1, 9)
    lengths = jnp.full((4, 1), 9, jnp.int32)

    @functools.partial(
      jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    def run(state, tokens, lengths):
      state = jax.tree.map(lambda leaf: leaf[0], state)
      if fresh == "state":
        state = jaxkv.init(cache_config, jaxkv.salt(""))
      tokens = tokens[0]
      if fresh == "tokens":
        tokens = jnp.ones((1, 9), jnp.int32)
      result = life(state, tokens, ints(9) if fresh == "tokens" else lengths[0])
      return jax.tree.map(lambda leaf: leaf[None], result)

    _, (ok, cut, num_cached) = jax.jit(run)(states, tokens, lengths)
    assert np.asarray(ok).all()
    assert np.asarray(cut).all()
    assert np.asarray(num_cached).tolist() == [[8]] * 4

  @pytest.mark.slow
  def test_with_64_bit_types(self):
    """The same in a process whose default integer is int64."""
    program = (
      "import jax, jaxkv, jax.numpy as jnp\n"
      "from tests.cache.by_hand import life, config, ints\n"
      "state, out = jax.jit(life)("
      "jaxkv.init(config()), jnp.arange(9, dtype=jnp.int32)[None], ints(9))\n"
      "jaxkv.check(state)\n"
      "print(out[2].tolist())"
    )
    done = subprocess.run(
      [sys.executable, "-c", program],
      env=_environment(JAX_ENABLE_X64="1"),
      capture_output=True,
      text=True,
      check=False,
    )
    assert done.stdout.split("\n")[0] == "[8]", done.stderr


def _environment(**more: str) -> dict[str, str]:
  root = pathlib.Path(__file__).resolve().parents[2]
  paths = os.pathsep.join([str(root), str(root / "kernels")])
  return {**os.environ, "PYTHONPATH": paths, **more}
