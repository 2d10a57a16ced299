"""Engine: a rollout with its weights, its memory and compiled programs."""

import functools
import pathlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import check_bool
from jaxkv._src.arrays.arguments import check_type
from jaxkv._src.arrays.digest import digest
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.state import Status
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.counters import Counters
from jaxkv._src.engine.hooks import Draft
from jaxkv._src.engine.hooks import Process
from jaxkv._src.engine.hooks import StaticFunction
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.verbs.update_weights import Policy
from jaxkv._src.sampling.settings import Sampling
from jaxkv._src.service import devices
from jaxkv._src.service import moves
from jaxkv._src.service import programs
from jaxkv._src.service import samples
from jaxkv._src.service import scoring
from jaxkv._src.service import served_model
from jaxkv._src.service.held_rollout import HeldRollout
from jaxkv._src.service.prompt_reader import PromptReader
from jaxkv._src.service.samples import NewTokens
from jaxkv._src.service.samples import PromptSamples
from jaxkv._src.service.samples import Room
from jaxkv._src.service.samples import Samples
from jaxkv._src.service.stream import Stream
from jaxkv._src.sharding.mesh_axes import MeshAxes
from jaxkv._src.transfer import snapshot
from jaxkv._src.transfer.exported import Exported


class Engine:
  """A rollout that lives on: prompts enter, and samples leave.

  An engine holds a `RolloutState` with the pages of its cache, and the compiled
  programs that change it. All calls have the shapes of the engine, and prompts
  are padded to powers of two, so calls with other prompts compile nothing.
  Pages stay cached between calls.

  One thread calls at a time; others wait, in no particular order. If a call
  fails while the state is donated, its sequences and pages are lost: the call
  raises a RuntimeError that says so, and the engine goes on with an empty
  cache.

  Examples:
    >>> import functools
    >>> import jax, jaxkv
    >>> from jaxkv import models, rollout
    >>> decoder = models.llama(
    ...   vocab_size=11, num_layers=1, embed_dim=8, num_heads=4,
    ...   num_kv_heads=2, head_dim=2, mlp_dim=16
    ... )
    >>> engine = rollout.Engine(
    ...   models.init_params(jax.random.key(0), decoder),
    ...   functools.partial(models.forward, config=decoder),
    ...   models.cache_config(decoder, num_slots=4, max_length=32),
    ... )
    >>> out = engine.generate([[3, 1, 4], [1, 5]], num_samples=2,
    ...                       max_new_tokens=4)
    >>> out.results.tokens.shape, out.results.mask.sum(axis=1).tolist()
    ((4, 7), [4, 4, 4, 4])
  """

  def __init__(
    self,
    params: Any,
    model: Any,
    cache: CacheConfig | int,
    config: RolloutConfig | None = None,
    *,
    axes: MeshAxes | None = None,
    process: Process | None = None,
    draft: Draft | None = None,
    tokenizer: Any = None,
    init_kv: Callable[[CacheConfig], Any] | None = None,
    num_prompts: int | None = None,
    key: jax.Array | None = None,
    secret: Any = None,
    first_sequence: int = 0,
  ):
    """Creates an engine; its first call compiles the loop.

    Args:
      params: the model's parameters. The engine keeps them, so do not donate
        them before `release_weights`. See `axes` for several devices.
      model: a `jaxkv.models.Pretrained`, or a function, see `Model`.
      cache: the sizes of the cache, or the number of bytes of its K/V.
      config: static options; None for the defaults. `max_new_tokens` is the
        default of `generate`. `max_length` is the longest sequence; 0 for what
        a slot holds.
      axes: a mesh. Along `axes.model` K/V heads are split; along `axes.data`
        each shard has a cache and a queue of these sizes for a part of the
        prompts, and no sequences move. Parameters on its devices keep their
        shardings; others are placed by `jaxkv.sharding.param_shardings`. None
        for the devices of `params`; if several, each holds the whole cache.
      process: see `generate`.
      draft: see `generate`.
      tokenizer: an object with `encode`, `encode_chat` and `decode`; None for
        that of `model`.
      init_kv: makes the K/V memory of a CacheConfig; only for a `model` that is
        not one of `jaxkv.models`.
      num_prompts: the prompts that wait or run on the device; None for enough
        that the slots stay busy.
      key: key[]; None for `jax.random.key(0)`.
      secret: uint32[4], see `jaxkv.init`; None for a random one. Engines
        between which sequences move need equal ones.
      first_sequence: the id of the first sequence. Engines with equal keys draw
        different samples if their ids differ.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: `cache` is too small, or arguments do not fit each other.
    """
    config = RolloutConfig() if config is None else config
    check_type("config", config, RolloutConfig, "a RolloutConfig")
    as_count("RolloutConfig.max_new_tokens", config.max_new_tokens, 1)
    own_model = served_model.served(model, config, init_kv)
    cache = served_model.sized(own_model, cache, config)
    axes = devices.axes_of(params, own_model, axes)
    self._weights = devices.Weights(params, own_model, axes)
    self._config = served_model.longest_config(config, cache, axes)
    functions = own_model.call, process, draft
    self._functions = tuple(map(StaticFunction, functions))
    self._reader = PromptReader(
      own_model,
      self._config,
      max_new_tokens=config.max_new_tokens,
      tokenizer=tokenizer,
    )
    self._held = HeldRollout(
      self._config,
      cache,
      axes=axes,
      num_prompts=num_prompts,
      init_kv=devices.kv_maker(params, own_model, axes, cache),
      key=jax.random.key(0) if key is None else key,
      secret=secret,
      first_sequence=as_count("first_sequence", first_sequence, 0),
    )

  def generate(
    self,
    prompts: Any,
    *,
    sampling: Sampling | None = None,
    num_samples: int | None = None,
    max_new_tokens: int | None = None,
  ) -> Samples:
    """Generates samples of each prompt, and returns when all have ended.

    There can be any number of prompts and samples: as rows become free, further
    prompts enter.

    Args:
      prompts: a list of prompts. Each is a text, token ids int32[L], or a chat:
        a list of messages `{"role": ..., "content": ...}`. Or a `Requests`,
        without the other arguments.
      sampling: settings of the P * n samples, see `Samples.results`; None for
        temperature 1. A field that no earlier call had compiles the loop again.
        The stop tokens of a `Pretrained` apply unless `stop_tokens` is set.
      num_samples: n, the number of samples of each prompt; None for
        `RolloutConfig.num_samples`.
      max_new_tokens: the maximum number of tokens of a sample; None for
        `RolloutConfig.max_new_tokens`.

    Returns:
      The samples. `results.finish` and `results.code` say why each ended.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a prompt is empty or too long, or a token or an argument is
        out of range.
      RuntimeError: the engine is closed, other sequences leave no room, or a
        program failed.
    """
    # An error of the tokenizer at the end would lose the samples.
    self._reader.texts([])
    requests = self._reader.requests(
      prompts,
      sampling=sampling,
      num_samples=num_samples,
      max_new_tokens=max_new_tokens,
    )
    with self._held.locked():
      stream = Stream(self._held, requests, self.step).results()
      ended = [out for out in stream if isinstance(out, PromptSamples)]
    num_prompts = len(getattr(prompts, "lengths", prompts))
    return samples.with_texts(ended, num_prompts, self._reader.texts, requests)

  def stream(
    self,
    prompts: Any,
    *,
    sampling: Sampling | None = None,
    num_samples: int | None = None,
    max_new_tokens: int | None = None,
    tokens: bool = False,
    steps: int | None = None,
  ) -> Iterator[PromptSamples | NewTokens]:
    """Generates samples of each prompt, and yields each prompt when it ends.

    A prompt with more than `RolloutConfig.num_samples` samples is yielded in
    parts. If the caller does not read the stream to its end, its prompts are
    aborted. See `generate` for the other arguments and errors.

    Args:
      prompts: see `generate`.
      sampling: see `generate`.
      num_samples: see `generate`.
      max_new_tokens: see `generate`.
      tokens: True to also yield the `NewTokens` of sequences that run. After
        `update_weights(policy="drop")` some can be missing.
      steps: the number of model calls between two yields; None for those of
        `step`, or for 8 with `tokens`.
    """
    requests = self._reader.requests(
      prompts,
      sampling=sampling,
      num_samples=num_samples,
      max_new_tokens=max_new_tokens,
    )
    check_bool("tokens", tokens)
    if steps is None and tokens:
      steps = 8
    if steps is not None:
      steps = as_count("steps", steps, 1)
    advance = functools.partial(self.step, steps)
    return Stream(self._held, requests, advance, reads_tokens=tokens).results()

  def submit(
    self,
    prompts: Any,
    *,
    sampling: Sampling | None = None,
    num_samples: int | None = None,
    max_new_tokens: int | None = None,
    ids: Sequence[int] | None = None,
  ) -> np.ndarray:
    """Adds prompts to the queue; `step` computes them.

    Args:
      prompts: see `generate`.
      sampling: see `generate`.
      num_samples: at most `RolloutConfig.num_samples`.
      max_new_tokens: see `generate`.
      ids: the id of each prompt's first sample; None to continue after the
        largest id so far.  # int32[P]

    Returns:
      The id of each prompt's first sample; the other samples have the next
      ids. -1 for a prompt for which the queue has no room.  # int32[P]

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: as for `generate`.
    """
    requests = self._reader.of_one_call(
      prompts,
      sampling=sampling,
      num_samples=num_samples,
      max_new_tokens=max_new_tokens,
    )
    with self._held.locked():
      return self._held.submit(requests, ids)

  def step(self, steps: int | None = None) -> int:
    """Generates tokens; returns the number of sequences that are unfinished.

    Args:
      steps: the maximum number of model calls; None for about half a second,
        or until as many sequences have ended as there are slots.
    """
    if steps is not None:
      steps = as_count("steps", steps, 1)
    with self._held.locked():
      return self._held.advance(self._weights.read(), self._functions, steps)

  def harvest(self) -> list[PromptSamples]:
    """Removes and returns the prompts whose samples have all ended."""
    with self._held.locked():
      return self._held.harvest()

  def abort(self, ids: Sequence[int]) -> list[Status]:
    """Ends sequences and frees their pages, see `jaxkv.rollout.abort`."""
    with self._held.locked():
      return self._held.by_id(programs.abort, ids)

  def extend(
    self,
    ids: Sequence[int],
    tokens: Sequence[Any],
    *,
    max_new_tokens: int | None = None,
    priority: Sequence[int] | None = None,
  ) -> list[Status]:
    """Appends tokens to sequences and resumes them.

    Args:
      ids: the ids of R sequences, ended or running.
      tokens: R lists of token ids, such as the answer of a tool.
      max_new_tokens: the maximum number of tokens to sample in the new turn;
        None for `RolloutConfig.max_new_tokens`.
      priority: a new `Requests.priority` of each sequence; None to keep them.

    Returns:
      A `Status` for each sequence, see `jaxkv.rollout.extend`.
    """
    rows, options = self._reader.new_turn(
      tokens, len(ids), max_new_tokens, priority
    )
    with self._held.locked():
      return self._held.by_id(programs.extend, ids, *rows, **options)

  def branch(self, ids: Sequence[int], num_branches: int) -> np.ndarray:
    """Copies sequences, see `jaxkv.rollout.branch`.

    Args:
      ids: the ids of R sequences, ended or running.
      num_branches: n, the number of copies of each.

    Returns:
      The ids of the copies; -1 for a sequence that cannot be copied, or for
      which the queue has no room.  # int32[R, n]
    """
    num_branches = as_count("num_branches", num_branches, 1)
    with self._held.locked():
      return self._held.branch(ids, num_branches)

  def update_weights(
    self,
    params: Any,
    policy: Policy = "recompute",
    *,
    version: int | None = None,
    max_age: int | None = None,
  ) -> list[int]:
    """Replaces the weights, see `jaxkv.rollout.update_weights`.

    Args:
      params: arrays with the shapes of the first weights. The engine keeps
        them, so do not donate them before `release_weights`.
      policy: what becomes of unfinished sequences.
      version: the version of the weights, above that of the old ones; None for
        the next one. After `release_weights`, the same version is for equal
        weights in other arrays, which keep the pages.
      max_age: prompts are removed if an unfinished sample has a token of a
        version before `version - max_age`, except prompts of streams; None to
        remove none.

    Returns:
      The ids of the prompts that were removed.
    """
    with self._held.locked():
      first_version = self._held.version + (not self._weights.is_released)
      version = self._held.next_version(version, first_version)
      placed_params = self._weights.placed(params)
      dropped = self._held.update_weights(policy, version, max_age)
      self._weights.replace(placed_params)
      return dropped

  def release_weights(self) -> None:
    """Lets go of the weights, until `update_weights`.

    So a trainer can donate them, or use their memory.
    """
    with self._held.locked():
      self._weights.release()

  def score(
    self,
    prompts: Sequence[Any],
    completions: Sequence[Sequence[Any]],
    **options: Any,
  ) -> Any:
    """Computes log-probs of completions, see `jaxkv.rollout.score`.

    Another number of completions of a prompt compiles again.

    Args:
      prompts: N prompts, as in `generate`.
      completions: for each prompt, G lists of token ids.
      **options: `temperature`, `entropy`, `top_log_probs`, `chunk`, `salts` and
        `extra` of `jaxkv.rollout.score`.

    Returns:
      A `jaxkv.rollout.Scored`, as NumPy arrays; the columns end with the
      longest completion.
    """
    rows = self._reader.tokens(prompts, self._config.max_length - 1)
    with self._held.locked():
      return scoring.score(
        self._held,
        self._weights.read(),
        self._functions[0],
        rows,
        completions,
        vocab_size=self._reader.vocab_size,
        **options,
      )

  @property
  def state(self) -> RolloutState:
    """The state, a value that may be kept.

    The next call that changes the engine copies the K/V memory once, because it
    cannot donate a state that somebody may keep.
    """
    with self._held.locked():
      return self._held.lend()

  @property
  def counters(self) -> Counters:
    """The counters of the rollout, or of each shard, as NumPy arrays."""
    with self._held.locked():
      return jax.device_get(self._held.read().counters)

  def room(self) -> Room:
    """Returns the room for further prompts."""
    with self._held.locked():
      return self._held.room()

  def match(self, prompts: Any) -> np.ndarray:
    """Returns the number of cached tokens of each prompt, int32[P].

    `prompts` are as in `generate`.
    """
    requests = self._reader.to_match(prompts)
    with self._held.locked():
      return self._held.match(requests)

  def weights_digest(self) -> tuple[int, ...]:
    """Returns a digest of the weights, which engines with equal ones share."""
    with self._held.locked():
      return digest(jax.tree.leaves(self._weights.read()))

  def export(self) -> Exported:
    """Removes and returns all sequences, see `jaxkv.rollout.export`.

    Sequences of streams stay. The result has NumPy arrays.
    """
    with self._held.locked():
      return moves.export(self._held)

  def import_sequences(
    self, exported: Exported, ids: Sequence[int] | None = None
  ) -> list[int]:
    """Adds sequences, see `jaxkv.rollout.import_sequences`.

    Args:
      exported: from an engine of an equal model, with the same `secret` for its
        pages to be used.
      ids: the ids of the prompts to add; None for all.

    Returns:
      The ids of the prompts that entered, with all of their samples.
    """
    with self._held.locked():
      return moves.import_sequences(self._held, exported, ids)

  def save(self, folder: str | pathlib.Path, *, pages: bool = True) -> None:
    """Saves the state, see `jaxkv.checkpoint.save`."""
    with self._held.locked():
      snapshot.save(folder, self._held.read(), pages=pages)

  def restore(self, folder: str | pathlib.Path) -> None:
    """Restores the state that `save` of an equal engine wrote.

    The queue must have the optional fields of that engine. To give them to a
    new engine, `generate` a prompt with the same `sampling` first.
    """
    with self._held.locked():
      state = snapshot.restore(folder, self._held.read())
      self._held.replace(state)

  def close(self) -> None:
    """Frees the memory of the cache; further calls raise a RuntimeError."""
    with self._held.locked():
      self._held.replace(None)
      self._weights.release()

  def __enter__(self) -> "Engine":
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()
