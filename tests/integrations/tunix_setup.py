"""Tiny models, words and trainers of tunix."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

NUM_WORDS = 32
PAD, BOS, EOS = 0, 1, 2
HEADS, HEAD_DIM = 2, 16


def module(name: str) -> Any:
  """A module of tunix; skips the test without it."""
  pytest.importorskip("flax", reason="needs flax: pip install google-tunix")
  pytest.importorskip("tunix", reason="needs tunix: pip install google-tunix")
  return importlib.import_module(f"tunix.{name}")


def tiny(name: str, seed: int = 0, num_layers: int = 2, **fields: Any) -> Any:
  """Makes a random model: "llama3", "qwen2", "qwen3" or "gemma3"."""
  family = module(f"models.{name}.model")
  nnx = importlib.import_module("flax.nnx")
  fields_of_family = {
    "num_layers": num_layers,
    "embed_dim": 32,
    "hidden_dim": 64,
    "num_heads": 4,
    "head_dim": HEAD_DIM,
    "num_kv_heads": HEADS,
  }
  if name == "gemma3":
    fields_of_family |= {
      "num_embed": NUM_WORDS,
      "sliding_window_size": 8,
      "global_base_frequency": 1_000_000,
      "param_dtype": jnp.float32,
    }
  else:
    fields_of_family |= {
      "vocab_size": NUM_WORDS,
      "rope_theta": 1_000_000,
      "norm_eps": 1e-6,
    }
  config = family.ModelConfig(**(fields_of_family | fields))
  model = getattr(family, name.capitalize())(config, rngs=nnx.Rngs(seed))
  return with_noise(model, seed)


def with_noise(model: Any, seed: int = 0, scale: float = 0.15) -> Any:
  """Adds noise to a model's weights; many of tunix's are zeros at first."""
  nnx = importlib.import_module("flax.nnx")
  graphdef, state = nnx.split(model)
  leaves, structure = jax.tree.flatten(state)
  keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
  leaves = [
    leaf + scale * jax.random.normal(key, leaf.shape, leaf.dtype)
    for leaf, key in zip(leaves, keys, strict=True)
  ]
  return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))


def words() -> Any:
  """Returns a tokenizer of 32 words: pad, bos, eos, and `w3` to `w31`."""
  named = {"<pad>": PAD, "<s>": BOS, "</s>": EOS}
  named |= {f"w{i}": i for i in range(3, NUM_WORDS)}
  return module("tests.test_common").MockVocab(named)


def text(tokens: Any) -> str:
  """Returns the words of tokens."""
  return " ".join(f"w{int(token)}" for token in tokens)


def prompt(seed: int, length: int) -> str:
  """Draws a text."""
  draws = np.random.default_rng(seed).integers(3, NUM_WORDS, length)
  return text(draws)


def config(**options: Any) -> Any:
  """Makes a greedy RolloutConfig of tunix."""
  base = module("rl.rollout.base_rollout")
  usual = {
    "max_tokens_to_generate": 24,
    "temperature": 1.0,
    "top_p": None,
    "max_prompt_length": 32,
    "kv_cache_size": 64,
    "return_logprobs": True,
  }
  return base.RolloutConfig(**(usual | options))


def vanilla(model: Any, cache_size: int = 64) -> Any:
  """Makes tunix's own engine."""
  base = module("rl.rollout.base_rollout")
  engine = module("rl.rollout.vanilla_rollout").VanillaRollout
  cache_config = base.CacheConfig(
    cache_size=cache_size,
    num_layers=len(model.layers),
    num_kv_heads=HEADS,
    head_dim=HEAD_DIM,
  )
  return engine(model, words(), cache_config_or_size=cache_config)


def ours(model: Any, rollout_config: Any = None, **options: Any) -> Any:
  """Makes the engine under test."""
  module("rl.rollout.base_rollout")
  client = importlib.import_module("jaxkv.integrations.tunix")
  return client.JaxkvRollout(
    rollout_actor=model,
    tokenizer=words(),
    mesh=options.pop("mesh", None),
    rollout_config=rollout_config or config(),
    **options,
  )


def one_device() -> Any:
  """Makes a mesh of one device, as tunix's examples do."""
  return jax.sharding.Mesh(
    np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp")
  )


def cluster(
  model: Any, engine: Any, rollout_config: Any, **options: Any
) -> Any:
  """Makes an RLCluster for GRPO on one device."""
  import optax

  rl = module("rl.rl_cluster")
  mesh = one_device()
  roles = (rl.Role.ACTOR, rl.Role.REFERENCE, rl.Role.ROLLOUT)
  nnx = importlib.import_module("flax.nnx")
  reshard = module("rl.reshard")
  actor = reshard.reshard_model_to_mesh(model, mesh)
  reference = nnx.clone(actor)
  return rl.RLCluster(
    actor=actor,
    reference=reference,
    tokenizer=words(),
    cluster_config=rl.ClusterConfig(
      role_to_mesh=dict.fromkeys(roles, mesh),
      rollout_engine=engine,
      offload_to_cpu=options.pop("offload_to_cpu", False),
      training_config=rl.RLTrainingConfig(
        actor_optimizer=optax.sgd(options.pop("rate", 0.05)),
        eval_every_n_steps=100,
        max_steps=options.pop("max_steps", 5),
        **options,
      ),
      rollout_config=rollout_config,
    ),
  )


def reward(prompts: Any, completions: Any, **_: Any) -> list[float]:
  """Returns the share of words with an even number."""
  del prompts
  even = [f"w{i}" for i in range(4, NUM_WORDS, 2)]
  return [
    float(np.mean([word in even for word in completion.split()] or [0]))
    for completion in completions
  ]
