"""Random calls of pools and queues, beside eSurge's own."""

import types
from typing import Any

import numpy as np
import pytest

from jaxkv.host import esurge
from tests.host.esurge import easydel
from tests.host.esurge.checks import checked

pytestmark = easydel.needed

NUM_PAGES, PAGE, CALLS = 20, 2, 2000


class Pools:
  """Both pools, and what may be done to them."""

  def __init__(self, seed: int):
    self.random = np.random.default_rng(seed)
    utils = easydel.module("core.utils")
    utils.none_hash = esurge.NONE_HASH
    theirs = easydel.module("core.page_pool").PagePool(NUM_PAGES, True)
    self.pools: list[Any] = [theirs, esurge.PagePool(NUM_PAGES, True)]
    self.held: list[int] = []  # A page for each reference of it.
    self.loose: list[int] = []

  def both(self, call: Any) -> Any:
    """A call of both pools; their answers, which are equal, or errors."""
    answers = []
    for pool in self.pools:
      try:
        answers.append(call(pool))
      except Exception as error:
        answers.append(type(error))
    assert answers[0] == answers[1]
    return answers[0]

  def some(self, pages: Any, most: int = 4) -> list[int]:
    pages = list(pages)
    count = int(self.random.integers(0, most + 1))
    count = min(count, len(pages))
    return self.random.choice(pages, count, replace=False).tolist()

  def queued(self) -> list[int]:
    return ids(self.pools[1].free_page_queue.get_all_free_pages())

  def take(self) -> None:
    count = int(self.random.integers(0, 6))
    new = self.both(lambda pool: ids(pool.get_new_pages(count)))
    self.held += new if isinstance(new, list) else []

  def touch(self) -> None:
    groups = self.some([*self.queued(), *set(self.held)]), self.some(self.held)
    if self.random.random() < 0.1 and self.loose:
      groups = (self.loose[:1],)
    done = self.both(
      lambda pool: pool.touch(tuple(views(pool, one) for one in groups))
    )
    if done is None:
      self.held += [page for group in groups for page in group]

  def free(self) -> None:
    # A page whose last two references go at once would be queued twice there.
    pages = list(dict.fromkeys(self.some(self.held, 6)))
    self.both(lambda pool: pool.free_pages(reversed(views(pool, pages))))
    for page in pages:
      self.held.remove(page)

  def publish(self) -> None:
    pages = [
      page
      for page in self.some(set(self.held), 5)
      if self.pools[1].pages[page].page_hash is None
    ]
    tokens = self.random.integers(0, 2, PAGE * len(pages)).tolist()
    request = types.SimpleNamespace(request_id="r", all_token_ids=tokens)
    hashes = esurge.hash_request_tokens(hash, PAGE, request)
    cached = int(self.random.integers(len(pages) + 1))
    group = int(self.random.integers(2))
    known = hashes[: int(self.random.integers(cached, len(pages) + 1))]

    def call(pool: Any) -> Any:
      own = [pool_hash(pool, one) for one in known]
      views_of = views(pool, pages)
      if cached and pool is self.pools[0] and len(known) < len(pages):
        # It reads the parent from the page before, which has none here.
        own = [pool_hash(pool, one) for one in hashes]
      pool.cache_full_pages(
        request, views_of, own, cached, len(pages), PAGE, group
      )
      return plain_hashes(own[cached:])

    self.both(call)

  def find(self) -> None:
    tokens = self.random.integers(0, 2, 3 * PAGE).tolist()
    request = types.SimpleNamespace(request_id="r", all_token_ids=tokens)
    one = esurge.hash_request_tokens(hash, PAGE, request)[
      int(self.random.integers(3))
    ]
    groups = [[0], [1], [0, 1], []][int(self.random.integers(4))]

    def call(pool: Any) -> Any:
      found = pool.get_cached_page(pool_hash(pool, one), groups)
      return None if found is None else ids(found)

    self.both(call)

  def evict(self) -> None:
    pages = self.some(range(1, NUM_PAGES), 3)
    theirs, ours = self.pools
    for page in views(theirs, pages):
      theirs._maybe_evict_cached_page(page)
    ours.evict(views(ours, pages))

  def reset(self) -> None:
    self.both(lambda pool: pool.reset_prefix_cache())

  def give_all_back(self) -> None:
    for page in self.held:
      self.both(lambda pool, page=page: pool.free_pages([pool.pages[page]]))
    self.held = []
    self.append()
    self.both(lambda pool: pool.reset_prefix_cache())

  def popleft(self) -> None:
    count = int(self.random.integers(0, 3))
    if count <= len(self.queued()):
      self.loose += self.both(
        lambda pool: ids(pool.free_page_queue.popleft_n(count))
      )

  def remove(self) -> None:
    pages = self.some(range(1, NUM_PAGES), 1)

    def call(pool: Any) -> None:
      for page in views(pool, pages):
        pool.free_page_queue.remove(page)

    if self.both(call) is None:
      self.loose += pages

  def append(self) -> None:
    pages, self.loose = self.loose, []
    self.both(lambda pool: pool.free_page_queue.append_n(views(pool, pages)))

  def count(self) -> None:
    """One reference more, or less, that no queue hears of."""
    for page in self.some(set(self.held) | set(self.loose), 1):
      if self.random.random() < 0.5:
        self.both(lambda pool, page=page: pool.pages[page].incr_ref())
        self.held.append(page)
        self.loose = [one for one in self.loose if one != page]
        continue
      gone = self.both(lambda pool, page=page: pool.pages[page].decr_ref())
      if gone is None:
        self.held.remove(page)
        self.loose += [] if page in self.held else [page]

  def compare(self) -> None:
    for page in range(1, NUM_PAGES):
      self.both(lambda pool, page=page: told(pool.pages[page]))
    self.both(lambda pool: ids(pool.free_page_queue.get_all_free_pages()))
    self.both(lambda pool: pool.get_num_free_pages())
    self.both(lambda pool: pool.get_usage())
    self.both(
      lambda pool: {
        plain_hashes([key.page_hash])[0] + (key.group_id,): list(pages)
        for key, pages in pool.cached_page_hash_to_page.items()
      }
    )
    self.both(lambda pool: len(pool.cached_page_hash_to_page))
    checked(self.pools[1])


def ids(pages: Any) -> list[int]:
  return [page.page_id for page in pages]


def views(pool: Any, pages: Any) -> list[Any]:
  return [pool.pages[page] for page in pages]


def pool_hash(pool: Any, page_hash: Any) -> Any:
  """The hash as a class of the pool's own package."""
  if isinstance(pool, esurge.PagePool):
    return page_hash
  return easydel.module("core.utils").PageHash(*page_hash)


def plain_hashes(hashes: Any) -> list[Any]:
  return [tuple(one) for one in hashes]


def told(page: Any) -> Any:
  """What a page tells of itself."""
  known = page.page_hash
  ends = [
    None if one is None else one.page_id
    for one in (page.prev_free_page, page.next_free_page)
  ]
  hashed = known and (tuple(known.page_hash), known.group_id)
  return page.page_id, page.ref_cnt, page.is_null, hashed, ends


CALLS_BY_WEIGHT = {
  "take": 6,
  "free": 6,
  "touch": 4,
  "publish": 6,
  "find": 6,
  "evict": 1,
  "reset": 1,
  "popleft": 1,
  "remove": 1,
  "append": 2,
  "count": 2,
  "give_all_back": 0.2,
}


@pytest.mark.parametrize("seed", [0, 1])
def test_pools_agree(seed):
  both = Pools(seed)
  names = list(CALLS_BY_WEIGHT)
  weights = np.array(list(CALLS_BY_WEIGHT.values()))
  for number in range(CALLS // 2):
    name = str(both.random.choice(names, p=weights / weights.sum()))
    getattr(both, name)()
    if number % 10 == 0:
      both.compare()


class Queues:
  """Both queues, and the pages outside of them."""

  def __init__(self):
    self.random = np.random.default_rng(2)
    utils = easydel.module("core.utils")
    theirs = [utils.CachePage(page) for page in range(12)]
    ours = [esurge.CachePage(page) for page in range(12)]
    self.sides: list[Any] = [
      (utils.FreeCachePageQueue(theirs), theirs),
      (esurge.FreeCachePageQueue(ours), ours),
    ]
    self.out: list[int] = []

  def both(self, call: Any) -> Any:
    answers = [call(queue, pages) for queue, pages in self.sides]
    assert answers[0] == answers[1]
    return answers[0]

  def queued(self) -> list[int]:
    return self.both(lambda queue, _: ids(queue.get_all_free_pages()))

  def popleft(self) -> None:
    if self.queued():
      self.out.append(self.both(lambda queue, _: queue.popleft().page_id))

  def popleft_n(self) -> None:
    count = int(self.random.integers(len(self.queued()) + 1))
    self.out += self.both(lambda queue, _: ids(queue.popleft_n(count)))

  def remove(self) -> None:
    if queued := self.queued():
      page = int(self.random.choice(queued))
      self.both(lambda queue, pages: queue.remove(pages[page]))
      self.out.append(page)

  def append(self) -> None:
    if self.out:
      page = self.out.pop(int(self.random.integers(len(self.out))))
      self.both(lambda queue, pages: queue.append(pages[page]))

  def append_n(self) -> None:
    self.random.shuffle(self.out)
    half = len(self.out) // 2
    back, self.out = self.out[:half], self.out[half:]
    self.both(lambda queue, pages: queue.append_n([pages[n] for n in back]))


def test_queues_agree():
  both = Queues()
  names = ["popleft", "popleft_n", "remove", "append", "append_n"]
  for _ in range(CALLS):
    getattr(both, str(both.random.choice(names)))()
    both.both(lambda queue, _: queue.num_free_pages)
  for page in range(12):
    both.both(lambda _, pages, page=page: told(pages[page]))
