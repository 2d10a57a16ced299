"""Samples for the server of SkyRL-tx with a `QueueEngine`."""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.integrations import jobs as client_jobs
from jaxkv._src.integrations import packages
from jaxkv._src.integrations.engine import QueueEngine
from jaxkv._src.integrations.jobs import Answer
from jaxkv._src.integrations.jobs import Job
from jaxkv._src.integrations.jobs import SamplingOptions
from jaxkv._src.integrations.paged_module import PagedModule
from jaxkv._src.integrations.skyrl_models import paged_module_of
from jaxkv._src.integrations.weight_changes import WeightWatch
from jaxkv._src.integrations.weight_changes import digest
from jaxkv.rollout import Finish

_ADAPTER_NAMES = ("lora_A", "lora_B", "lora_scaling", "lora_ranks")


class SkyrlSampler:
  """Samples for one backend, with an engine of the sizes in `options`."""

  def __init__(self, backend: Any, options: SamplingOptions):
    """Creates a sampler; the first call compiles its program."""
    nnx = packages.nnx()
    self.options = options
    decoder = paged_module_of(backend.model)
    self._decoder: PagedModule = dataclasses.replace(
      decoder, graphdef=backend.graphdef, params=None
    )
    # `scores` closes over `graphdef`, which cannot be a static argument,
    # because it is not hashable.
    graphdef = backend.graphdef

    def scores(params: Any, tokens: Any, mask: Any, adapter: Any) -> jax.Array:
      model = nnx.merge(graphdef, *params)
      outputs = model(tokens, attention_mask=mask, adapter_indices=adapter)
      logits = model.compute_logits(outputs.last_hidden_state, adapter)
      return model.logits_to_logprobs(logits[:, :-1], tokens[:, 1:])

    self._scores = jax.jit(scores)
    self._engine: QueueEngine | None = None
    self._length = options.max_length or 0
    self._watch = WeightWatch()
    self._salts: dict[int, np.ndarray] = {}

  def sample(self, backend: Any, batch: Any) -> dict[str, Any]:
    """Samples a batch, with the signature of `JaxBackendImpl.sample`.

    Raises:
      NotImplementedError: the backend runs in several processes, or shards
        experts.
      RuntimeError: a sample failed, for example for lack of pages.
      ValueError: a prompt is empty, or its `max_tokens` is below 1.
    """
    if jax.process_count() > 1 or backend.mesh.shape["ep"] > 1:
      raise NotImplementedError(
        "jaxkv samples only in one process, and on a mesh that does not shard "
        'experts; set "expert_parallel_size" to 1.'
      )
    if not batch.all_prompts:
      return {}
    adapters = backend.load_sampler_weights(batch)
    params = (backend.lora_params, backend.non_lora_params)
    jobs = self._jobs(backend, batch, adapters, params)
    engine = self._engine_for(backend, jobs)
    answers = engine.run(params, jobs, log_probs=True)
    types = packages.of_skyrl("tx.tinker.types")
    sequences = [
      self._sequence(backend, types, answer, settings)
      for answer, settings in zip(
        itertools.chain.from_iterable(answers),
        batch.all_sampling_params,
        strict=True,
      )
    ]
    results = {}
    for name, _, start, end_row, wants_prompt in batch.request_batch_slices:
      scores = None
      if wants_prompt:
        prompt = batch.all_prompts[start]
        scores = self._prompt_log_probs(backend, prompt, adapters[start])
      results[name] = types.SampleOutput(
        sequences=sequences[start:end_row], prompt_logprobs=scores
      )
    return results

  def counters(self) -> dict[str, Any]:
    """Returns the `jaxkv.rollout.Counters` of the current cache, by name."""
    return {} if self._engine is None else self._engine.counters()

  def _jobs(
    self, backend: Any, batch: Any, adapters: list[int], params: Any
  ) -> list[Job]:
    """Makes jobs; adjacent samples that differ only in seeds share a job."""
    # A salt is a digest of an adapter's weights, so new weights need new salts.
    if self._watch.has_changed(params[0], by_contents=False):
      self._salts = {}
    jobs: list[Job] = []
    for prompt, settings, adapter in zip(
      batch.all_prompts, batch.all_sampling_params, adapters, strict=True
    ):
      # 31 bits, because `rollout.Sampling` ignores a negative int32 seed.
      seed = int(settings.seed) & 0x7FFFFFFF
      jobs.append(
        Job(
          prompt=np.asarray(prompt, np.int32),
          seeds=(seed,),
          max_tokens=settings.max_tokens,
          temperature=settings.temperature,
          top_k=max(settings.top_k, 0),
          top_p=settings.top_p,
          stop_tokens=tuple(settings.stop_tokens or ()),
          adapter=adapter,
          salt=self._salt(adapter, params),
        )
      )
    return client_jobs.joined(jobs)

  def _salt(self, adapter: int, params: Any) -> np.ndarray:
    """Returns uint32[4], a digest of an adapter's index and weights."""
    if adapter not in self._salts:
      words = digest(_slices(params, jnp.int32(adapter)))
      text = ",".join(map(str, (adapter, *words))).encode()
      code = hashlib.blake2b(text, digest_size=16).digest()
      self._salts[adapter] = np.frombuffer(code, np.uint32)
    return self._salts[adapter]

  def _engine_for(self, backend: Any, jobs: list[Job]) -> QueueEngine:
    longest = max(len(job.prompt) + job.max_tokens for job in jobs)
    stops = max(len(job.stop_tokens) for job in jobs)
    engine = self._engine
    if engine is not None and (
      longest <= engine.sizes.max_length
      and stops <= engine.sizes.num_stop_tokens
    ):
      return engine
    # The length is rounded up to a power of two, so that few programs compile.
    if longest > self._length:
      self._length = 1 << (longest - 1).bit_length()
    mesh = backend.mesh
    split = mesh.shape["tp"] > 1 and backend.config.shard_attention_heads
    self._engine = QueueEngine(
      self._decoder,
      client_jobs.choose_sizes(
        self.options,
        jobs,
        self._length,
        self._decoder.plan,
        engine.sizes if engine is not None else None,
      ),
      salted=True,
      mesh=mesh,
      split_heads=split,
    )
    return self._engine

  def _sequence(
    self, backend: Any, types: Any, answer: Answer, settings: Any
  ) -> Any:
    """Converts an answer to a `GeneratedSequence`, cut at its stop string."""
    tokens = answer.tokens.tolist()
    scores = [] if answer.log_probs is None else answer.log_probs.tolist()
    reason = "stop" if answer.finish == Finish.STOP_TOKEN else "length"
    if settings.stop_strings:
      generator = packages.of_skyrl("tx.utils.generator")
      num_tokens = generator.find_string_stop_position(
        tokens, backend.tokenizer, settings.stop_strings
      )
      if num_tokens is not None:
        tokens = tokens[:num_tokens]
        scores = scores[:num_tokens]
        reason = "stop"
    return types.GeneratedSequence(
      stop_reason=reason, tokens=tokens, logprobs=scores
    )

  def _prompt_log_probs(
    self, backend: Any, prompt: list[int], adapter: int
  ) -> list[float]:
    """Computes the log-probs of all prompt tokens but the first, uncached."""
    models = packages.of_skyrl("tx.utils.models")
    width = models.round_up_seq_len(len(prompt))
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(prompt)] = prompt
    mask = (np.arange(width) < len(prompt)).astype(np.int32)[None]
    params = (backend.lora_params, backend.non_lora_params)
    # The model's layers look up the backend's mesh.
    with jax.set_mesh(backend.mesh):
      scores = self._scores(
        params, tokens, mask, np.asarray([adapter], np.int32)
      )
    return np.asarray(scores)[0, : len(prompt) - 1].tolist()


@jax.jit
def _slices(params: Any, adapter: jax.Array) -> list[jax.Array]:
  """Returns the arrays of one adapter."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return [
    leaf[adapter]
    for path, leaf in leaves
    if any(name in jax.tree_util.keystr(path) for name in _ADAPTER_NAMES)
  ]


def sample(
  backend: Any, batch: Any, options: SamplingOptions | None = None
) -> dict[str, Any]:
  """Samples for SkyRL-tx like its `JaxBackendImpl.sample`, but with jaxkv.

  Args:
    backend: a `JaxBackendImpl`.
    batch: tx's `PreparedSampleBatch`.
    options: sizes of the engine; later calls for the same backend ignore them.

  Returns:
    `{request_id: SampleOutput}`.
  """
  # The sampler is stored on the backend, so that both have the same lifetime.
  engine = backend.__dict__.get("_jaxkv_sampler")
  if engine is None:
    engine = SkyrlSampler(backend, options or SamplingOptions())
    backend.__dict__["_jaxkv_sampler"] = engine
  return engine.sample(backend, batch)


def install(options: SamplingOptions | None = None) -> Callable[[], None]:
  """Makes all backends of SkyRL-tx sample with jaxkv.

  Call it before the server starts.

  Args:
    options: sizes of the engines.

  Returns:
    A function that restores the original method.
  """
  module = packages.of_skyrl("tx.tinker.backends.jax")
  backend_class = module.JaxBackendImpl
  original = backend_class.sample

  def sampled(self: Any, prepared_batch: Any) -> dict[str, Any]:
    return sample(self, prepared_batch, options)

  # SkyRL's workers read the types of arguments from the annotations.
  sampled.__annotations__ = dict(original.__annotations__)
  backend_class.sample = sampled

  def undo() -> None:
    backend_class.sample = original

  return undo
