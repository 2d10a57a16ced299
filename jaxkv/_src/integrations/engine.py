"""An engine: a rollout of fixed shapes that lives across the calls of a client.

Its program is compiled once. A call puts prompts into the empty queue, runs it
to the end and takes the answers out. The pages stay, so a later prompt finds
the prefix that it shares with an earlier prompt or answer.
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

import jaxkv.kv
from jaxkv import CacheState
from jaxkv import Status
from jaxkv import init as init_cache
from jaxkv import new_epoch
from jaxkv import rollout
from jaxkv._src.integrations import jobs as client_jobs
from jaxkv._src.integrations.jobs import Answer
from jaxkv._src.integrations.jobs import Batch
from jaxkv._src.integrations.jobs import EngineSizes
from jaxkv._src.integrations.jobs import Job
from jaxkv._src.integrations.no_mesh import no_mesh
from jaxkv._src.integrations.paged_module import PagedModule
from jaxkv.rollout import Records
from jaxkv.rollout import RolloutConfig
from jaxkv.rollout import RolloutState


class QueueEngine:
  """A rollout that serves batches of jobs, one after the other.

  Not for several threads at once. If a call raises, its pages are lost, and
  later calls begin with an empty cache.

  Attributes:
    sizes: the fixed shapes.
  """

  def __init__(
    self,
    decoder: PagedModule,
    sizes: EngineSizes,
    *,
    scaled: bool = False,
    banned: tuple[int, ...] = (),
    salted: bool = False,
    mesh: Mesh | None = None,
    split_heads: bool = False,
  ):
    """Compiles nothing yet.

    Args:
      decoder: whose logits are drawn from.
      sizes: the fixed shapes.
      scaled: whether log-probabilities are those of logits divided by the
        temperature.
      banned: tokens that no job draws unless it may.
      salted: whether jobs have salts.
      mesh: on whose devices the state lies.
      split_heads: whether the pages are split by the axis "tp" of the mesh.
    """
    self.sizes = sizes
    self._model = _Scaled(decoder.model) if scaled else decoder.model
    self._memory = decoder.init_kv
    self._scaled = scaled
    self._salted = salted
    self._process = _Ban(banned) if banned else None
    self._mesh, self._split_heads = mesh, split_heads
    self._cache = decoder.cache_config(
      num_pages=sizes.num_pages,
      page_size=sizes.page_size,
      num_slots=sizes.num_slots,
      pages_per_slot=-(-sizes.max_length // sizes.page_size),
    )
    self._config = RolloutConfig(
      num_samples=sizes.num_samples,
      max_new_tokens=sizes.max_length - 1,
      max_length=sizes.max_length,
      prefill_chunk=sizes.prefill_chunk,
      admissions=min(16, sizes.num_slots),
    )
    self._state: RolloutState | None = None
    self._stale = False
    # Not read from the state, which another thread may have given away.
    self._counters: dict[str, Any] = {}
    options = None
    if jax.default_backend() == "cpu" and jax.__version__.startswith("0.10."):
      # XLA's older way to make code for a CPU, which takes a quarter less time.
      options = {"xla_cpu_use_fusion_emitters": False}
    self._run = jax.jit(self._ran, donate_argnums=1, compiler_options=options)

  def run(
    self, params: Any, jobs: list[Job], *, log_probs: bool = False
  ) -> list[list[Answer]]:
    """The samples of each job, in the order of its seeds.

    Args:
      params: the model's.
      jobs: any number of them.
      log_probs: whether to keep log-probabilities. From the first call on that
        keeps them, all do, which is compiled then.

    Raises:
      RuntimeError: a sample could not run, because the pool has too few pages.
      ValueError: a job does not fit.
    """
    for job in jobs:
      client_jobs.check(job, self.sizes)
    if log_probs and not self._config.raw_log_probs:
      self._keep_log_probs()
    answers: list[list[Answer]] = [[] for _ in jobs]
    parts = client_jobs.split(jobs, self.sizes.num_samples)
    for first in range(0, len(parts), self.sizes.num_jobs):
      some = parts[first : first + self.sizes.num_jobs]
      found = self._serve(params, [job for _, job in some])
      for (number, _), own in zip(some, found, strict=True):
        answers[number] += own
    return answers

  def forget(self) -> None:
    """The weights have changed: no page of before is found any more."""
    self._stale = True

  def counters(self) -> dict[str, Any]:
    """What has been done so far, see `jaxkv.rollout.Counters`."""
    return dict(self._counters)

  def num_bytes(self) -> int:
    """Bytes of keys and values."""
    pages = jax.eval_shape(lambda: self._memory(self._cache))
    leaves = jax.tree.leaves(pages)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

  def _keep_log_probs(self) -> None:
    self._config = dataclasses.replace(self._config, raw_log_probs=True)
    if self._state is not None:
      like = self._state.sequences.log_probs
      sequences = dataclasses.replace(
        self._state.sequences,
        records=Records(raw_log_probs=jnp.zeros_like(like)),
      )
      self._state = dataclasses.replace(
        self._state, config=self._config, sequences=sequences
      )

  def _serve(self, params: Any, jobs: list[Job]) -> list[list[Answer]]:
    """Up to P jobs of up to G samples."""
    batch = client_jobs.batch(jobs, self.sizes, scaled=self._scaled)
    if self._salted and batch.salts is None:
      batch = batch._replace(salts=np.zeros((self.sizes.total, 4), np.uint32))
    state, self._state = self._state, None  # Lost if the call raises.
    with no_mesh():
      if state is None:
        state = self._empty()
        self._stale = False
      state, results = self._run(params, state, batch, np.bool_(self._stale))
      results = jax.device_get(results)
    self._state, self._stale = state, False
    self._counters = {
      name: np.asarray(value).tolist()
      for name, value in results["counters"].items()
    }
    firsts = range(0, self.sizes.total, self.sizes.num_samples)
    return [
      [self._answer(results, first + own) for own in range(len(job.seeds))]
      for first, job in zip(firsts, jobs, strict=False)
    ]

  def _answer(self, results: dict[str, Any], row: int) -> Answer:
    finish, code = int(results["finish"][row]), int(results["code"][row])
    if finish in (rollout.Finish.UNFINISHED, rollout.Finish.FAILED):
      raise RuntimeError(
        f"A sample could not be drawn: {Status(code).name}; give the engine "
        f"more pages than {self.sizes.num_pages}."
      )
    begin = int(results["prompt_lengths"][row])
    end = int(results["lengths"][row])
    raw = results["log_probs"]
    return Answer(
      tokens=results["tokens"][row, begin:end],
      log_probs=None if raw is None else raw[row, begin:end],
      finish=finish,
    )

  def _empty(self) -> RolloutState:
    words = np.frombuffer(os.urandom(16), np.uint32)
    places = None
    if self._mesh is not None and self._split_heads:
      shapes = jax.eval_shape(self._begun, words)
      places = rollout.devices.shardings(shapes, self._mesh, heads="tp")
    elif self._mesh is not None:
      places = NamedSharding(self._mesh, P())
    return jax.jit(self._begun, out_shardings=places)(words)

  def _begun(self, secret: Array) -> RolloutState:
    """A rollout whose rows are all empty."""
    batch = client_jobs.batch([], self.sizes, scaled=self._scaled)
    jobs = self.sizes.num_jobs
    salts = jnp.zeros((self.sizes.total, 4), jnp.uint32)
    return rollout.init(
      init_cache(self._cache, secret),
      self._memory(self._cache),
      jnp.zeros((jobs, 1), jnp.int32),
      jnp.ones((jobs,), jnp.int32),
      jax.random.key(0),
      self._config,
      sampling=batch.sampling,
      num_samples=jnp.zeros((jobs,), jnp.int32),
      salts=salts if self._salted else None,
      user=batch.user,
    )

  def _ran(
    self, params: Any, state: RolloutState, batch: Batch, stale: Array
  ) -> tuple[RolloutState, dict[str, Any]]:
    """Everything that a call does on the device."""
    state = dataclasses.replace(
      state,
      cache=_renewed(state.cache, stale),
      sampling=_with(state.sampling, batch.sampling),
    )
    numbers = jnp.arange(self.sizes.num_jobs, dtype=jnp.int32)
    state, _ = rollout.submit(
      state,
      batch.prompts,
      batch.lengths,
      ids=numbers * self.sizes.num_samples,
      num_samples=batch.num_samples,
      sampling=batch.sampling,
      salts=batch.salts,
      user=batch.user,
      mask=batch.mask,
    )
    state = rollout.generate(
      params, state, model=self._model, process=self._process
    )
    code = state.sequences.code
    state, out = rollout.harvest(state)
    results = out.results
    state = dataclasses.replace(
      state, sampling=_with(state.sampling, rollout.Sampling())
    )
    return state, {
      "tokens": results.tokens,
      "lengths": results.lengths,
      "prompt_lengths": results.prompt_lengths,
      "log_probs": results.records.raw_log_probs,
      "finish": results.finish,
      "code": code,
      "counters": dict(vars(state.counters)),
    }


def _renewed(cache: CacheState, stale: Array) -> CacheState:
  """A cache that finds no page of before, if `stale`."""
  newer, _ = new_epoch(cache)

  def chosen(one: Array, other: Array) -> Array:
    return jnp.where(stale, one, other)

  epoch, root = jax.tree.map(
    chosen, (newer.epoch, newer.root), (cache.epoch, cache.root)
  )
  return dataclasses.replace(cache, epoch=epoch, root=root)


def _with(have: rollout.Sampling, wanted: rollout.Sampling) -> rollout.Sampling:
  """Settings with those filters that a batch has.

  A filter that no job needs is not compiled, and between calls there is none,
  so that one program follows any other.
  """
  return dataclasses.replace(
    have,
    top_k=None if wanted.top_k is None else jnp.asarray(wanted.top_k),
    top_p=None if wanted.top_p is None else jnp.asarray(wanted.top_p),
  )


class _Scaled:
  """A model whose logits are divided by the temperature of their sequence."""

  def __init__(self, model: rollout.Model):
    self._model = model

  def __call__(
    self,
    params: Any,
    tokens: Array,
    positions: Array,
    kv: jaxkv.kv.KVPages,
    views: Any,
    columns: Array,
    rows: rollout.Rows,
  ) -> tuple[Array, jaxkv.kv.KVPages]:
    logits, kv = self._model(
      params, tokens, positions, kv, views, columns, rows
    )
    heat = rows.user["temperature"].at[columns].get(mode="clip")
    heat = jnp.where(heat > 0, heat, 1)[:, None]
    return logits.astype(jnp.float32) / heat, kv


class _Ban:
  """A `Process` that keeps tokens from being drawn."""

  def __init__(self, tokens: tuple[int, ...]):
    self._tokens = tokens

  def __call__(
    self, logits: Array, rows: rollout.Rows, user: Any
  ) -> tuple[Array, Any]:
    del rows
    for token in self._tokens:
      own = jnp.where(user["may_draw"], logits[:, token], -jnp.inf)
      logits = logits.at[:, token].set(own)
    return logits, user
