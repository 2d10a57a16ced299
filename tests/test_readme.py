"""The README's code does what it says, however often it is run."""

import pathlib
import re

import jax
import jax.numpy as jnp

import jaxkv

_README = pathlib.Path(__file__).resolve().parents[1] / "README.md"


def _first_screen() -> str:
  match = re.search(r"```python\n(.*?)```", _README.read_text("utf-8"), re.S)
  assert match is not None
  return match[1]


def test_the_loop_runs_and_finds_its_own_pages():
  names = {}
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    exec(compile(_first_screen(), "README.md", "exec"), names)
    before, after = names["before"], names["after"]
    again, _ = names["generate"](after, names["kv"])
  matched = jaxkv.match(after, names["prompts"], names["lengths"])
  assert matched.num_cached.tolist() == [8] * 4
  assert int(jaxkv.stats(after).published) == 20
  assert jaxkv.free_pages(before)[:3] == [1, 2, 3]
  # The second time the prompts hit, and nothing is cached that was not run.
  assert int(jaxkv.stats(again).hits) == 32
  jaxkv.check(again)
  assert int(again.pool.queue.num_free) == 63
  never_run = jnp.concatenate(
    [names["prompts"][:, :8], names["prompts"][:, :4]], axis=1
  )
  never_run = jnp.pad(never_run, ((0, 0), (0, 1)))
  found = jaxkv.match(again, never_run, jnp.full((4,), 13, jnp.int32))
  assert found.num_cached.tolist() == [8] * 4
