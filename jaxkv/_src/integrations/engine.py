"""An engine that serves a client's calls with one rollout of fixed shapes.

A batch of jobs enters the empty queue, runs to its end and is harvested. All
batches have the same shapes, so few programs are compiled. Pages stay cached
between batches, so a prompt hits the prefix that it shares with an earlier
prompt or answer.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv import CacheState
from jaxkv import Status
from jaxkv import init as init_cache
from jaxkv import new_epoch
from jaxkv import rollout
from jaxkv import sharding
from jaxkv._src.arrays.no_mesh import no_mesh
from jaxkv._src.integrations import jobs as client_jobs
from jaxkv._src.integrations.jobs import Answer
from jaxkv._src.integrations.jobs import EngineSizes
from jaxkv._src.integrations.jobs import Job
from jaxkv._src.integrations.jobs import JobBatch
from jaxkv._src.integrations.paged_module import PagedModule
from jaxkv.kv import Batch
from jaxkv.rollout import Records
from jaxkv.rollout import RolloutConfig
from jaxkv.rollout import RolloutState


class QueueEngine:
  """Serves `Job`s, in one or more batches of fixed shape.

  Calls of `run` must not overlap. If the compiled program raises, the pages are
  lost, and the next call starts with an empty cache.

  Attributes:
    sizes: the fixed shapes.
  """

  def __init__(
    self,
    decoder: PagedModule,
    sizes: EngineSizes,
    *,
    banned: int,
    mesh: Mesh | None,
    split_heads: bool,
  ):
    """Creates an engine; the first `run` compiles its program.

    Args:
      decoder: the adapted model, see `paged_module`.
      sizes: the fixed shapes.
      banned: a token that only jobs with `may_draw_banned` may draw.
      mesh: the devices that hold the state; None for the default device.
      split_heads: True to shard the K/V heads of pages over the mesh axis "tp".
    """
    self.sizes = sizes
    self._model = _scaled_model(decoder.model)
    self._init_kv = decoder.init_kv
    self._process = _ban(banned)
    self._mesh = mesh
    self._split_heads = split_heads
    self._cache = decoder.cache_config(
      num_pages=sizes.num_pages,
      page_size=sizes.page_size,
      num_slots=sizes.num_slots,
      max_length=sizes.max_length,
      prefill_chunk=sizes.prefill_chunk,
    )
    self._config = RolloutConfig(
      num_samples=sizes.num_samples,
      max_new_tokens=sizes.max_length - 1,
      max_length=sizes.max_length,
      prefill_chunk=sizes.prefill_chunk,
      admissions=min(16, sizes.num_slots),
    )
    self._state: RolloutState | None = None
    self._is_stale = False
    # A copy on the host, because a thread can read the counters while `run`
    # donates the state in another thread.
    self._counters: dict[str, Any] = {}
    options = None
    if jax.default_backend() == "cpu" and jax.__version__.startswith("0.10."):
      # XLA's older code generator for CPUs needs 25% less time to compile.
      options = {"xla_cpu_use_fusion_emitters": False}
    self._run = jax.jit(
      self._program, donate_argnums=1, compiler_options=options
    )

  def run(
    self, params: Any, jobs: list[Job], *, log_probs: bool = False
  ) -> list[list[Answer]]:
    """Returns the samples of each job, in the order of its seeds.

    Args:
      params: the model's parameters.
      jobs: any number of jobs.
      log_probs: True to return log-probs. The first such call compiles again,
        and all later calls return log-probs, too.

    Raises:
      RuntimeError: a sample failed, for example for lack of pages.
      ValueError: a job does not fit `sizes`.
    """
    for job in jobs:
      client_jobs.check(job, self.sizes)
    if log_probs and not self._config.raw_log_probs:
      self._keep_log_probs()
    answers: list[list[Answer]] = [[] for _ in jobs]
    parts = client_jobs.split(jobs, self.sizes.num_samples)
    for first_part in range(0, len(parts), self.sizes.num_jobs):
      chunk = parts[first_part : first_part + self.sizes.num_jobs]
      chunk_answers = self._serve(params, [job for _, job in chunk])
      for (index, _), part_answers in zip(chunk, chunk_answers, strict=True):
        answers[index] += part_answers
    return answers

  def invalidate_cache(self) -> None:
    """Makes the next `run` invalidate all cached pages, for new weights."""
    self._is_stale = True

  def counters(self) -> dict[str, Any]:
    """Returns `jaxkv.rollout.Counters` by name; a new cache resets them."""
    return dict(self._counters)

  def num_bytes(self) -> int:
    """Returns the size of all keys and values in bytes."""
    pages = jax.eval_shape(lambda: self._init_kv(self._cache))
    leaves = jax.tree.leaves(pages)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

  def _keep_log_probs(self) -> None:
    self._config = dataclasses.replace(self._config, raw_log_probs=True)
    if self._state is not None:
      queue = self._state.queue
      records = Records(raw_log_probs=jnp.zeros_like(queue.log_probs))
      self._state = dataclasses.replace(
        self._state,
        config=self._config,
        queue=dataclasses.replace(queue, records=records),
      )

  def _serve(self, params: Any, jobs: list[Job]) -> list[list[Answer]]:
    """Serves one batch of jobs, which fits the fixed shapes."""
    batch = client_jobs.batch(jobs, self.sizes)
    # The state is donated, so it is lost if the call raises.
    state = self._state
    self._state = None
    # Clients call `run` in the contexts of different meshes, and jit would
    # compile the program again for each mesh.
    with no_mesh():
      if state is None:
        state = self._new_state()
        self._is_stale = False
      state, results = self._run(params, state, batch, np.bool_(self._is_stale))
      results = jax.device_get(results)
    self._state = state
    self._is_stale = False
    self._counters = {
      name: np.asarray(value).tolist()
      for name, value in results["counters"].items()
    }
    # The samples of job n start at row n * num_samples.
    firsts = range(0, self.sizes.total, self.sizes.num_samples)
    return [
      [self._answer(results, first_row + n) for n in range(len(job.seeds))]
      for first_row, job in zip(firsts, jobs, strict=False)
    ]

  def _answer(self, results: dict[str, Any], row: int) -> Answer:
    finish = int(results["finish"][row])
    if finish in (rollout.Finish.UNFINISHED, rollout.Finish.FAILED):
      code = int(results["code"][row])
      raise RuntimeError(
        f"A sample could not be drawn: {Status(code).name}; the engine has "
        f"{self.sizes.num_pages} pages."
      )
    prompt_length = int(results["prompt_lengths"][row])
    length = int(results["lengths"][row])
    raw = results["log_probs"]
    return Answer(
      tokens=results["tokens"][row, prompt_length:length],
      log_probs=None if raw is None else raw[row, prompt_length:length],
      finish=finish,
    )

  def _new_state(self) -> RolloutState:
    # The secret of page keys is random, so that nobody can construct equal keys
    # for different tokens.
    words = np.frombuffer(os.urandom(16), np.uint32)
    shardings = None
    if self._mesh is not None and self._split_heads:
      shapes = jax.eval_shape(self._init_state, words)
      axes = sharding.MeshAxes(self._mesh, model="tp")
      shardings = sharding.state_shardings(shapes, axes=axes)
    elif self._mesh is not None:
      shardings = NamedSharding(self._mesh, P())
    return jax.jit(self._init_state, out_shardings=shardings)(words)

  def _init_state(self, secret: Array) -> RolloutState:
    """Returns a rollout with an empty queue."""
    batch = client_jobs.batch([], self.sizes)
    jobs = self.sizes.num_jobs
    requests = rollout.Requests(
      jnp.zeros((jobs, 1), jnp.int32),
      jnp.ones((jobs,), jnp.int32),
      sampling=batch.requests.sampling,
      num_samples=jnp.zeros((jobs,), jnp.int32),
      extra=batch.requests.extra,
    )
    return rollout.init(
      init_cache(self._cache, secret),
      self._init_kv(self._cache),
      requests,
      jax.random.key(0),
      self._config,
    )

  def _program(
    self, params: Any, state: RolloutState, batch: JobBatch, stale: Array
  ) -> tuple[RolloutState, dict[str, Any]]:
    """Submits a batch, generates its samples and harvests them, under jit."""
    cache = _drop_pages(state.memory.cache, stale)
    state = dataclasses.replace(
      state, memory=dataclasses.replace(state.memory, cache=cache)
    )
    state = _with_filters(state, batch.requests.sampling)
    job_indices = jnp.arange(self.sizes.num_jobs, dtype=jnp.int32)
    state, _ = rollout.submit(
      state,
      batch.requests,
      ids=job_indices * self.sizes.num_samples,
      mask=batch.mask,
    )
    state = rollout.generate(
      params, state, model=self._model, process=self._process
    )
    state, out = rollout.harvest(state)
    results = out.results
    state = _with_filters(state, None)
    return state, {
      "tokens": results.tokens,
      "lengths": results.lengths,
      "prompt_lengths": results.prompt_lengths,
      "log_probs": results.records.raw_log_probs,
      "finish": results.finish,
      "code": results.code,
      "counters": dict(vars(state.counters)),
    }


def _drop_pages(cache: CacheState, stale: Array) -> CacheState:
  """Invalidates all cached pages if `stale` is True."""
  # Without offload pages, `new_epoch` changes only two small arrays. A
  # `lax.cond` would pass the whole cache through both branches.
  next_epoch, _ = new_epoch(cache)

  def select(new: Array, current: Array) -> Array:
    return jnp.where(stale, new, current)

  epoch, root = jax.tree.map(
    select, (next_epoch.epoch, next_epoch.root), (cache.epoch, cache.root)
  )
  return dataclasses.replace(cache, epoch=epoch, root=root)


def _with_filters(
  state: RolloutState, sampling: rollout.Sampling | None
) -> RolloutState:
  """Replaces the top-k and top-p of the queue; None removes both."""
  # A filter that is None is not compiled. Between calls both filters are None,
  # so that programs with and without filters take the same state.
  sampling = sampling or rollout.Sampling()
  filters = {"top_k": sampling.top_k, "top_p": sampling.top_p}
  queue = state.queue
  sampling = dataclasses.replace(
    queue.sampling, **jax.tree.map(jnp.asarray, filters)
  )
  queue = dataclasses.replace(queue, sampling=sampling)
  return dataclasses.replace(state, queue=queue)


def _scaled_model(model: rollout.Model) -> rollout.Model:
  """Returns a model that divides logits by their sequence's temperature."""

  def call(params: Any, batch: Batch, kv: Any) -> tuple[Array, Any]:
    logits, kv = model(params, batch, kv)
    temperature = batch.rows.extra["temperature"]
    temperature = temperature.at[batch.columns].get(mode="clip")
    temperature = jnp.where(temperature > 0, temperature, 1)[:, None]
    return logits.astype(jnp.float32) / temperature, kv

  return call


def _ban(token: int) -> rollout.Process:
  """Makes a `Process` that masks a token where `may_draw` is False."""

  def process(
    logits: Array, rows: rollout.Rows, extra: Any
  ) -> tuple[Array, Any]:
    del rows
    column = jnp.where(extra["may_draw"], logits[:, token], -jnp.inf)
    return logits.at[:, token].set(column), extra

  return process
