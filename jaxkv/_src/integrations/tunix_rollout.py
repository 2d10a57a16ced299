"""Implements tunix's interface `BaseRollout` with a `QueueEngine`."""

import functools
import itertools
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from jaxkv._src.integrations import jobs as client_jobs
from jaxkv._src.integrations import packages
from jaxkv._src.integrations.engine import QueueEngine
from jaxkv._src.integrations.jobs import Answer
from jaxkv._src.integrations.jobs import Job
from jaxkv._src.integrations.paged_module import PagedModule
from jaxkv._src.integrations.thread_batches import ThreadBatches
from jaxkv._src.integrations.tunix_models import paged_module_of
from jaxkv._src.integrations.weight_changes import WeightWatch


class TunixRollout:
  """Implements the methods of `jaxkv.integrations.tunix.JaxkvRollout`."""

  def __init__(
    self,
    rollout_actor: Any,
    tokenizer: Any,
    mesh: jax.sharding.Mesh | None = None,
    rollout_config: Any = None,
    *,
    decoder: PagedModule | None = None,
    num_samples: int | None = None,
    num_jobs: int | None = None,
    num_pages: int | None = None,
    page_size: int = 16,
    prefill_chunk: int = 128,
    max_length: int | None = None,
    keep_eos: bool = False,
    seed: int = 0,
  ):
    """Creates a rollout; the first `generate` compiles its program.

    Args:
      rollout_actor: the policy, a model of tunix; with `decoder`, any module.
      tokenizer: a tokenizer that tunix supports.
      mesh: the devices of the state; None for jax's default device.
      rollout_config: tunix's `RolloutConfig`, or a dictionary from modes to
        configs.
      decoder: the adapted policy; None for a supported model of tunix.
      num_samples: the maximum number of samples that share one prefill; None
        for the longest run of equal prompts in the first call.
      num_jobs: number of prompts in the queue; None for as many as the first
        call needs, or 16 if it has a single sample.
      num_pages: pages of all pools together; None for half of the pages that a
        dense cache would need for a full queue.
      page_size: tokens of a page.
      prefill_chunk: see `jaxkv.rollout.RolloutConfig`.
      max_length: the maximum number of tokens of a prompt with its answer; None
        for the largest `kv_cache_size` of `rollout_config`. If a call has a
        larger `kv_cache_size`, an engine for this length replaces the old one.
      keep_eos: True to keep final stop tokens, unlike tunix's vanilla engine.
      seed: the seed of calls whose config has no seed.
    """
    nnx = packages.nnx()
    adapter = packages.of_tunix("tunix.generate.tokenizer_adapter")
    if not isinstance(tokenizer, adapter.TokenizerAdapter):
      tokenizer = adapter.TokenizerAdapter(tokenizer)
    self.tokenizer = tokenizer
    self._decoder = decoder or paged_module_of(rollout_actor)
    self._graphdef, self._params = nnx.split(rollout_actor)
    self._mesh = mesh
    self._choose_sizes = functools.partial(
      client_jobs.choose_sizes,
      num_samples=num_samples,
      num_jobs=num_jobs,
      num_pages=num_pages,
      page_size=page_size,
      prefill_chunk=prefill_chunk,
    )
    self._max_length = max_length or _max_tokens(rollout_config)
    self._keep_eos = keep_eos
    self._seed = seed
    self._calls = itertools.count()
    self._watch = WeightWatch()
    self._shardings: list[Any] | None = None
    self._moves_weights = False
    self._engine: QueueEngine | None = None
    self._batches = ThreadBatches(self._serve)

  def generate(
    self, prompts: Sequence[str] | str, rollout_config: Any, **kwargs: Any
  ) -> Any:
    """Generates answers, and returns a tunix `RolloutOutput`.

    Adjacent equal prompts are treated as samples of one prompt, so they share
    one prefill. Several threads can call this method at the same time.

    Args:
      prompts: texts, or one text.
      rollout_config: tunix's `RolloutConfig`, which can differ between calls.
      **kwargs: ignored.

    Raises:
      RuntimeError: a sample failed, for example for lack of pages.
      ValueError: there is no prompt, a prompt is empty or too long, there are
        too many stop tokens, or `max_tokens_to_generate` is below 1.
    """
    del kwargs
    if isinstance(prompts, str):
      prompts = [prompts]
    tokens = [self._tokens(text) for text in prompts]
    if not tokens:
      raise ValueError("`prompts` must have at least one prompt, got none.")
    jobs = self._jobs(tokens, rollout_config)
    wants_log_probs = bool(rollout_config.return_logprobs)
    answers = self._batches.call((jobs, wants_log_probs, rollout_config))
    if isinstance(answers, ValueError):
      raise answers
    return self._output(tokens, answers, rollout_config)

  def get_per_token_logps(
    self, prompt_tokens: jax.Array, completion_tokens: jax.Array
  ) -> jax.Array:
    """Returns the log-probs, [B, T], from tunix's own function."""
    common = packages.of_tunix("tunix.rl.common")
    return common.compute_per_token_logps(
      self._graphdef,
      self._params,
      prompt_tokens=prompt_tokens,
      completion_tokens=completion_tokens,
      pad_id=self.pad_id(),
      eos_id=self.eos_id(),
      stop_gradient=True,
      return_logits=False,
    )

  def update_params(
    self, params: Any, filter_types: tuple[Any, ...] | None = None
  ) -> None:
    """Replaces the weights, from the next `generate` on.

    New weights invalidate the cached pages. Arrays are compared by identity.
    From the first call without `filter_types` on, new arrays are also compared
    by contents, because such calls come from trainers that move weights between
    devices and host.

    Args:
      params: all variables, or those of `filter_types`.
      filter_types: the types of the variables; None for all.

    Raises:
      ValueError: the policy has no variable of a name in `params`, or one of
        another shape.
    """
    nnx = packages.nnx()
    if filter_types is None:
      self._moves_weights = True
    else:
      reshard = packages.of_tunix("tunix.rl.reshard")
      params = _reshard(params, nnx.state(self.model(), filter_types), reshard)
    self._params = _merge(self._params, params, nnx)

  def pad_id(self) -> int:
    """Returns the token that pads prompts and answers."""
    return self.tokenizer.pad_id()

  def eos_id(self) -> int:
    """Returns the token that ends an answer."""
    return self.tokenizer.eos_id()

  def model(self) -> Any:
    """Returns the policy, a new module that shares the weights' arrays."""
    nnx = packages.nnx()
    return nnx.merge(self._graphdef, self._params)

  def counters(self) -> dict[str, Any]:
    """Returns the `jaxkv.rollout.Counters` of the current cache, by name."""
    return {} if self._engine is None else self._engine.counters()

  def num_bytes(self) -> int:
    """Returns the bytes of keys and values; 0 before the first call."""
    return 0 if self._engine is None else self._engine.num_bytes()

  def _tokens(self, text: str) -> np.ndarray:
    """Tokenizes a text like tunix's own sampler."""
    bos = self.tokenizer.bos_id()
    ids = ([bos] if bos else []) + list(self.tokenizer.encode(text))
    return np.asarray(self.tokenizer.dedup_bos_ids(ids), np.int32)

  def _jobs(self, tokens: list[np.ndarray], config: Any) -> list[Job]:
    """Makes one job from each run of equal prompts."""
    stops = tuple(config.eos_tokens or [self.eos_id()])
    # As in tunix, `top_p=None` is greedy decoding.
    temperature = 0.0 if config.top_p is None else float(config.temperature)
    # Each prompt gets its own seed, so that samples of equal prompts differ.
    seeds = client_jobs.seeds(self._entropy(config.seed), len(tokens))
    jobs: list[Job] = []
    for prompt, seed in zip(tokens, seeds, strict=True):
      jobs.append(
        Job(
          prompt=prompt,
          seeds=(seed,),
          max_tokens=int(config.max_tokens_to_generate),
          temperature=temperature,
          top_k=max(config.top_k or 0, 0),
          top_p=1.0 if config.top_p is None else float(config.top_p),
          stop_tokens=stops,
          may_draw_banned=self.pad_id() in stops,
        )
      )
    return client_jobs.joined(jobs)

  def _entropy(self, seed: Any) -> list[int]:
    """Returns the entropy from which the seeds of a call are derived."""
    # Without a seed in the config, samples still differ between calls.
    if seed is None:
      return [self._seed, next(self._calls)]
    if isinstance(seed, jax.Array):
      if jax.numpy.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    return [abs(int(word)) for word in np.asarray(seed).reshape(-1)]

  def _serve(
    self, requests: list[tuple[list[Job], bool, Any]]
  ) -> list[list[Answer] | ValueError]:
    """Serves the requests of several threads in one batch.

    For a request that does not fit, the error is returned instead of raised, so
    that the other threads get their answers.
    """
    try:
      return [*self._serve_together(requests)]
    except ValueError as error:
      if len(requests) == 1:
        return [error]
      # One of them does not fit the engine. Nothing was generated yet. Alone it
      # cannot fail the others.
      return [self._serve([request])[0] for request in requests]

  def _serve_together(
    self, requests: list[tuple[list[Job], bool, Any]]
  ) -> list[list[Answer]]:
    engine = self._engine_for(requests)
    # `_params` is read once, because another thread can call `update_params`.
    params = self._params
    if self._watch.has_changed(params, by_contents=self._moves_weights):
      engine.invalidate_cache()
    params = self._place(params)
    jobs = [job for part, _, _ in requests for job in part]
    wants_log_probs = any(wants for _, wants, _ in requests)
    # Jobs are sorted by prompt, so that equal prompts of different threads
    # become one job.
    order = sorted(range(len(jobs)), key=lambda n: jobs[n].prompt.tobytes())
    merged = client_jobs.joined([jobs[index] for index in order])
    answers = iter(
      answer
      for samples in engine.run(params, merged, log_probs=wants_log_probs)
      for answer in samples
    )
    by_job: list[list[Answer]] = [[] for _ in jobs]
    for index in order:
      by_job[index] = list(itertools.islice(answers, len(jobs[index].seeds)))
    ordered = iter(by_job)
    results = []
    for part, _, _ in requests:
      results.append([a for _ in part for a in next(ordered)])
    return results

  def _place(self, params: Any) -> Any:
    """Moves weights to the shardings of the weights in the first call.

    With other shardings the program would be compiled again.
    """
    leaves, structure = jax.tree.flatten(params)
    if self._shardings is None:
      replicated = None
      if self._mesh is not None:
        replicated = NamedSharding(self._mesh, PartitionSpec())
      # An uncommitted array has no chosen device, so it is replicated on the
      # mesh.
      self._shardings = [
        leaf.sharding if leaf.committed else replicated or leaf.sharding
        for leaf in leaves
      ]
    leaves = [
      leaf if leaf.sharding == sharding else jax.device_put(leaf, sharding)
      for leaf, sharding in zip(leaves, self._shardings, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)

  def _engine_for(
    self, requests: list[tuple[list[Job], bool, Any]]
  ) -> QueueEngine:
    longest = max(
      self._max_length, *(_max_tokens(config) for _, _, config in requests)
    )
    if self._engine is not None and longest <= self._max_length:
      return self._engine
    # A longer sequence does not fit the compiled shapes, so a new engine with
    # an empty cache replaces the old one.
    engine_sizes = self._choose_sizes(
      [job for part, _, _ in requests for job in part],
      longest,
      self._decoder.plan,
      self._engine.sizes if self._engine is not None else None,
    )
    mesh = self._mesh
    num_shards = 1 if mesh is None else mesh.shape.get("tp", 1)
    self._engine = QueueEngine(
      self._decoder,
      engine_sizes,
      banned=self.pad_id(),
      mesh=mesh,
      # A pool can only be sharded if each device gets whole K/V heads.
      split_heads=num_shards > 1
      and self._decoder.num_kv_heads % num_shards == 0,
    )
    # Only now, because the old engine stays if the new one cannot be made.
    self._max_length = longest
    return self._engine

  def _output(
    self, tokens: list[np.ndarray], answers: list[Answer], config: Any
  ) -> Any:
    base = packages.of_tunix("tunix.rl.rollout.base_rollout")
    stops = tuple(config.eos_tokens or [self.eos_id()])
    longest = max(len(prompt) for prompt in tokens)
    width = config.max_prompt_length or 0
    # Longer prompts are padded to a power of two, so that few shapes compile.
    if width < longest:
      width = 1 << (longest - 1).bit_length()
    padded = np.full((len(tokens), width), self.pad_id(), np.int32)
    for row, prompt in enumerate(tokens):
      padded[row, width - len(prompt) :] = prompt
    completions = []
    log_probs = []
    for answer in answers:
      num_tokens = len(answer.tokens)
      if not self._keep_eos and num_tokens and answer.tokens[-1] in stops:
        num_tokens -= 1
      completions.append(answer.tokens[:num_tokens])
      if answer.log_probs is not None:
        log_probs.append(answer.log_probs[:num_tokens])
    return base.RolloutOutput(
      text=[self.tokenizer.decode(ids.tolist()) for ids in completions],
      logits=[],
      tokens=completions,
      left_padded_prompt_tokens=padded,
      logprobs=log_probs if config.return_logprobs else None,
    )


def _max_tokens(config: Any) -> int:
  """Returns the largest `kv_cache_size` of tunix's configs, or 0 for None."""
  if config is None:
    return 0
  if isinstance(config, Mapping):
    return max(_max_tokens(mode_config) for mode_config in config.values())
  return int(config.kv_cache_size)


def _reshard(params: Any, current: Any, reshard: Any) -> Any:
  """Moves weights to the devices of the weights that they replace."""
  shardings = [leaf.sharding for leaf in jax.tree.leaves(current)]
  is_placed = shardings == [leaf.sharding for leaf in jax.tree.leaves(params)]
  all_named = all(isinstance(sharding, NamedSharding) for sharding in shardings)
  # tunix moves only arrays on meshes. `_place` moves other arrays.
  if is_placed or not all_named:
    return params
  return reshard.reshard_pytree(params, current)


def _merge(current: Any, params: Any, nnx: Any) -> Any:
  """Replaces the weights that are in `params`, and keeps the current dtypes."""
  old_weights = nnx.to_pure_dict(current)
  new = params
  if not isinstance(params, dict):
    new = nnx.to_pure_dict(params)
  old_leaves, structure = jax.tree_util.tree_flatten_with_path(old_weights)
  by_path = dict(jax.tree_util.tree_leaves_with_path(new))
  shapes = {path: leaf.shape for path, leaf in old_leaves}
  for path, leaf in by_path.items():
    shape = shapes.get(path, "no variable")
    if leaf.shape != shape:
      raise ValueError(
        f"`params{jax.tree_util.keystr(path)}` must have the shape of the "
        f"policy's variable, {shape}, got {leaf.shape}; pass the state of an "
        "equal model."
      )
  leaves = [by_path.get(path, leaf) for path, leaf in old_leaves]
  leaves = [
    leaf if leaf.dtype == old_leaf.dtype else leaf.astype(old_leaf.dtype)
    for leaf, (_, old_leaf) in zip(leaves, old_leaves, strict=True)
  ]
  # Without the cast above, other dtypes would compile the program again.
  merged = jax.tree.unflatten(structure, leaves)
  state = jax.tree.map(lambda leaf: leaf, current)
  nnx.replace_by_pure_dict(state, merged)
  return state
