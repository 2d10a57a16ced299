"""The state of a cache: one immutable pytree of fixed-shape arrays.

The docstring of `jaxkv` defines the terms and the dimension letters.
"""

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable
from typing import Any
from typing import NamedTuple
from typing import ParamSpec
from typing import TypeVar
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import arguments
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.describe import describe
from jaxkv._src.cache.pool import offload_pages
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool.offload_pages import Moves
from jaxkv._src.cache.pool.page_pool import PoolState
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix.hashing import SlotHashes
from jaxkv._src.cache.stats import COUNTERS
from jaxkv._src.cache.stats import Stats
from jaxkv._src.cache.stats import counted

Args = ParamSpec("Args")
Out = TypeVar("Out")


class Status(enum.IntEnum):
  """The result of one row of a call.

  OK: the row succeeded.
  SKIPPED: the row is masked out. This is not a failure.
  OUT_OF_PAGES: too few pages are free. This is not a mistake of the caller.
    Retry after pages are freed.
  SLOT_FULL: the sequence needs more pages than a slot holds.
  BAD_SLOT: a slot number is out of range, or repeated.
  SLOT_IN_USE: the slot holds pages already.
  SLOT_EMPTY: the slot holds no page, or `fork` finds no committed token in it.
  BAD_LENGTH: a length or a count is zero, negative or too large.
  NO_ROOM: the slot's pages do not have room for the tokens.
  BAD_PAGE: a page number is out of range, or the null page.
  NOT_CACHED: the page is missing from the index, or no prefix is cached.
  NOT_PINNED: the page has no pin to remove.
  STILL_HELD: a page is still referenced.
  RECYCLED: `recycle` released a required page, or `admit` did not attach it, or
    a required recurrent state was not kept.
  STALE: the given version of the weights does not match the cache's version.
  BAD_SEQUENCE: no sequence has this id, or the id of a new sequence is in use
    or too large, or an earlier row of the call has the same id.
  ENDED: the sequence has ended or failed.
  UNFINISHED: the sequence is waiting or running.
  QUEUE_FULL: the queue of `jaxkv.rollout` has too few empty rows for a prompt.
    This is not a mistake of the caller. Retry after `rollout.harvest`.
  BAD_LOGITS: the logits of a sequence, after its sampling settings, are not a
    distribution: one is NaN or +inf, or all are -inf.
  MOVES_FORGOTTEN: moves that a verb returned were not made before those of a
    later verb, see `jaxkv.kv.move`.
  MOVES_REPEATED: moves that a verb returned were made before, or the state is
    older than the offload memory.
  """

  OK = 0
  SKIPPED = 1
  OUT_OF_PAGES = 2
  SLOT_FULL = 3
  BAD_SLOT = 4
  SLOT_IN_USE = 5
  SLOT_EMPTY = 6
  BAD_LENGTH = 7
  NO_ROOM = 8
  BAD_PAGE = 9
  NOT_CACHED = 10
  NOT_PINNED = 11
  STILL_HELD = 12
  RECYCLED = 13
  STALE = 14
  BAD_SEQUENCE = 15
  ENDED = 16
  UNFINISHED = 17
  QUEUE_FULL = 18
  BAD_LOGITS = 19
  MOVES_FORGOTTEN = 20
  MOVES_REPEATED = 21


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """The result of a verb for each row of its call.

  Attributes:
    code: a `Status` for each row, for each page in verbs that take pages, or
      for the whole call.  # int32[...]
    moves: the moves between device and offload memory that the call requires,
      see `jaxkv.kv.move`; None without `CacheConfig.offload_pages`.
  """

  code: Array
  moves: Moves | None = None

  @property
  def ok(self) -> Array:
    """bool[...]: True where `code` is OK."""
    return self.code == Status.OK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class CacheState:
  """The immutable state of a cache: verbs take a state and return a new one.

  Invariants, each tested by `check_invariants`:
    tables: row (b, g) has `num_skipped_pages[b, g]` columns with null pages,
      then pages of the group's pool up to column `num_pages[b, g] - 1`, then
      NO_PAGE. A recurrent group can have null pages between these pages.
    lengths: the pages of a slot have room for its tokens.
    refs: `ref_count` of a page is the number of page-table entries that hold
      the page, plus its pins.
    free: the queue of a pool holds each page without references once, except
      the pool's first page. The queue of offload pages holds each of them once.
    index: the buckets hold each cached page under its key, and no other page.
    keys: the keys and hashes of a slot match the tokens in its pages.

  Attributes:
    config: the static sizes and options.
    page_table: the page number of each column: 0 for the null page, NO_PAGE = N
      for a column without a page.  # int32[B, G, M]
    num_pages: the number of columns in use in each row; 0 in all rows of an
      empty slot.  # int32[B, G]
    num_skipped_pages: the number of leading columns whose pages the group no
      longer needs. These columns hold the null page.  # int32[B, G]
    length: the number of committed tokens, whose K/V is final.  # int32[B]
    secret: the secrets of the page keys, see `hashing.make_secret`; None
      without prefix caching.  # uint32[2 + G, 4]
    root: the `hashing.root_key` of sequences without a salt in this epoch; None
      without prefix caching.  # uint32[4]
    hashes: the running hash of each slot; None without prefix caching.
    pool: reference counts, free queues and prefix index of all pools' pages.
    counts: the counters of `stats`.  # uint32[8]
    epoch: the version of the weights; `new_epoch` adds 1.  # uint32[]
    error: the `Status` of the first failure, see `sticky`.  # int32[]
  """

  config: CacheConfig = dataclasses.field(metadata={"static": True})
  page_table: Array
  num_pages: Array
  num_skipped_pages: Array
  length: Array
  secret: Array | None
  root: Array | None
  hashes: SlotHashes | None
  pool: PoolState
  counts: Array
  epoch: Array
  error: Array

  @property
  def stats(self) -> Stats:
    """The counters; `jaxkv.stats` adds those of offload pages."""
    counts = [self.counts[..., counter] for counter in range(len(COUNTERS))]
    return Stats(**dict(zip(COUNTERS, counts, strict=True)))

  def __repr__(self) -> str:
    return describe(self, Status)


class Copies(NamedTuple):
  """Copies of page contents that the caller must make before the next write.

  With offloaded pages, make the moves of the same call before the copies.

  The source of one copy may be the destination of another copy. So read all
  sources before you write any destination, as `jaxkv.kv.copy` does.

  Attributes:
    src: int32[X], pages to read; NO_PAGE for no copy.
    dst: int32[X], pages to write; NO_PAGE for no copy.
  """

  src: Array
  dst: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Copied(Outcome):
  """The result of `fork` and `truncate`.

  Attributes:
    code: a `Status` for each row.  # int32[R]
    copies: R * G copies of page contents that the caller must make.
  """

  copies: Copies


def init(config: CacheConfig, key: Array | None = None) -> CacheState:
  """Creates an empty cache.

  Args:
    config: the sizes and options.
    key: the secret of the page keys, uint32[4] or a `jax.random.key`. An
      attacker without the secret cannot construct two prefixes with the same
      page key. None draws 128 random bits from the system. Page numbers and
      hits do not depend on the secret. Ignored without prefix caching.

  Returns:
    A state that can be donated: its arrays share no buffers.

  Raises:
    TypeError: `config` is not a CacheConfig, or `key` has a wrong type.
    ValueError: `config` has a group that only `jaxkv.host` has, or `key` has a
      wrong shape. Or `key` is None in a traced function, where all calls would
      share one draw, or with several processes, which must share one secret.

  Examples:
    >>> import jaxkv
    >>> config = jaxkv.CacheConfig(
    ...   num_pages=8, page_size=4, num_slots=2, pages_per_slot=4
    ... )
    >>> state = jaxkv.init(config)
    >>> state.page_table.shape
    (2, 1, 4)
  """
  hint = "make one with jaxkv.CacheConfig(...)"
  arguments.check_type("config", config, CacheConfig, "a CacheConfig", hint)
  for kind in config.groups:
    if not kind.is_on_device:
      raise ValueError(
        f"`config.groups` must hold kinds that a device has, got {kind}, which "
        "only jaxkv.host.CacheManager has."
      )
  epoch = jnp.zeros((), jnp.uint32)
  secret = root = None
  if config.prefix_caching:
    secret, root = _secret_and_root(
      arguments.as_secret("key", key), epoch, config.num_groups
    )
  return empty(config, epoch, secret, root)


# Jitted as a whole, because compiling each operation alone takes twice as long.
@functools.partial(jax.jit, static_argnums=0)
def empty(
  config: CacheConfig, epoch: Array, secret: Array | None, root: Array | None
) -> CacheState:
  """Returns an empty cache with the given version and secrets."""
  rows = (config.num_slots, config.num_groups)
  return CacheState(
    config=config,
    page_table=jnp.full(
      (*rows, config.pages_per_slot), config.no_page, jnp.int32
    ),
    num_pages=jnp.zeros(rows, jnp.int32),
    num_skipped_pages=jnp.zeros(rows, jnp.int32),
    length=jnp.zeros((config.num_slots,), jnp.int32),
    secret=secret,
    root=root,
    hashes=hashing.init_slots(config),
    pool=page_pool.init(config),
    counts=jnp.zeros((len(COUNTERS),), jnp.uint32),
    epoch=epoch,
    error=jnp.zeros((), jnp.int32),
  )


@functools.partial(jax.jit, static_argnums=2)
def _secret_and_root(
  key: Array, epoch: Array, num_groups: int
) -> tuple[Array, Array]:
  secret = hashing.make_secret(key, num_groups)
  return secret, hashing.root_key(secret, epoch, None)


def check_cache(state: Any, name: str = "state") -> None:
  """Raises unless the argument `name` is a cache, or a stack of caches.

  Raises:
    TypeError: `state` is not a CacheState, but for example the `(state, out)`
      pair that a verb returned.
    ValueError: the arrays were donated to an earlier call.
  """
  is_pair = isinstance(state, tuple)
  hint = "make one with jaxkv.init(config)"
  if is_pair:
    hint = "unpack what a verb returned: `state, out = ...`"
  arguments.check_type(name, state, CacheState, "a CacheState", hint)
  arguments.check_not_donated(name, state.length)


def check_single(state: Any, name: str = "state") -> None:
  """Also raises ValueError for a stack of caches, as `vmap` makes them."""
  check_cache(state, name)
  if state.length.ndim != 1:
    raise ValueError(
      f"`{name}` must be a single cache, got a stack of caches of shape "
      f"{state.length.shape[:-1]}; call under jax.vmap, or on the host take "
      f"one with jax.tree.map(lambda leaf: leaf[0], {name})."
    )


@functools.lru_cache(maxsize=64)
def _shapes(config: CacheConfig) -> dict[str, tuple[int, ...]]:
  """Returns the shape of each array of a cache with this config, by path."""
  key = jax.ShapeDtypeStruct((hashing.KEY_WORDS,), jnp.uint32)
  state = jax.eval_shape(functools.partial(init, config), key)
  return arguments.shapes_of(state)


def verb(function: Callable[Args, Out]) -> Callable[Args, Out]:
  """Turns a function whose first argument is a state into a public verb.

  The verb converts its arguments to arrays: `mask` must hold bools and `salts`
  uint32, and other arguments become int32. `arguments.check_rows` checks their
  shapes. The verb calls the function under `jit`, and checks the array shapes
  of the state during the trace. If the function returns a state and an Outcome,
  the verb counts the failed rows and records the error in that state.

  Inside `shard_map`, all arguments are made to vary over the same mesh axes.
  """
  signature = inspect.signature(function)
  parameters = dict(list(signature.parameters.items())[1:])
  positional = [
    name
    for name, parameter in parameters.items()
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
  ]
  # If `slots` can be None, the rows of the verb are slots. Otherwise the first
  # argument other than `slots` and the state defines the number of rows.
  slots = parameters.get("slots")
  other_names = [name for name in parameters if name != "slots"]
  all_slots = slots is not None and slots.default is None
  lead = "slots" if all_slots or not other_names else other_names[0]

  plain: Any = function

  def body(state: CacheState, named: dict[str, Any]) -> Any:
    # A check during the trace costs nothing at run time. Under `vmap`, it sees
    # the shapes of a single cache.
    arguments.check_sizes("state", state, _shapes(state.config))
    state, named = sharding.match_varying_axes((state, named))
    return _record(plain(without_moves(state), **named))

  body.__name__ = plain.__name__  # Profiles show this name.
  # Jitted here and not in `call`, so that equal shapes compile once. The state
  # is not donated, because it must stay usable. Callers who want donation call
  # the verb inside their own `jit`, where it is inlined.
  jitted = jax.jit(body)

  @functools.wraps(function)
  def call(state: CacheState, *args: Any, **kwargs: Any) -> Any:
    check_single(state)
    named = dict(zip(positional, args, strict=False)) | kwargs
    are_known = named.keys() <= parameters.keys()
    if not are_known or len(named) < len(args) + len(kwargs):
      signature.bind(state, *args, **kwargs)  # Raises TypeError.
    named = {
      name: value
      if value is None
      else _CASTS.get(name, arguments.as_int32)(name, value)
      for name, value in named.items()
    }
    arguments.check_rows(named, lead, state.config.num_slots)
    return jitted(state, named)

  return cast(Callable[Args, Out], call)


_CASTS = {"mask": arguments.as_bool, "salts": arguments.as_key}


def rows_of(
  state: CacheState, slots: Array | None, mask: Array | None
) -> indexing.SlotRows:
  """Builds the rows of a call from its arguments `slots` and `mask`."""
  if slots is None:
    all_slots = jnp.arange(state.config.num_slots, dtype=jnp.int32)
    counts = mask_or_all(mask, all_slots)
    return indexing.SlotRows(all_slots, True, ~counts, jnp.zeros_like(counts))
  counts = mask_or_all(mask, slots)
  is_repeated = indexing.num_earlier(indexing.where_valid(counts, slots)) > 0
  bad = (is_repeated & counts) | ~in_range(state, slots)
  return indexing.SlotRows(slots, False, ~counts, bad)


def mask_or_all(mask: Array | None, rows: Array) -> Array:
  """Returns `mask`, or all True if it is None; `rows` is any array [R, ...]."""
  return jnp.ones(rows.shape[:1], bool) if mask is None else mask


def in_range(state: CacheState, slots: Array) -> Array:
  """Returns bool[R]: True for slot numbers in range."""
  return (slots >= 0) & (slots < state.config.num_slots)


def is_empty(state: CacheState, slots: Array) -> Array:
  """Returns bool[R]: True for slots without pages, and slots out of range."""
  # A slot in use has columns in every group, if only of null pages.
  return indexing.take(state.num_pages, slots, jnp.int32(0)) == 0


def roots(state: CacheState, salts: Array | None) -> Array:
  """Returns the roots of sequences, uint32[R, 4], see `hashing.root_key`.

  Without salts or without prefix caching, returns one root, uint32[4].
  """
  if state.secret is None or state.root is None:
    return jnp.zeros((hashing.KEY_WORDS,), jnp.uint32)
  # The root without a salt is precomputed, so most calls hash nothing here.
  if salts is None:
    return state.root
  return hashing.root_key(state.secret, state.epoch, salts)


def without_moves(state: CacheState) -> CacheState:
  """Removes the moves of earlier calls, which the caller has already made."""
  offload = state.pool.offload
  if offload is None:
    return state
  moves = dataclasses.replace(
    offload.moves,
    count=sharding.zeros_like(offload.moves.count),
    start=offload_pages.num_planned(offload),
  )
  offload = dataclasses.replace(offload, moves=moves)
  pool = dataclasses.replace(state.pool, offload=offload)
  return dataclasses.replace(state, pool=pool)


def _record(result: Any) -> Any:
  """Records failed rows in the state, and copies the moves to the Outcome."""
  if not isinstance(result, tuple) or not isinstance(result[1], Outcome):
    return result
  state, out = result
  if state.pool.offload is not None:
    out = dataclasses.replace(out, moves=state.pool.offload.moves)
  if out.code.size == 0:
    return state, out
  failed = is_failure(out.code)
  state = dataclasses.replace(
    state,
    counts=counted(state.counts, failed_rows=failed),
    error=sticky(state.error, out.code),
  )
  return state, out


def first_code(*cases: tuple[Array, Status | Array]) -> Array:
  """Returns, for each row, the status of the first true condition, else OK."""
  code = jnp.int32(Status.OK)
  for condition, value in reversed(cases):
    code = jnp.where(condition, jnp.asarray(value, jnp.int32), code)
  return code


def is_failure(code: Array) -> Array:
  """Returns True for codes of failed rows: neither OK nor SKIPPED."""
  return (code != Status.OK) & (code != Status.SKIPPED)


def sticky(error: Array, code: Array) -> Array:
  """Returns the state's error after a call, int32[].

  The first failure stays, except that a different failure replaces
  OUT_OF_PAGES. `code`, int32[...], has the statuses of the call's rows.
  """
  # Running out of pages is normal operation and must not hide a caller's
  # mistake.
  code = code.reshape(-1)
  mistake = is_failure(code) & (code != Status.OUT_OF_PAGES)
  pressure = code == Status.OUT_OF_PAGES
  first_mistake = code[jnp.argmax(mistake)]
  error = jnp.where(
    (error == Status.OK) & jnp.any(pressure),
    jnp.int32(Status.OUT_OF_PAGES),
    error,
  )
  replaceable = (error == Status.OK) | (error == Status.OUT_OF_PAGES)
  return jnp.where(replaceable & jnp.any(mistake), first_mistake, error)
