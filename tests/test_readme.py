"""The README's code does what it says, however often it is run."""

import dataclasses
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv

_README = pathlib.Path(__file__).resolve().parents[1] / "README.md"


def _names_of(heading: str) -> dict[str, Any]:
  """What the first example under a heading defines."""
  text = _README.read_text("utf-8").partition(f"## {heading}\n")[2]
  match = re.search(r"```python\n(.*?)```", text, re.S)
  assert match is not None
  names = {}
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    exec(compile(match[1], "README.md", "exec"), names)
  return names


def test_the_loop_runs_and_finds_its_own_pages():
  names = _names_of("In a loop of your own")
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
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


def test_windows_give_pages_back():
  names = _names_of("Groups")
  state, tokens = names["state"], names["tokens"]
  assert names["given_back"].num_pages.tolist() == [3, 3]
  found = jaxkv.match(state, tokens, names["twenty"])
  assert found.num_cached.tolist() == [16, 16]
  assert int(state.pool.queue.num_free) == 63
  jaxkv.check(state)


def test_the_scheduler_steps():
  names = _names_of("For a scheduler in Python")
  ids = ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
  assert names["new"].get_page_ids() == ids
  assert [len(new) for new in names["answers"][0].get_page_ids()] == [0, 0]
  assert names["found"] == 24
  assert names["pages"].get_page_ids()[1][:4] == [0] * 4
  assert names["full"][0] == 1 and names["window"][:4] == [0] * 4
  assert names["view"].page_table.tolist() == [names["full"]]
  assert len(names["full"]) == len(names["window"]) == -(-27 // 4)
  jaxkv.check(names["manager"].state)


def test_the_loop_ends_where_pages_run_out():
  """What finds no page is given up, and its pages go to others."""
  names = _names_of("In a loop of your own")
  with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
    small = jaxkv.init(dataclasses.replace(names["sizes"], num_pages=14))
    after, _ = jax.jit(names["generate"])(small, names["kv"])
  assert int(after.pool.queue.num_free) == 13
  jaxkv.check(after)
