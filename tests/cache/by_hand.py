"""States for examples whose page numbers a reader can follow.

Pages are handed out in the order 1, 2, 3 ..., slot by slot, and within a slot
group by group.
"""

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv._src.cache.pool import free_queue

# --- a tiny cache -------------------------------------------------------------

SLOTS = 3
COLUMNS = 8


def tiny(*groups, **options) -> jaxkv.CacheState:
  """Returns an empty cache: 3 slots, pages 1 to 7 of 2 tokens; 8 is NO_PAGE."""
  fields = {"num_pages": 8, "num_slots": SLOTS, "pages_per_slot": 4}
  return _init(groups or (jaxkv.FullAttention(),), fields | options)


def _init(groups: tuple, options: dict) -> jaxkv.CacheState:
  config = jaxkv.CacheConfig(page_size=2, groups=groups, **options)
  return jaxkv.init(config, jaxkv.salt("by hand"))


def write(state: jaxkv.CacheState, slot: int, *tokens) -> jaxkv.CacheState:
  """Allocates pages for tokens in a slot, and commits them."""
  num_tokens = [0] * SLOTS
  num_tokens[slot] = len(tokens)
  state, room = jaxkv.allocate(state, ints(*num_tokens))
  state, done = jaxkv.commit(state, rows({slot: tokens}), ints(*num_tokens))
  assert bool(room.ok[slot]) and bool(done.ok[slot])
  return state


def rows(texts: dict[int, tuple]) -> jax.Array:
  """Returns int32[3, 8]: the tokens of some slots, zeros elsewhere."""
  table = [[0] * COLUMNS for _ in range(SLOTS)]
  for slot, tokens in texts.items():
    table[slot][: len(tokens)] = tokens
  return ints(*table)


def prompt(*tokens) -> tuple[jax.Array, jax.Array]:
  """Returns one prompt as verbs take it: int32[1, 8] and int32[1]."""
  padded = [*tokens, *([0] * (COLUMNS - len(tokens)))]
  return ints(padded), ints(len(tokens))


def pages(state: jaxkv.CacheState, slot: int, group: int = 0) -> list[int]:
  """Returns a slot's row of the page table."""
  return table(state, slot)[group]


def references(state: jaxkv.CacheState, *numbers) -> list[int]:
  """Returns the reference counts of pages."""
  return state.pool.ref_count[ints(*numbers)].tolist()


def free_list(queue: free_queue.FreeQueue) -> list[int]:
  """Returns the free pages in the order in which they will be taken."""
  return [page for page in free_queue.in_order(queue).tolist() if page]


# --- one text in a larger cache -----------------------------------------------

PAGES = 32
NONE = PAGES
"""NO_PAGE."""


def ints(*values) -> jax.Array:
  return jnp.asarray(values, jnp.int32)


def text() -> jax.Array:
  """Returns int32[1, 16]: always the same tokens."""
  return jnp.arange(100, 116, dtype=jnp.int32)[None]


def with_text(length: int, *groups, **options) -> jaxkv.CacheState:
  """A cache that holds a text in its slot of eight pages of two tokens."""
  fields = {"num_pages": PAGES, "num_slots": 1, "pages_per_slot": 8}
  state = _init(groups, fields | options)
  slot = ints(0)
  state, room = jaxkv.allocate(state, ints(length), slots=slot)
  state, done = jaxkv.commit(state, text(), ints(length), slots=slot)
  assert bool(room.ok[0] & done.ok[0])
  return state


def after_text(length: int, *groups, **options) -> jaxkv.CacheState:
  """A cache that held a text."""
  return jaxkv.free(with_text(length, *groups, **options), slots=ints(0))[0]


def without(state: jaxkv.CacheState, *pages) -> jaxkv.CacheState:
  """The cache with some pages out of the index."""
  padding = [NONE] * (8 - len(pages))
  state, out = jaxkv.evict(state, ints(*pages, *padding))
  assert int(jnp.sum(out.ok)) == len(pages)
  return state


def match(state: jaxkv.CacheState, length: int) -> tuple[int, list]:
  """Returns the hit tokens of a text, and the hit pages of each group."""
  hit = jaxkv.match(state, text(), ints(length))
  tokens = int(hit.num_cached_tokens[0])
  pages = hit.pages[0].tolist()
  return tokens, [
    row[: tokens // page_size]
    for row, page_size in zip(pages, state.config.page_sizes, strict=True)
  ]


def table(state: jaxkv.CacheState, slot: int = 0) -> list[list[int]]:
  """Returns a slot's page table without NO_PAGE."""
  rows = state.page_table[slot].tolist()
  return [
    [page for page in row if page != state.config.no_page] for row in rows
  ]


def config(**changes) -> jaxkv.CacheConfig:
  """Returns the sizes of a cache of two slots."""
  fields = {"num_pages": 16, "page_size": 4, "num_slots": 2}
  return jaxkv.CacheConfig(**(fields | {"pages_per_slot": 4} | changes))


def life(state, tokens, lengths):
  """Calls most verbs on one cache."""
  slots = ints(0)
  state, out = jaxkv.admit(state, slots, tokens, lengths)
  rows = jnp.concatenate([tokens, tokens])
  num_tokens = jnp.concatenate([lengths, lengths & 0])
  state, _ = jaxkv.commit(state, rows, num_tokens)
  state, _ = jaxkv.fork(state, slots, ints(1))
  state, cut = jaxkv.truncate(state, state.length - 1)
  state, pin_result = jaxkv.pin(state, tokens, lengths)
  state, _ = jaxkv.free(state, mask=state.length > 0)
  state, _ = jaxkv.unpin(state, pin_result.pages)
  hit = jaxkv.match(state, tokens, lengths)
  return state, (out.ok, cut.ok, hit.num_cached_tokens)
