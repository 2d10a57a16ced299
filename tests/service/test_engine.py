"""`rollout.Engine`: batches, streams, failures, threads and the end."""

import contextlib
import functools
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv._src.service import programs
from tests.models import tiny_decoders

_DECODER = tiny_decoders.llama(vocab_size=32)
_CACHE = jaxkv.CacheConfig(
  num_pages=80, page_size=2, num_slots=3, pages_per_slot=16
)
_CONFIG = rollout.RolloutConfig(
  num_samples=2, max_new_tokens=5, prefill_chunk=8, raw_log_probs=True
)
_GREEDY = rollout.Sampling(temperature=0.0)
_traces: list[int] = []


def _model(params, batch, kv, *, config):
  _traces.append(1)
  return models.forward(params, batch, kv, config=config)


@functools.cache
def _params(seed: int):
  return models.init_params(jax.random.key(seed), _DECODER)


def _engine() -> rollout.Engine:
  """Returns an engine whose programs all tests share."""
  model = functools.partial(_model, config=_DECODER)
  engine = rollout.Engine(_params(0), model, _CACHE, _CONFIG, num_prompts=16)
  _compile(engine)
  return engine


def _compile(engine: rollout.Engine) -> None:
  # One field of `Sampling` in all calls, so that the loop compiles once.
  engine.generate([[1]], sampling=_GREEDY, max_new_tokens=1)


@pytest.fixture(scope="module")
def _engine_of_module() -> Iterator[rollout.Engine]:
  with _engine() as engine:
    yield engine


@pytest.fixture
def shared_engine(_engine_of_module) -> rollout.Engine:
  """Returns one engine for all tests, compiled."""
  # The test before may have been the one after which programs are dropped.
  _compile(_engine_of_module)
  return _engine_of_module


@contextlib.contextmanager
def _no_compilation() -> Iterator[None]:
  """Fails if the model is traced within the block."""
  num_traces = len(_traces)
  yield
  assert len(_traces) == num_traces


def _prompts(seed: int, count: int, longest: int = 12) -> list[list[int]]:
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, longest + 1, count)
  return [rng.integers(0, 32, length).tolist() for length in lengths]


@jax.jit
def _uncached(params, tokens):
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  logits = models.forward_uncached(params, tokens, positions, config=_DECODER)
  return jax.nn.log_softmax(logits[:, :-1])


def _check_log_probs(results: rollout.Generated, seed: int = 0) -> None:
  """Compares the log-probs with those of a pass without a cache."""
  width = 32 - results.tokens.shape[1]
  tokens = np.pad(results.tokens, ((0, 0), (0, width)))
  for row, mask, raw in zip(
    tokens, results.mask, results.records.raw_log_probs, strict=True
  ):
    log_probs = np.asarray(_uncached(_params(seed), row[None]))[0]
    drawn = np.take_along_axis(log_probs, row[1:, None], axis=1)[:, 0]
    columns = np.flatnonzero(mask)
    np.testing.assert_allclose(raw[columns], drawn[columns - 1], atol=1e-4)


def test_batches_of_any_size_use_the_compiled_programs(shared_engine):
  """More prompts and samples than the queue has rows, of other lengths."""
  sampling = rollout.Sampling(temperature=1.0)
  with _no_compilation():
    for count, num_samples in ((3, 2), (40, 1), (2, 5)):
      prompts = _prompts(count, count)
      out = shared_engine.generate(
        prompts, sampling=sampling, num_samples=num_samples
      )
      results = out.results
      assert out.texts is None
      assert results.valid.all() and len(results.valid) == count * num_samples
      for index, prompt in enumerate(prompts):
        for row in range(index * num_samples, (index + 1) * num_samples):
          assert results.tokens[row, : len(prompt)].tolist() == prompt
          assert results.lengths[row] == len(prompt) + 5
      _check_log_probs(results)
  drawn = {
    tuple(row[mask])
    for row, mask in zip(results.tokens, results.mask, strict=True)
  }
  assert len(drawn) > 1


def test_stream_yields_each_prompt_once_when_it_ends(shared_engine):
  """The longest answer, which enters first, comes last."""
  prompts = _prompts(5, 5, longest=4)
  sampling = rollout.Sampling(
    temperature=0.0, max_tokens=np.repeat([28, 1, 1, 1, 1], 2)
  )
  with _no_compilation():
    stream = shared_engine.stream(prompts, sampling=sampling, max_new_tokens=28)
    ended = list(stream)
  assert len({out.id for out in ended}) == 5
  assert ended[-1].id == min(out.id for out in ended)
  assert ended[-1].results.lengths[0] == len(prompts[0]) + 28


def test_stream_of_tokens_yields_each_token_once(shared_engine):
  """The new tokens of a sequence, joined, are those that it ends with."""
  shared_engine.submit([[9, 9]], sampling=_GREEDY)  # of another caller
  stream = shared_engine.stream(
    _prompts(8, 20), sampling=_GREEDY, tokens=True, steps=2
  )
  tokens: dict[int, list[int]] = {}
  num_ended = 0
  for out in stream:
    if isinstance(out, rollout.NewTokens):
      assert out.tokens.size
      tokens.setdefault(out.id, []).extend(out.tokens.tolist())
      continue
    num_ended += 1
    for row in range(2):
      mask = out.results.mask[row]
      drawn = out.results.tokens[row][mask].tolist()
      assert tokens.pop(out.id + row) == drawn
  assert num_ended == 20 and not tokens
  assert len(shared_engine.harvest()) == 1


def test_stream_that_is_not_read_to_its_end_leaves_nothing(shared_engine):
  room = shared_engine.room().prompts
  stream = shared_engine.stream(_prompts(9, 4), sampling=_GREEDY, steps=1)
  next(stream)
  assert shared_engine.harvest() == []
  stream.close()
  assert shared_engine.room().prompts == room and shared_engine.step(1) == 0


def test_sequences_continue_after_tokens_of_a_tool(shared_engine):
  with _no_compilation():
    ids = shared_engine.submit([[1, 2, 3]], sampling=_GREEDY)
    while shared_engine.step():
      pass
    codes = shared_engine.extend([int(ids[0])], [[7, 8]], max_new_tokens=3)
    assert codes == [jaxkv.Status.OK]
    while shared_engine.step(1):
      pass
    (out,) = shared_engine.harvest()
  assert out.id == ids[0]
  assert out.results.lengths.tolist() == [3 + 5 + 2 + 3, 3 + 5]
  assert not out.results.mask[0, 8:10].any()
  _check_log_probs(out.results)


def test_aborted_sequences_end(shared_engine):
  ids = shared_engine.submit([[1, 2, 3]], sampling=_GREEDY)
  codes = shared_engine.abort([int(ids[0]), int(ids[0]) + 1, 10**6])
  assert codes == [jaxkv.Status.OK] * 2 + [jaxkv.Status.BAD_SEQUENCE]
  (out,) = shared_engine.harvest()
  assert out.results.lengths.tolist() == [3, 3]


def test_refused_prompts_get_no_id(shared_engine):
  """The queue has room for some prompts; the others can be submitted later."""
  room = shared_engine.room().prompts
  ids = shared_engine.submit(_prompts(1, room + 2), sampling=_GREEDY)
  assert np.sum(ids < 0) == 2 and shared_engine.room().prompts == 0
  with pytest.raises(RuntimeError, match="no room for a prompt"):
    while shared_engine.step():
      pass
    shared_engine.generate([[1]], sampling=_GREEDY)
  assert len(shared_engine.harvest()) == room


def test_new_weights_compile_nothing_and_use_no_old_page():
  with _engine() as engine:
    prompt = [5, 3, 5, 3, 1]
    engine.generate([prompt], sampling=_GREEDY)
    assert engine.match([prompt]).tolist() == [4]
    with _no_compilation():
      engine.update_weights(_params(1))
      assert engine.match([prompt]).tolist() == [0]
      out = engine.generate([prompt], sampling=_GREEDY)
    assert out.results.versions.max() == 1
    _check_log_probs(out.results, seed=1)


def test_scores_are_those_of_a_pass_without_a_cache(shared_engine):
  prompt = [1, 2, 3]
  completions = [[4, 5, 6], [7]]
  scored = shared_engine.score([prompt], [completions])
  assert scored.log_probs.shape == (1, 2, 3)
  for values, completion in zip(scored.log_probs[0], completions, strict=True):
    row = np.zeros((32,), np.int32)
    row[: 3 + len(completion)] = prompt + completion
    log_probs = np.asarray(_uncached(_params(0), row[None]))[0]
    expected = [log_probs[2 + i, token] for i, token in enumerate(completion)]
    np.testing.assert_allclose(values[: len(completion)], expected, atol=1e-4)
  shared_engine.score([prompt] * 3, [completions] * 3)
  with _no_compilation():
    more = shared_engine.score([prompt, [9], prompt, prompt], [completions] * 4)
  assert more.code.tolist() == [0] * 4 and more.log_probs.shape == (4, 2, 3)
  np.testing.assert_allclose(more.log_probs[3], scored.log_probs[0], atol=1e-4)


def test_weights_of_other_shapes_are_refused(shared_engine):
  params = _params(0) | {"embed": _params(0)["embed"][:-1]}
  with pytest.raises(ValueError, match=r"`params\['embed'\]` must have"):
    shared_engine.update_weights(params)
  shared_engine.generate([[1, 2]], sampling=_GREEDY)


def test_a_state_that_was_read_stays_valid(shared_engine):
  ids = shared_engine.submit([[1, 2, 3]], sampling=_GREEDY)
  state = shared_engine.state
  while shared_engine.step():
    pass
  status = np.asarray(state.queue.status)
  assert (status == rollout.SequenceStatus.WAITING).sum() == 2
  assert [out.id for out in shared_engine.harvest()] == ids.tolist()
  assert int(shared_engine.counters.steps) > int(state.counters.steps)


def _fail_after_donation(monkeypatch) -> None:
  """Lets the program of a step raise after it has taken the state."""
  advance = programs.advance

  def failing(*arguments, **options):
    advance(*arguments, **options)
    raise ValueError("out of memory")

  monkeypatch.setattr(programs, "advance", failing)


def test_failure_after_donation_restarts_with_an_empty_cache(monkeypatch):
  with _engine() as engine:
    prompt = [5, 3, 5, 3, 1]
    engine.generate([prompt], sampling=_GREEDY)
    _fail_after_donation(monkeypatch)
    with pytest.raises(RuntimeError, match="lost its sequences"):
      engine.generate([prompt], sampling=_GREEDY)
    monkeypatch.undo()
    assert engine.match([prompt]).tolist() == [0]
    out = engine.generate([prompt], sampling=_GREEDY)
    _check_log_probs(out.results)


def test_failure_before_donation_changes_nothing(monkeypatch):
  with _engine() as engine:
    ids = engine.submit([[1, 2, 3]], sampling=_GREEDY)

    def failing(*_, **__):
      raise KeyboardInterrupt

    monkeypatch.setattr(programs, "advance", failing)
    with pytest.raises(KeyboardInterrupt):
      engine.step()
    monkeypatch.undo()
    while engine.step():
      pass
    assert [out.id for out in engine.harvest()] == ids.tolist()


def test_threads_take_turns(shared_engine):
  results = {}

  def run(seed: int) -> None:
    prompts = _prompts(seed, 4)
    out = shared_engine.generate(prompts, sampling=_GREEDY)
    results[seed] = prompts, out.results

  threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  for seed in range(4):
    prompts, out = results[seed]
    for index, prompt in enumerate(prompts):
      assert out.tokens[2 * index, : len(prompt)].tolist() == prompt
    _check_log_probs(out)


def test_close_frees_the_memory():
  engine = _engine()
  leaves = jax.tree.leaves(engine.state)
  engine.generate([[1]], sampling=_GREEDY)
  later_leaves = jax.tree.leaves(engine._held.read())
  engine.close()
  engine.close()
  assert not any(leaf.is_deleted() for leaf in leaves)
  assert all(leaf.is_deleted() for leaf in later_leaves)
  with pytest.raises(RuntimeError, match="engine is closed"):
    engine.generate([[1]])


@pytest.mark.parametrize(
  "arguments, match",
  [
    (("[1]",), r"`prompts` must be a list, got str"),
    (([],), "at least one prompt"),
    (([[]],), r"`prompts\[0\]` must have 1 to 27 tokens"),
    (([[1] * 28],), r"`prompts\[0\]` must have 1 to 27 tokens.* got 28"),
    (([[32]],), r"`prompts\[0\]` must have token ids from 0 to 31"),
    (([[1.5]],), r"`prompts\[0\]` must hold integers"),
    ((["a"],), r"`tokenizer` must be given"),
    (([[1]], {"sampling": {"top_k": 1}}), "`sampling` must be"),
    (([[1]], {"num_samples": 0}), "`num_samples` must be at least 1"),
    (([[1]], {"max_new_tokens": 32}), "`max_new_tokens` must be at most 31"),
  ],
)
def test_bad_arguments_are_named(shared_engine, arguments, match):
  prompts, options = (*arguments, {})[:2]
  with pytest.raises((TypeError, ValueError), match=match):
    shared_engine.generate(prompts, **options)
  with pytest.raises((TypeError, ValueError), match=match):
    shared_engine.stream(prompts, **options)


def test_bad_models_and_caches_are_named():
  model = functools.partial(_model, config=_DECODER)
  with pytest.raises(ValueError, match="`init_kv` must be given"):
    rollout.Engine(None, lambda *_: None, _CACHE)
  with pytest.raises(TypeError, match="`model` must be a function"):
    rollout.Engine(_params(0), _DECODER, _CACHE)
  config = rollout.RolloutConfig(max_new_tokens=0)
  with pytest.raises(ValueError, match=r"`RolloutConfig.max_new_tokens` must"):
    rollout.Engine(_params(0), model, _CACHE, config)
  with pytest.raises(ValueError, match="`cache` must be a CacheConfig"):
    rollout.Engine(_params(0), model, 2**20)
  with pytest.raises(ValueError, match="memory"):
    rollout.Engine(_params(0), model, 100, rollout.RolloutConfig(max_length=32))
  with pytest.raises(TypeError, match="`config` must be a RolloutConfig"):
    rollout.Engine(_params(0), model, _CACHE, {"num_samples": 2})


def test_bytes_size_the_cache():
  """As many slots as fit take sequences of the longest length."""
  model = functools.partial(_model, config=_DECODER)
  config = rollout.RolloutConfig(max_length=64, prefill_chunk=8)
  for num_bytes, num_slots in ((2**14, 4), (2**20, 64)):
    with rollout.Engine(_params(0), model, num_bytes, config) as engine:
      state = engine.state
      leaves = jax.tree.leaves(state.memory.kv)
      assert sum(leaf.nbytes for leaf in leaves) <= num_bytes
      assert state.slots.size == num_slots


def test_branches_share_pages_and_continue_from_their_sequence(shared_engine):
  """Of a running, a waiting and an ended sequence, and of a branch."""
  prompts = _prompts(7, 3, longest=6)
  sampling = rollout.Sampling(temperature=1.0)
  with _no_compilation():
    ids = shared_engine.submit(prompts, sampling=sampling, max_new_tokens=12)
    shared_engine.step(6)
    parents = [int(first_id) for first_id in ids]
    copies = shared_engine.branch(parents, 3)
    grandchildren = shared_engine.branch([int(copies[0, 2])], 1)
    while shared_engine.step():
      pass
    last_copies = shared_engine.branch(parents[:1], 1)
    codes = shared_engine.extend(
      last_copies[0].tolist(), [[5]], max_new_tokens=2
    )
    assert codes == [jaxkv.Status.OK]
    while shared_engine.step():
      pass
    ended = shared_engine.harvest()
  assert copies.shape == (3, 3) and (copies > max(parents)).all()
  rows = {}
  for out in ended:
    for row in np.flatnonzero(out.results.valid):
      one = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], out.results)
      rows[int(one.ids[0])] = one
      _check_log_probs(one)
  new_ids = {*copies.ravel().tolist(), *grandchildren.ravel().tolist()}
  assert {*parents, *new_ids, *last_copies.ravel().tolist()} <= set(rows)
  for parent, of_parent in zip(parents, copies, strict=True):
    length = len(prompts[parents.index(parent)])
    for copy in of_parent.tolist():
      assert rows[copy].prompt_lengths.tolist() == [length]
      assert (
        rows[copy].tokens[0, :length] == rows[parent].tokens[0, :length]
      ).all()
  whole = rows[parents[0]]
  last = rows[int(last_copies[0, 0])]
  num_kept = int(whole.lengths[0])
  assert (last.tokens[0, :num_kept] == whole.tokens[0, :num_kept]).all()
  assert (last.log_probs[0, :num_kept] == whole.log_probs[0, :num_kept]).all()
  assert last.lengths[0] == num_kept + 3


def test_requests_get_the_default_of_the_engine(shared_engine):
  sampling = rollout.Sampling(temperature=0.0)
  requests = rollout.Requests([[1, 2, 3]], [3], sampling=sampling)
  ids = shared_engine.submit(requests)
  while shared_engine.step():
    pass
  (out,) = shared_engine.harvest()
  assert out.id == ids[0] and out.results.mask.sum(axis=1).tolist() == [5, 5]
  with pytest.raises(TypeError, match="`max_new_tokens` must be None"):
    shared_engine.submit(requests, max_new_tokens=3)
  bad = rollout.Requests([[1, 2], [3, 4]], [2, 3], sampling=sampling)
  with pytest.raises(ValueError, match=r"lengths\[1\]` must be 1 .. 2"):
    shared_engine.submit(bad)
  assert shared_engine.step() == 0 and shared_engine.harvest() == []


def test_streams_share_the_rows_of_the_queue(shared_engine):
  """The ended prompts of a stream that waits leave their rows to others."""
  room = shared_engine.room().prompts
  stream = shared_engine.stream(_prompts(11, room), sampling=_GREEDY)
  first = next(stream)
  out = shared_engine.generate(_prompts(12, 3), sampling=_GREEDY)
  assert len(out.results.valid) == 6
  ids = {first.id, *(ended.id for ended in stream)}
  assert len(ids) == room and shared_engine.room().prompts == room


def test_a_stream_ends_when_its_sequences_are_lost(monkeypatch):
  with _engine() as engine:
    engine.update_weights(_params(1))
    stream = engine.stream(_prompts(13, 4), sampling=_GREEDY, steps=1)
    next(stream)
    _fail_after_donation(monkeypatch)
    with pytest.raises(RuntimeError, match="lost its sequences"):
      engine.step()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="sequences of this stream are lost"):
      list(stream)
    out = engine.generate([[5, 3, 1]], sampling=_GREEDY)
    assert out.results.versions.max() == 1
    _check_log_probs(out.results, seed=1)


def test_refused_prompts_use_no_ids(shared_engine):
  ids = shared_engine.submit(_prompts(1, 40), sampling=_GREEDY)
  last_id = ids.max()
  shared_engine.abort(
    [id_ + g for id_ in ids[ids >= 0].tolist() for g in (0, 1)]
  )
  shared_engine.harvest()
  (next_id,) = shared_engine.submit([[1]], sampling=_GREEDY)
  assert next_id == last_id + 2
  while shared_engine.step():
    pass
  shared_engine.harvest()


@pytest.mark.parametrize("ids", [[2**32 + 5], [3.9]])
def test_bad_ids_are_named(shared_engine, ids):
  with pytest.raises((TypeError, ValueError), match="`ids` must"):
    shared_engine.abort(ids)
  with pytest.raises((TypeError, ValueError), match="`ids` must"):
    shared_engine.branch(ids, 1)
  assert shared_engine.branch([], 2).shape == (0, 2)


def test_completions_out_of_the_vocabulary_are_named(shared_engine):
  with pytest.raises(ValueError, match="completions"):
    shared_engine.score([[1, 2]], [[[99]]])
