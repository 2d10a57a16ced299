"""`help` lists everything public: packages, commands, functions and types."""

import functools
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import __main__ as command_line
from jaxkv import models
from jaxkv import rollout
from tests.models import tiny_decoders as tiny


def _public_modules():
  for module in pkgutil.walk_packages(jaxkv.__path__, "jaxkv."):
    if not re.search(r"\._|__main__", module.name):
      yield module.name


def _quoted(text):
  return set(re.findall(r"`([\w.]+)", text))


def test_help_lists_every_module():
  assert {*_public_modules()} - _quoted(jaxkv.__doc__) == set()


def test_help_lists_every_command(capsys):
  with pytest.raises(SystemExit):
    command_line.main(["--help"])
  commands = set(re.findall(r"^    (\w+)  ", capsys.readouterr().out, re.M))
  assert len(commands) == 2
  assert commands - _quoted(jaxkv.__doc__) == set()


def test_help_lists_every_name():
  assert set(jaxkv.__all__) - _quoted(jaxkv.__doc__) == set()


def test_help_of_rollout_begins_with_the_names_of_a_first_loop():
  names = set(rollout.__all__) - {"devices"}
  assert names - _quoted(rollout.__doc__) == set()
  first_loop, *subjects = rollout.__doc__.split("|---|---|\n")[1:]
  first_names = _quoted(
    "\n".join(re.findall(r"^\| (.*?) \|", first_loop, re.M))
  )
  assert first_names == {
    *("RolloutConfig", "Sampling", "Requests", "init", "generate", "generated")
  }
  assert len(subjects) == 5


@pytest.mark.parametrize("name", ["Model", "Process", "Draft"])
def test_functions_of_users_have_a_signature_and_a_contract(name):
  protocol = getattr(rollout, name)
  text = inspect.getdoc(protocol.__call__) or ""
  parameters = [*inspect.signature(protocol.__call__).parameters][1:]
  assert all(f"{parameter}: " in text for parameter in parameters)
  assert "Returns:" in text and "Callable" not in protocol.__doc__


def test_packages_are_imported_on_first_use():
  """Runs in another process, in which nothing has imported them."""
  lazy = ("models", "rl", "host", "kernels", "integrations")
  program = f"""
import sys, jaxkv
for name in {lazy}:
  assert name in dir(jaxkv), name
assert "jaxkv.models" not in sys.modules and "jaxkv.host" not in sys.modules
for name in {lazy}:
  assert getattr(jaxkv, name) is sys.modules["jaxkv." + name]
"""
  subprocess.run([sys.executable, "-c", program], check=True)


def test_names_are_few():
  """Over all modules; a name that two modules share counts once."""
  names = {
    name
    for module in _public_modules()
    for name in getattr(importlib.import_module(module), "__all__", ())
  }
  assert len(names | {*jaxkv.__all__}) <= 220


@pytest.mark.slow
def test_profiles_name_verbs_steps_and_layers():
  """Names of scopes are in the metadata of compiled programs."""
  cache_config = jaxkv.CacheConfig(
    num_pages=8, page_size=4, num_slots=2, pages_per_slot=4
  )
  decoder = tiny.llama(vocab_size=5)
  state = rollout.init(
    jaxkv.init(cache_config),
    models.init_kv(decoder, cache_config),
    rollout.Requests(jnp.ones((2, 3), jnp.int32), jnp.full((2,), 3, jnp.int32)),
    jax.random.key(0),
    rollout.RolloutConfig(max_new_tokens=2),
  )
  model = functools.partial(models.forward, config=decoder)
  lowered = jax.jit(functools.partial(rollout.generate, model=model)).lower(
    models.init_params(jax.random.key(1), decoder), state
  )
  text = lowered.as_text(debug_info=True)
  steps = ("admit", "fork", "grow", "model", "sample")
  verbs = ("jit(commit)", "jit(free)")
  for name in (*steps, *verbs, "attention", "mlp"):
    assert re.search(rf"[/\"]{re.escape(name)}[/\"]", text), name
