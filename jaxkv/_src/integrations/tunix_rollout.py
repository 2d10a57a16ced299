"""An engine by tunix's interface `BaseRollout`."""

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
from jaxkv._src.integrations.gathering import Gathering
from jaxkv._src.integrations.jobs import Answer
from jaxkv._src.integrations.jobs import EngineSizes
from jaxkv._src.integrations.jobs import Job
from jaxkv._src.integrations.paged_module import PagedModule
from jaxkv._src.integrations.tunix_models import paged_module_of
from jaxkv._src.integrations.weights import WeightWatch

_SOLO_JOBS = 16
"""Prompts in the queue of an engine that was first called with one prompt."""
_MOST_SLOTS = 256


class TunixRollout:
  """The methods of `jaxkv.integrations.tunix.JaxkvRollout`; see there."""

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
    """Begins without a program; the first `generate` makes it.

    Args:
      rollout_actor: the policy, a model of tunix, or any with `decoder`.
      tokenizer: as tunix takes it.
      mesh: where the state lies; None for where jax puts it.
      rollout_config: tunix's `RolloutConfig`, or a dictionary by mode.
      decoder: how the policy attends; None for a known model.
      num_samples: G; None for the most equal prompts in the first call.
      num_jobs: prompts in the queue at once; None for those of the first call.
      num_pages: of the pool; None for half of what a dense cache of the first
        call takes.
      page_size: tokens of a page.
      prefill_chunk: see `jaxkv.rollout.RolloutConfig`.
      max_length: the most tokens of a prompt and its answer; None for
        `kv_cache_size`.
      keep_eos: whether answers keep the token that ended them. tunix's vanilla
        engine drops it.
      seed: from which draws without a seed of their own are made.
    """
    nnx = packages.nnx()
    adapter = packages.of_tunix("tunix.generate.tokenizer_adapter")
    if not isinstance(tokenizer, adapter.TokenizerAdapter):
      tokenizer = adapter.TokenizerAdapter(tokenizer)
    self.tokenizer = tokenizer
    self._decoder = decoder or paged_module_of(rollout_actor)
    self._graphdef, self._params = nnx.split(rollout_actor)
    self._mesh = mesh
    self._wanted = (num_samples, num_jobs, num_pages)
    self._page_size, self._chunk = page_size, prefill_chunk
    self._max_length = max_length or _longest(rollout_config)
    self._keep_eos = keep_eos
    self._seed = seed
    self._calls = itertools.count()
    self._watch = WeightWatch()
    self._places: list[Any] | None = None
    self._moves = False
    self._engine: QueueEngine | None = None
    self._gathering = Gathering(self._serve)

  def generate(
    self, prompts: Sequence[str] | str, rollout_config: Any, **kwargs: Any
  ) -> Any:
    """Answers to prompts, a tunix `RolloutOutput`.

    Equal prompts that stand next to each other are samples of one prompt, which
    is computed once. Threads may call it at the same time.

    Args:
      prompts: texts, or one text.
      rollout_config: tunix's `RolloutConfig`; all of its numbers may differ
        from call to call.
      **kwargs: ignored.

    Raises:
      ValueError: a prompt and its answer have more than `max_length` tokens.
    """
    del kwargs
    if isinstance(prompts, str):
      prompts = [prompts]
    tokens = [self._tokens(text) for text in prompts]
    jobs = self._jobs(tokens, rollout_config)
    wants = bool(rollout_config.return_logprobs)
    answers = self._gathering.call((jobs, wants, rollout_config))
    return self._output(tokens, answers, rollout_config)

  def get_per_token_logps(
    self, prompt_tokens: jax.Array, completion_tokens: jax.Array
  ) -> jax.Array:
    """Log-probabilities as the trainer computes them, [B, T]."""
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
    """The next call has these weights.

    No array is made or read here. Pages of other weights are not found later;
    pages of the same arrays are. Where weights are handed over without
    `filter_types`, as by a trainer that moves them between devices and host,
    contents decide.

    Args:
      params: all variables, or those of some types.
      filter_types: these types; None for all.
    """
    nnx = packages.nnx()
    if filter_types is None:
      self._moves = True
    else:
      reshard = packages.of_tunix("tunix.rl.reshard")
      have = nnx.state(self.model(), filter_types)
      params = _placed(params, have, reshard)
    self._params = _merged(self._params, params, nnx)

  def pad_id(self) -> int:
    """The token that pads prompts and answers."""
    return self.tokenizer.pad_id()

  def eos_id(self) -> int:
    """The token that ends an answer."""
    return self.tokenizer.eos_id()

  def model(self) -> Any:
    """The policy, a new module with the arrays of the weights."""
    nnx = packages.nnx()
    return nnx.merge(self._graphdef, self._params)

  def counters(self) -> dict[str, Any]:
    """What has been done so far, see `jaxkv.rollout.Counters`."""
    return {} if self._engine is None else self._engine.counters()

  def num_bytes(self) -> int:
    """Bytes of keys and values; 0 before the first call."""
    return 0 if self._engine is None else self._engine.num_bytes()

  def _tokens(self, text: str) -> np.ndarray:
    """As tunix's own sampler makes tokens of a text."""
    bos = self.tokenizer.bos_id()
    ids = ([bos] if bos else []) + list(self.tokenizer.encode(text))
    return np.asarray(self.tokenizer.dedup_bos_ids(ids), np.int32)

  def _jobs(self, tokens: list[np.ndarray], config: Any) -> list[Job]:
    """A job for each run of equal prompts."""
    stops = tuple(config.eos_tokens or [self.eos_id()])
    # As in tunix, nothing is drawn without a `top_p`.
    heat = 0.0 if config.top_p is None else float(config.temperature)
    seeds = client_jobs.seeds(self._root(config.seed), len(tokens))
    jobs: list[Job] = []
    for prompt, seed in zip(tokens, seeds, strict=True):
      jobs.append(
        Job(
          prompt=prompt,
          seeds=(seed,),
          max_tokens=int(config.max_tokens_to_generate),
          temperature=heat,
          top_k=max(config.top_k or 0, 0),
          top_p=1.0 if config.top_p is None else float(config.top_p),
          stop_tokens=stops,
          may_draw_banned=self.pad_id() in stops,
        )
      )
    return client_jobs.joined(jobs)

  def _root(self, seed: Any) -> list[int]:
    """What the seeds of a call are made from; another one for each call."""
    if seed is None:
      return [self._seed, next(self._calls)]
    if isinstance(seed, jax.Array):
      if jax.numpy.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    return [abs(int(word)) for word in np.asarray(seed).reshape(-1)]

  def _serve(
    self, requests: list[tuple[list[Job], bool, Any]]
  ) -> list[list[Answer]]:
    """What some threads have asked for, in one batch."""
    engine = self._engine_for(requests)
    params = self._params
    if self._watch.see(params, by_contents=self._moves):
      engine.forget()
    params = self._settled(params)
    jobs = [job for own, _, _ in requests for job in own]
    wants = any(wants for _, wants, _ in requests)
    order = sorted(range(len(jobs)), key=lambda n: jobs[n].prompt.tobytes())
    together = client_jobs.joined([jobs[number] for number in order])
    found = iter(
      answer
      for answers in engine.run(params, together, log_probs=wants)
      for answer in answers
    )
    by_job: list[list[Answer]] = [[] for _ in jobs]
    for number in order:
      by_job[number] = list(itertools.islice(found, len(jobs[number].seeds)))
    ordered, results = iter(by_job), []
    for own, _, _ in requests:
      results.append([a for _ in own for a in next(ordered)])
    return results

  def _settled(self, params: Any) -> Any:
    """Weights where the first ones lay; nothing is compiled for others."""
    leaves, structure = jax.tree.flatten(params)
    if self._places is None:
      everywhere = None
      if self._mesh is not None:
        everywhere = NamedSharding(self._mesh, PartitionSpec())
      # What was put nowhere, goes to the mesh.
      self._places = [
        leaf.sharding if leaf.committed else everywhere or leaf.sharding
        for leaf in leaves
      ]
    leaves = [
      leaf if leaf.sharding == place else jax.device_put(leaf, place)
      for leaf, place in zip(leaves, self._places, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)

  def _engine_for(
    self, requests: list[tuple[list[Job], bool, Any]]
  ) -> QueueEngine:
    longest = max(
      self._max_length, *(_longest(config) for _, _, config in requests)
    )
    if self._engine is not None and longest <= self._max_length:
      return self._engine
    self._max_length = longest
    sizes = self._sizes([job for own, _, _ in requests for job in own])
    mesh = self._mesh
    parts = 1 if mesh is None else mesh.shape.get("tp", 1)
    self._engine = QueueEngine(
      self._decoder,
      sizes,
      scaled=True,
      banned=(self.pad_id(),),
      mesh=mesh,
      split_heads=parts > 1 and self._decoder.num_kv_heads % parts == 0,
    )
    return self._engine

  def _sizes(self, jobs: list[Job]) -> EngineSizes:
    """Fixed shapes, from what the caller said and from the first call."""
    samples, most, pages = self._wanted
    total = sum(len(job.seeds) for job in jobs)
    samples = samples or max(len(job.seeds) for job in jobs)
    if most is None:
      parts = client_jobs.split(jobs, samples)
      most = _SOLO_JOBS if len(parts) == 1 and total == 1 else len(parts)
    size = self._page_size
    columns = -(-self._max_length // size)
    if pages is None:
      groups = len(self._decoder.plan.kinds)
      # A layer of memory serves a layer of each group.
      deep = len(self._decoder.plan.windows)
      layers = self._decoder.plan.num_memory_layers
      half = most * samples * self._max_length * deep // (2 * size * layers)
      pages = max(half, columns * groups + groups + 1)
    return EngineSizes(
      num_jobs=most,
      num_samples=samples,
      max_length=columns * size,
      num_slots=min(most * samples, _MOST_SLOTS),
      num_pages=pages,
      page_size=size,
      prefill_chunk=self._chunk,
    )

  def _output(
    self, tokens: list[np.ndarray], answers: list[Answer], config: Any
  ) -> Any:
    base = packages.of_tunix("tunix.rl.rollout.base_rollout")
    stops = tuple(config.eos_tokens or [self.eos_id()])
    longest = max(len(prompt) for prompt in tokens)
    width = config.max_prompt_length or 0
    if width < longest:
      width = 1 << (longest - 1).bit_length()
    padded = np.full((len(tokens), width), self.pad_id(), np.int32)
    for row, prompt in enumerate(tokens):
      padded[row, width - len(prompt) :] = prompt
    drawn, log_probs = [], []
    for answer in answers:
      end = len(answer.tokens)
      if not self._keep_eos and end and answer.tokens[-1] in stops:
        end -= 1
      drawn.append(answer.tokens[:end])
      if answer.log_probs is not None:
        log_probs.append(answer.log_probs[:end])
    return base.RolloutOutput(
      text=[self.tokenizer.decode(own.tolist()) for own in drawn],
      logits=[],
      tokens=drawn,
      left_padded_prompt_tokens=padded,
      logprobs=log_probs if config.return_logprobs else None,
    )


def _longest(config: Any) -> int:
  """The most tokens of a sequence that a configuration asks for."""
  if config is None:
    return 0
  if isinstance(config, Mapping):
    return max(_longest(one) for one in config.values())
  return int(config.kv_cache_size)


def _placed(params: Any, have: Any, reshard: Any) -> Any:
  """Weights on the devices on which those lie that they replace."""
  places = [leaf.sharding for leaf in jax.tree.leaves(have)]
  same = places == [leaf.sharding for leaf in jax.tree.leaves(params)]
  named = all(isinstance(place, NamedSharding) for place in places)
  # What is on no mesh, tunix does not move; `_settled` does.
  if same or not named:
    return params
  return reshard.reshard_pytree(params, have)


def _merged(have: Any, params: Any, nnx: Any) -> Any:
  """All weights, with those that are new, in the dtypes of before."""
  old, new = nnx.to_pure_dict(have), params
  if not isinstance(params, dict):
    new = nnx.to_pure_dict(params)
  old_leaves, structure = jax.tree_util.tree_flatten_with_path(old)
  by_path = dict(jax.tree_util.tree_leaves_with_path(new))
  leaves = [by_path.get(path, leaf) for path, leaf in old_leaves]
  leaves = [
    leaf if leaf.dtype == before.dtype else leaf.astype(before.dtype)
    for leaf, (_, before) in zip(leaves, old_leaves, strict=True)
  ]
  merged = jax.tree.unflatten(structure, leaves)
  state = jax.tree.map(lambda leaf: leaf, have)
  nnx.replace_by_pure_dict(state, merged)
  return state
