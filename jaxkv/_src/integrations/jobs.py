"""The requests and answers of an engine's clients, on the host."""

import dataclasses
import itertools
from typing import Any
from typing import NamedTuple

import numpy as np

from jaxkv.kv import LayerPlan
from jaxkv.rollout import Requests
from jaxkv.rollout import Sampling

_SOLO_JOBS = 16
"""`num_jobs` of an engine whose first call has one prompt with one sample."""
_MAX_SLOTS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A prompt and the settings of its samples.

  Attributes:
    prompt: the L tokens of the prompt.  # int32[L]
    seeds: a non-negative seed for each sample.
    max_tokens: the maximum number of tokens of each sample.
    temperature: the sampling temperature; 0 for greedy decoding.
    top_k: the number of most likely tokens to draw from; 0 for all tokens.
    top_p: the probability mass to draw from; 1 for all tokens.
    stop_tokens: tokens that end a sample.
    may_draw_banned: True if samples may draw the engine's banned tokens.
  """

  # The prompt is not compared, because an array's `==` is not a bool. Seeds are
  # not compared, because `joined` merges jobs that differ only in seeds.
  prompt: np.ndarray = dataclasses.field(compare=False)
  seeds: tuple[int, ...] = dataclasses.field(compare=False)
  max_tokens: int
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  stop_tokens: tuple[int, ...] = ()
  may_draw_banned: bool = False

  @property
  def filters(self) -> bool:
    """True if top-k or top-p can exclude tokens."""
    return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  """One sample of a job.

  Attributes:
    tokens: the drawn tokens, the stop token included.  # int32[T]
    log_probs: the log-prob of each token, before `top_k` and `top_p`, but after
      the temperature; None if unrecorded.  # float32[T]
    finish: a `jaxkv.rollout.Finish`.
  """

  tokens: np.ndarray
  log_probs: np.ndarray | None
  finish: int


class JobBatch(NamedTuple):
  """Arrays for up to P jobs, padded to the shapes of `EngineSizes`.

  Attributes:
    requests: the prompts and the settings of their samples.
    mask: bool[P], True for jobs, False for padding.
  """

  requests: Requests
  mask: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSizes:
  """The fixed shapes of an engine.

  Attributes:
    num_jobs: P, the number of prompts in the queue.
    num_samples: the maximum number of samples of a prompt in the queue.
    max_length: the maximum number of tokens of a sample and its prompt.
    num_stop_tokens: the maximum number of stop tokens of a job.
    num_slots: the number of samples that run at once.
    num_pages: pages of all pools together, see `jaxkv.models.cache_config`.
    page_size: tokens of a page.
    prefill_chunk: see `jaxkv.rollout.RolloutConfig`.
  """

  num_jobs: int
  num_samples: int
  max_length: int
  num_slots: int
  num_pages: int
  page_size: int
  prefill_chunk: int
  num_stop_tokens: int

  @property
  def total(self) -> int:
    """The maximum number of samples in the queue."""
    return self.num_jobs * self.num_samples


def choose_sizes(
  jobs: list[Job],
  max_length: int,
  plan: LayerPlan,
  old_sizes: EngineSizes | None,
  *,
  num_samples: int | None,
  num_jobs: int | None,
  num_pages: int | None,
  page_size: int,
  prefill_chunk: int,
) -> EngineSizes:
  """Chooses the shapes of an engine for the jobs of its first call.

  `max_length` is the maximum number of tokens of a prompt with its answer, and
  `old_sizes` are those of the engine that is replaced; None for the first. The
  user has chosen the other sizes, except those that are None.
  """
  # The new engine must also serve calls like earlier ones, so its queue is not
  # smaller than the old engine's.
  if num_samples is None:
    num_samples = max(len(job.seeds) for job in jobs)
    num_samples = max(num_samples, old_sizes.num_samples if old_sizes else 1)
  if num_jobs is None:
    num_jobs = len(split(jobs, num_samples))
    if num_jobs == 1 and len(jobs[0].seeds) == 1:
      num_jobs = _SOLO_JOBS
    num_jobs = max(num_jobs, old_sizes.num_jobs if old_sizes else 1)
  columns = -(-max_length // page_size)
  if num_pages is None:
    # The pools must have room for the longest sequence.
    tokens = num_jobs * num_samples * max_length
    num_groups = len(plan.kinds)
    half = tokens * num_groups // (2 * page_size)
    num_pages = max(half, (columns + 2) * num_groups)
  stops = max(len(job.stop_tokens) for job in jobs)
  return EngineSizes(
    num_jobs=num_jobs,
    num_samples=num_samples,
    max_length=columns * page_size,
    num_slots=min(num_jobs * num_samples, _MAX_SLOTS),
    num_pages=num_pages,
    page_size=page_size,
    prefill_chunk=prefill_chunk,
    num_stop_tokens=max(
      8, stops, old_sizes.num_stop_tokens if old_sizes else 0
    ),
  )


def joined(jobs: list[Job]) -> list[Job]:
  """Merges adjacent jobs that differ only in their seeds."""

  # Equality of jobs ignores arrays, so the key has the bytes of the prompt.
  def without_seeds(job: Job) -> tuple[Job, bytes]:
    return job, job.prompt.tobytes()

  groups = []
  for _, equal_jobs in itertools.groupby(jobs, without_seeds):
    first_job, *followers = equal_jobs
    seeds = sum((job.seeds for job in followers), first_job.seeds)
    groups.append(dataclasses.replace(first_job, seeds=seeds))
  return groups


def split(jobs: list[Job], limit: int) -> list[tuple[int, Job]]:
  """Splits jobs into parts of at most `limit` samples.

  Returns:
    Pairs of a job's index and a part of the job.
  """
  parts = []
  for index, job in enumerate(jobs):
    for start in range(0, len(job.seeds), limit):
      seeds = job.seeds[start : start + limit]
      parts.append((index, dataclasses.replace(job, seeds=seeds)))
  return parts


def check(job: Job, shapes: EngineSizes) -> None:
  """Raises ValueError unless a job fits the shapes of an engine."""
  length = len(job.prompt)
  if not length:
    raise ValueError("`prompt` must have at least one token, got none.")
  if job.max_tokens < 1:
    raise ValueError(
      f"`max_tokens` must be at least 1, got {job.max_tokens}; remove prompts "
      "that need no answer."
    )
  if length + job.max_tokens > shapes.max_length:
    raise ValueError(
      f"`prompt` must leave room for {job.max_tokens} tokens in "
      f"{shapes.max_length}, got {length}; increase the engine's `max_length`."
    )
  if len(job.stop_tokens) > shapes.num_stop_tokens:
    raise ValueError(
      f"`stop_tokens` must have at most {shapes.num_stop_tokens} tokens, got "
      f"{len(job.stop_tokens)}; remove some."
    )


def batch(jobs: list[Job], shapes: EngineSizes) -> JobBatch:
  """Converts at most `shapes.num_jobs` jobs, accepted by `check`, to arrays."""
  samples = shapes.num_samples
  num_rows = shapes.total
  prompts = np.zeros((shapes.num_jobs, shapes.max_length - 1), np.int32)
  # Rows of padding have valid lengths and settings, and are masked out.
  lengths = np.ones((shapes.num_jobs,), np.int32)
  counts = np.ones((shapes.num_jobs,), np.int32)
  columns = {
    name: np.full((num_rows,), fill, dtype)
    for name, fill, dtype in (
      ("temperature", 0, np.float32),
      ("top_k", 0, np.int32),
      ("top_p", 1, np.float32),
      ("max_tokens", 1, np.int32),
      ("seed", 0, np.int32),
    )
  }
  stops = np.full((num_rows, shapes.num_stop_tokens), -1, np.int32)
  extra = {
    "temperature": np.ones((num_rows,), np.float32),
    "may_draw": np.zeros((num_rows,), np.bool_),
  }
  for index, job in enumerate(jobs):
    prompts[index, : len(job.prompt)] = job.prompt
    lengths[index] = len(job.prompt)
    counts[index] = len(job.seeds)
    rows = slice(index * samples, index * samples + len(job.seeds))
    # The engine's model divides the logits by the temperature, so the draw must
    # not divide them again.
    columns["temperature"][rows] = job.temperature > 0
    columns["max_tokens"][rows] = job.max_tokens
    columns["top_k"][rows] = job.top_k
    columns["top_p"][rows] = job.top_p
    columns["seed"][rows] = job.seeds
    stops[rows, : len(job.stop_tokens)] = job.stop_tokens
    extra["temperature"][rows] = job.temperature or 1
    extra["may_draw"][rows] = job.may_draw_banned
  # Unused filters are removed, because a filter that is None is not compiled.
  if not any(job.filters for job in jobs):
    del columns["top_k"], columns["top_p"]
  requests = Requests(
    prompts,
    lengths,
    num_samples=counts,
    sampling=Sampling(**columns, stop_tokens=stops),
    extra=extra,
  )
  return JobBatch(requests, np.arange(shapes.num_jobs) < len(jobs))


def seeds(root: Any, count: int) -> tuple[int, ...]:
  """Derives seeds for `count` samples from the entropy `root`.

  Examples:
    >>> seeds(7, 2) == seeds(7, 3)[:2], len(set(seeds([7, 1], 100)))
    (True, 100)
  """
  words = np.random.SeedSequence(root).generate_state(count, np.uint32)
  # Seeds have 31 bits, because `Sampling` ignores a negative int32 seed.
  return tuple((words >> np.uint32(1)).tolist())
