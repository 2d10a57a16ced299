"""A random scheduler: a trace of calls to a cache manager, step by step."""

import random
from collections.abc import Generator
from typing import Any
from typing import NamedTuple

from tests.host.fuzz_setups import Setup


class Operation(NamedTuple):
  """One operation on a manager.

  Attributes:
    verb: add, update, finish, lookup, allocate, cache, free, recycle, evict,
      reset, step or common.
    name: the name of the request, if the verb has one.
    arguments: the arguments of the verb.
  """

  verb: str
  name: str = ""
  arguments: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple, never changed


Steps = Generator[Operation, Any, Any]
"""Yields operations and is sent the oracle's answers."""

_VOCABULARY = 3
_MAX_RUNNING = 4
_MAX_WAITING = 3


class Trace:
  """Makes operations; it reads only the state of the oracle.

  Attributes:
    setup: the configuration.
    side: the oracle, with `manager` and `requests`.
    draws: the seeded generator.
    waiting, running: names of requests, in order.
    loading: the tokens that are computed elsewhere, by name.
    targets: the length at which a request is finished, by name.
    encoders: the tokens of the encoder input, by name.
    scheduled: the tokens and drafts of this step, by name.
    refused: consecutive steps in which the first request did not fit.
    finished: token lists that later prompts begin with.
  """

  def __init__(self, setup: Setup, side: Any, seed: str):
    self.setup = setup
    self.side = side
    self.draws = random.Random(seed)
    self.waiting: list[str] = []
    self.running: list[str] = []
    self.loading: dict[str, int] = {}
    self.targets: dict[str, int] = {}
    self.encoders: dict[str, int] = {}
    self.scheduled: dict[str, tuple[int, int]] = {}
    self.refused = self.count = 0
    self.finished = [self._tokens(setup.max_model_len) for _ in range(3)]

  def operations(self) -> Steps:
    """Yields operations without end."""
    while True:
      yield from self._disturb()
      yield Operation("step")
      yield from self._arrive()
      if not (yield from self._run()):
        yield from self._admit()
      yield from self._output()

  def _chance(self, percent: int) -> bool:
    return self.draws.randrange(100) < percent

  def _tokens(self, count: int) -> list[int]:
    return [self.draws.randrange(_VOCABULARY) for _ in range(count)]

  def _length(self, limit: int) -> int:
    """Draws a length from 1 to `limit`, often a multiple of a page."""
    length = self.draws.randint(1, limit)
    page_size = self.draws.choice(self.setup.groups).page_size
    aligned = length // page_size * page_size
    return aligned if aligned and self._chance(50) else length

  def _request(self, name: str) -> Any:
    return self.side.requests[name]

  # --- new requests ----------------------------------------------------------

  def _arrive(self) -> Steps:
    while len(self.waiting) < _MAX_WAITING and self._chance(60):
      self.count += 1
      name = f"r{self.count}"
      longest = self.setup.max_model_len - 1
      tokens = self._prompt()[:longest]
      self.targets[name] = len(tokens) + self.draws.randint(1, longest // 3)
      if self.setup.encoder:
        # Texts alone have no encoder input.
        self.encoders[name] = self.draws.randint(0, self.setup.encoder)
      self.waiting.append(name)
      yield Operation(
        "add",
        name,
        {
          "token_ids": tokens,
          "num_prompt_tokens": len(tokens),
          "cache_salt": "salt" if self._chance(8) else None,
          "lora_name": "lora" if self._chance(4) else None,
          "prompt_logprobs": self._chance(4),
        },
      )

  def _prompt(self) -> list[int]:
    """Draws a prompt, mostly a part of an earlier sequence with a suffix."""
    limit = 3 if self._chance(60) else self.setup.max_model_len // 2
    suffix = self._tokens(self.draws.randint(0, limit))
    if self._chance(20):
      return suffix or self._tokens(1)
    earlier = self.draws.choice(self.finished)
    cut = max(self._length(len(earlier)) for _ in range(2))
    return earlier[:cut] + suffix

  # --- running requests ------------------------------------------------------

  def _run(self) -> Steps:
    """Schedules running requests; returns True if one was preempted."""
    self.scheduled = {}
    preempted = False
    index = 0
    while index < len(self.running):
      name = self.running[index]
      new, drafts = self._new_tokens(name)
      arguments = {
        "num_new_tokens": new,
        "num_lookahead_tokens": self.setup.drafts,
      }
      while name in self.running:
        answer = yield Operation("allocate", name, arguments)
        if answer is not None:
          break
        preempted = True
        yield from self._preempt(self.running[-1])
      if name in self.running:
        yield from self._schedule(name, new, drafts)
        index += 1
    return preempted

  def _new_tokens(self, name: str) -> tuple[int, int]:
    """Returns the new tokens of a step, and the number of drafts among them."""
    request = self._request(name)
    remaining = request.num_tokens - request.num_computed_tokens
    if remaining > 1:
      return (remaining if self._chance(40) else self._length(remaining)), 0
    room = self.setup.max_model_len - request.num_tokens
    drafts = self.draws.randint(0, min(self.setup.drafts, room))
    return 1 + drafts, drafts

  def _schedule(self, name: str, new: int, drafts: int) -> Steps:
    computed = self._request(name).num_computed_tokens + new
    self.scheduled[name] = (new, drafts)
    flying = self.draws.randint(0, new) if self._chance(30) else 0
    yield Operation(
      "update",
      name,
      {
        "num_computed_tokens": computed,
        "num_in_flight_tokens": flying,
        "status": "running",
      },
    )

  def _preempt(self, name: str) -> Steps:
    self.running.remove(name)
    self.waiting.insert(0, name)
    yield Operation("free", name)
    yield Operation(
      "update",
      name,
      {
        "num_computed_tokens": 0,
        "num_in_flight_tokens": 0,
        "status": "preempted",
      },
    )

  # --- waiting requests ------------------------------------------------------

  def _admit(self) -> Steps:
    while self.waiting and len(self.running) < _MAX_RUNNING:
      name = self.waiting[0]
      answer = yield from self._try(name)
      if answer is None:
        yield from self._give_up(name)
        return
      self.refused = 0

  def _try(self, name: str) -> Steps:
    """Looks up and allocates a request; returns None without enough pages."""
    request = self._request(name)
    arguments: dict[str, Any] = {
      "num_lookahead_tokens": self.setup.drafts if self._chance(80) else 0,
      "full_sequence_must_fit": self._chance(80),
      "reserved_pages": self.draws.choice([0, 0, 0, 0, 1, 3]),
      "has_scheduled_requests": bool(self.running) or self._chance(20),
    }
    if name in self.encoders:
      arguments["num_encoder_tokens"] = self.encoders[name]
    hit = external = 0
    if request.num_computed_tokens == 0:
      _, hit, _ = yield Operation("lookup", name)
      arguments |= {"num_new_computed_tokens": hit, "with_hit": True}
      external = self._external(request.num_tokens - hit)
    if external < 0:
      return (yield from self._load(name, arguments, hit - external))
    num_cached = request.num_computed_tokens + hit + external
    remaining = request.num_tokens - num_cached
    new = remaining if self._chance(50) else self._length(remaining)
    arguments |= {
      "num_new_tokens": new,
      "num_external_computed_tokens": external,
    }
    answer = yield Operation("allocate", name, arguments)
    if answer is not None:
      self.waiting.remove(name)
      self.running.append(name)
      yield from self._schedule(
        name, num_cached - request.num_computed_tokens, 0
      )
      yield from self._schedule(name, new, 0)
    return answer

  def _external(self, remaining: int) -> int:
    """Returns the tokens computed elsewhere; negative if they arrive later."""
    if not self.setup.external or not self._chance(50):
      return 0
    if self._chance(50):
      return -self._length(remaining)
    return self._length(remaining - 1) if remaining > 1 else 0

  def _load(self, name: str, arguments: dict[str, Any], loaded: int) -> Steps:
    """Allocates pages for tokens that arrive later."""
    arguments |= {
      "num_new_tokens": 0,
      "num_external_computed_tokens": loaded
      - arguments["num_new_computed_tokens"],
      "delay_cache_pages": True,
    }
    answer = yield Operation("allocate", name, arguments)
    if answer is not None:
      self.waiting.remove(name)
      self.loading[name] = loaded
    return answer

  def _give_up(self, name: str) -> Steps:
    """Finishes a request that does not fit even without others."""
    if self.running or self.loading:
      return
    self.refused += 1
    if self.refused > 2:
      self.refused = 0
      yield from self._finish(name)

  # --- results ---------------------------------------------------------------

  def _output(self) -> Steps:
    for name, (_, drafts) in self.scheduled.items():
      request = self._request(name)
      if request.num_computed_tokens - drafts < request.num_tokens:
        continue
      accepted = self.draws.randint(0, drafts)
      room = self.setup.max_model_len - request.num_tokens
      yield Operation(
        "update",
        name,
        {
          "new_tokens": self._tokens(min(accepted + 1, room)),
          "num_computed_tokens": request.num_computed_tokens
          - (drafts - accepted),
        },
      )
      computed = request.num_computed_tokens
      if self.setup.drafts and computed <= request.num_tokens:
        yield from self._cache(name, computed)
      done = min(self.targets[name], self.setup.max_model_len)
      if request.num_tokens >= done:
        yield from self._finish(name)
    self.scheduled = {}

  def _cache(self, name: str, tokens: int) -> Steps:
    yield Operation("cache", name, {"num_computed_tokens": tokens})

  def _finish(self, name: str) -> Steps:
    self.finished = [*self.finished[-8:], list(self._request(name).token_ids)]
    for names in (self.waiting, self.running):
      if name in names:
        names.remove(name)
    self.loading.pop(name, None)
    yield Operation("finish", name)

  # --- what happens between steps --------------------------------------------

  def _disturb(self) -> Steps:
    for name in list(self.loading):
      if self._chance(40):
        yield from self._loaded(name)
    if self.running:
      yield from self._disturb_one(self.draws.choice(self.running))
    if self._chance(4):
      yield from self._misuse()
    if self._chance(4):
      yield Operation("evict", arguments={"page_ids": self._some_pages()})
    if self._chance(3):
      yield from self._reset()

  def _reset(self) -> Steps:
    """Resets the cache, half of the time after finishing all requests."""
    if self._chance(50):
      for name in [*self.running, *self.loading, *self.waiting]:
        yield from self._finish(name)
    yield Operation("reset")

  def _disturb_one(self, name: str) -> Steps:
    computed = self._request(name).num_computed_tokens
    tokens = {"num_computed_tokens": computed}
    if self._chance(5):
      yield Operation("common", name)
    if self._chance(5):
      yield Operation("recycle", name, tokens)
    if self._chance(5):
      yield from self._cache(name, self.draws.randint(0, computed))
    if self._chance(3):
      yield from self._preempt(name)
    elif self._chance(3):
      yield from self._finish(name)

  def _some_pages(self) -> list[int]:
    cached = sorted(self.side.manager.cached_page_ids())
    pages = self.draws.sample(cached, min(len(cached), 2))
    return [*pages, self.draws.randrange(1, self.setup.num_pages)]

  def _misuse(self) -> Steps:
    """Makes calls that raise or have no effect."""
    yield Operation("add", "nobody", {"token_ids": [0], "num_prompt_tokens": 1})
    yield Operation("allocate", "nobody", {"num_new_tokens": 0})
    yield Operation("cache", "nobody", {"num_computed_tokens": 1})
    yield Operation("recycle", "nobody", {"num_computed_tokens": 1})
    yield Operation("finish", "nobody")

  def _loaded(self, name: str) -> Steps:
    """Ends a load, which may have failed."""
    loaded = self.loading.pop(name)
    self.waiting.insert(self.draws.randint(0, len(self.waiting)), name)
    if self._chance(20):
      pages = self.side.manager.get_page_ids(name)
      lost = [page for column in pages for page in column[-2:] if page]
      yield Operation("evict", arguments={"page_ids": lost})
      yield Operation("free", name)
      return
    # A sequence's last token is always computed here.
    loaded = min(loaded, self._request(name).num_tokens - 1)
    if loaded:
      yield from self._cache(name, loaded)
      yield Operation("update", name, {"num_computed_tokens": loaded})
    else:
      yield Operation("free", name)
