"""Implements tunix's interface `BaseRollout` with an `Engine`."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxkv import CacheConfig
from jaxkv import Status
from jaxkv import rollout
from jaxkv import sharding
from jaxkv._src.integrations import packages
from jaxkv._src.integrations import sample_requests
from jaxkv._src.integrations.paged_module import PagedModule
from jaxkv._src.integrations.sample_requests import Sample
from jaxkv._src.integrations.sample_requests import Settings
from jaxkv._src.integrations.thread_batches import ThreadBatches
from jaxkv._src.integrations.tunix_models import paged_module_of
from jaxkv._src.integrations.weight_changes import WeightWatch

_SOLO_PROMPTS = 16
"""The prompts of an engine whose first call has one prompt with one sample."""
_MAX_SLOTS = 256


class Answer(NamedTuple):
  """One sample.

  Attributes:
    tokens: the drawn tokens, the stop token included.  # int32[T]
    log_probs: the log-prob of each token, before `top_k` and `top_p`, but after
      the temperature.  # float32[T]
  """

  tokens: np.ndarray
  log_probs: np.ndarray


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
        for the most equal prompts in the first call.
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
    decoder = decoder or paged_module_of(rollout_actor)
    # Programs keep the decoder; they must not keep its first weights.
    self._decoder = dataclasses.replace(decoder, params=None)
    self._graphdef, self._params = nnx.split(rollout_actor)
    self._mesh = mesh
    self._given_samples = num_samples
    self._given_jobs = num_jobs
    # Those of the engine; a later engine has no fewer.
    self._num_samples = 1
    self._num_jobs = 1
    self._num_pages = num_pages
    self._page_size = page_size
    self._prefill_chunk = prefill_chunk
    self._max_length = max_length or _max_tokens(rollout_config)
    self._keep_eos = keep_eos
    self._seed = seed
    self._calls = itertools.count()
    self._watch = WeightWatch()
    self._moves_weights = False
    self._engine: rollout.Engine | None = None
    self._cache: CacheConfig | None = None
    self._version = 0
    self._batches = ThreadBatches(self._serve)

  def generate(
    self, prompts: Sequence[str] | str, rollout_config: Any, **kwargs: Any
  ) -> Any:
    """Generates answers, and returns a tunix `RolloutOutput`.

    Equal prompts are samples of one prompt, which is computed once. Several
    threads can call this method at the same time.

    Args:
      prompts: texts, or one text.
      rollout_config: tunix's `RolloutConfig`, which can differ between calls.
      **kwargs: ignored.

    Raises:
      RuntimeError: a sample failed, for example for lack of pages.
      ValueError: there is no prompt, a prompt is empty or too long, the pages
        do not suffice for it, or `max_tokens_to_generate` is below 1.
    """
    del kwargs
    if isinstance(prompts, str):
      prompts = [prompts]
    tokens = [self._tokens(text) for text in prompts]
    if not tokens:
      raise ValueError("`prompts` must have at least one prompt, got none.")
    samples = self._samples(tokens, rollout_config)
    answers = self._batches.call((samples, rollout_config))
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
    if self._engine is None:
      return {}
    counters = vars(self._engine.counters)
    return {
      name: np.asarray(count).tolist() for name, count in counters.items()
    }

  def num_bytes(self) -> int:
    """Returns the bytes of keys and values; 0 before the first call."""
    cache = self._cache
    if cache is None:
      return 0
    pages = jax.eval_shape(lambda: self._decoder.init_kv(cache))
    leaves = jax.tree.leaves(pages)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

  def _tokens(self, text: str) -> np.ndarray:
    """Tokenizes a text like tunix's own sampler."""
    bos = self.tokenizer.bos_id()
    ids = ([bos] if bos else []) + list(self.tokenizer.encode(text))
    return np.asarray(self.tokenizer.dedup_bos_ids(ids), np.int32)

  def _samples(self, tokens: list[np.ndarray], config: Any) -> list[Sample]:
    """Makes a sample for each prompt."""
    stops = tuple(config.eos_tokens or [self.eos_id()])
    settings = Settings(
      max_tokens=int(config.max_tokens_to_generate),
      # As in tunix, `top_p=None` is greedy decoding.
      temperature=0.0 if config.top_p is None else float(config.temperature),
      top_k=max(config.top_k or 0, 0),
      top_p=1.0 if config.top_p is None else float(config.top_p),
      stop_tokens=stops,
      may_draw_pad=self.pad_id() in stops,
    )
    # Each prompt gets its own seed, so that samples of equal prompts differ.
    seeds = sample_requests.seeds(self._entropy(config.seed), len(tokens))
    return [
      Sample(tuple(prompt.tolist()), settings, seed)
      for prompt, seed in zip(tokens, seeds, strict=True)
    ]

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
    self, calls: list[tuple[list[Sample], Any]]
  ) -> list[list[Answer] | ValueError]:
    """Serves the calls of several threads in one batch.

    For a call that does not fit, the error is returned instead of raised, so
    that the other threads get their answers.
    """
    try:
      return [*self._serve_together(calls)]
    except ValueError as error:
      if len(calls) == 1:
        return [error]
      # One of them does not fit the engine. Nothing was generated yet. Alone it
      # cannot fail the others.
      return [self._serve([call])[0] for call in calls]

  def _serve_together(
    self, calls: list[tuple[list[Sample], Any]]
  ) -> list[list[Answer]]:
    samples = [sample for part, _ in calls for sample in part]
    # `_params` is read once, because another thread can call `update_params`.
    params = self._params
    engine = self._engine_for(samples, [config for _, config in calls], params)
    try:
      answers = self._answers(engine, samples, params)
    finally:
      # Between calls, the trainer decides where the weights are.
      engine.release_weights()
    in_order = iter([answers[index] for index in range(len(samples))])
    return [[*itertools.islice(in_order, len(part))] for part, _ in calls]

  def _answers(
    self, engine: rollout.Engine, samples: list[Sample], params: Any
  ) -> dict[int, Answer]:
    """Returns the answers by the indices of their samples."""
    is_new = self._watch.has_changed(params, by_contents=self._moves_weights)
    if is_new or not self._version:
      self._version += 1
    _check_lengths(samples, self._max_length)
    groups = sample_requests.grouped(samples, self._num_samples)
    requests = sample_requests.requests_of(
      samples,
      groups,
      num_samples=self._num_samples,
      num_columns=self._max_length - 1,
    )
    # The stream adds fields to the queue, after which `update_weights` would
    # compile again.
    stream = engine.stream(requests)
    engine.update_weights(params, version=self._version)
    ended = [x for x in stream if isinstance(x, rollout.PromptSamples)]
    answers = {}
    ended.sort(key=lambda out: out.id)
    for group, out in zip(groups, ended, strict=True):
      for row, index in enumerate(group):
        answers[index] = _answer(out.results, row)
    return answers

  def _engine_for(
    self, samples: list[Sample], configs: list[Any], params: Any
  ) -> rollout.Engine:
    longest = max(self._max_length, *map(_max_tokens, configs))
    if self._engine is not None:
      if longest <= self._max_length:
        return self._engine
    # A longer sequence does not fit the compiled shapes, so a new engine with
    # an empty cache replaces the old one. Its queue is not smaller, because it
    # must also serve calls like earlier ones.
    num_samples = self._given_samples
    if num_samples is None:
      groups = sample_requests.grouped(samples)
      num_samples = max(self._num_samples, *map(len, groups))
    num_jobs = self._given_jobs
    if num_jobs is None:
      num_jobs = len(sample_requests.grouped(samples, num_samples))
      if len(samples) == 1:
        num_jobs = _SOLO_PROMPTS
      num_jobs = max(self._num_jobs, num_jobs)
    num_slots = min(num_jobs * num_samples, _MAX_SLOTS)
    num_columns = -(-longest // self._page_size)
    max_length = num_columns * self._page_size
    num_pages = self._num_pages
    if num_pages is None:
      num_groups = len(self._decoder.plan.kinds)
      dense_pages = num_jobs * num_samples * num_columns * num_groups
      # The pools must have room for the longest sequence.
      num_pages = max(dense_pages // 2, (num_columns + 2) * num_groups)
    cache = self._decoder.cache_config(
      num_pages=num_pages,
      page_size=self._page_size,
      num_slots=num_slots,
      max_length=max_length,
      prefill_chunk=self._prefill_chunk,
    )
    # First, because both may not fit the devices.
    if self._engine is not None:
      self._engine.close()
    self._engine = None
    self._engine = rollout.Engine(
      params,
      functools.partial(
        sample_requests.scaled_model, model=self._decoder.model
      ),
      cache,
      rollout.RolloutConfig(
        num_samples=num_samples,
        max_length=max_length,
        prefill_chunk=self._prefill_chunk,
        admissions=min(16, num_slots),
        raw_log_probs=True,
      ),
      axes=self._axes(),
      process=functools.partial(sample_requests.no_pad, pad=self.pad_id()),
      init_kv=self._decoder.init_kv,
      num_prompts=num_jobs,
    )
    self._cache = cache
    self._max_length = max_length
    self._num_samples = num_samples
    self._num_jobs = num_jobs
    self._version = 0
    return self._engine

  def _axes(self) -> sharding.MeshAxes | None:
    """Returns the mesh; pages are split over "tp" if it divides the heads."""
    if self._mesh is None:
      return None
    num_parts = self._mesh.shape.get("tp", 1)
    splits = num_parts > 1 and self._decoder.num_kv_heads % num_parts == 0
    return sharding.MeshAxes(self._mesh, model="tp" if splits else None)

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
      log_probs.append(answer.log_probs[:num_tokens])
    return base.RolloutOutput(
      text=[self.tokenizer.decode(ids.tolist()) for ids in completions],
      logits=[],
      tokens=completions,
      left_padded_prompt_tokens=padded,
      logprobs=log_probs if config.return_logprobs else None,
    )


def _check_lengths(samples: list[Sample], max_length: int) -> None:
  """Raises ValueError unless prompts leave room for their answers."""
  for sample in samples:
    num_tokens = len(sample.prompt)
    if not num_tokens:
      raise ValueError("`prompts` must have at least one token each, got none.")
    max_tokens = sample.settings.max_tokens
    if num_tokens + max_tokens > max_length:
      raise ValueError(
        f"`prompts` must leave room for {max_tokens} tokens in {max_length}, "
        f"got {num_tokens}; increase the engine's `max_length`."
      )


def _answer(results: rollout.Generated, row: int) -> Answer:
  """Returns the answer in a row, or raises RuntimeError if it failed."""
  code = int(results.code[row])
  if code != Status.OK:
    raise RuntimeError(f"A sample could not be drawn: {Status(code).name}.")
  columns = slice(int(results.prompt_lengths[row]), int(results.lengths[row]))
  log_probs = results.records.raw_log_probs
  return Answer(
    np.asarray(results.tokens)[row, columns],
    np.asarray(log_probs)[row, columns],
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
