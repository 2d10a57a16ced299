"""A functional, paged key-value cache for JAX, with its state in one pytree.

The verbs run on the device, inside your own `jit`, `scan`, `while_loop`, `vmap`
or `shard_map`. A verb returns a new state, and the old state stays usable.

| verb | description |
|---|---|
| `init` | creates an empty cache |
| `match` | finds the longest cached prefix of each sequence |
| `admit` | starts sequences in empty slots, after their cached prefixes |
| `allocate` | makes room for more tokens |
| `commit` | declares tokens final: advances lengths, publishes full pages |
| `fork` | copies a sequence to other slots, which share its full pages |
| `recycle` | releases pages that windows and chunks no longer need |
| `truncate` | rolls sequences back |
| `free` | releases sequences, last page first |
| `pin`, `touch` | protect prefixes or single pages from eviction |
| `unpin` | ends the protection by `pin` and `touch` |
| `evict` | removes pages from the prefix index |
| `new_epoch` | makes cached pages unreachable when the weights change |
| `reset_prefix_cache` | empties the prefix index if no page is held |
| `stats`, `usage`, `num_common_prefix_pages` | read the state, on the device |
| `free_pages`, `cached_pages`, `show` | read the state, on the host |
| `check_invariants` | tests the state's invariants, on the device |
| `check` | raises if an invariant is broken or a call failed, on the host |
| `clear_error` | clears a recorded failure |
| `salt` | makes a salt; sequences with different salts share no pages |
| `view` | makes a `jaxkv.kv.View`, which `jaxkv.kv.write` and `attend` take |

`CacheConfig` has the static sizes and options, `CacheState` is the state, and
`check` raises `CacheError`. `StateRetention` keeps recurrent states that later
prompts need. `OffloadPolicy` decides which pages return from host memory.

A verb takes the state first and returns `(state, out)`. A query returns only
its result. `out.code` has a `Status` for each row, and `out.ok` is True for the
rows that succeeded. A row that fails changes nothing. Every optional argument
is a keyword, except the `key` of `init`. If the rows of a verb are slots,
`slots=None` means all slots in order. `mask=None` means all rows. Integer
arguments can be lists or arrays of any integer dtype.

A verb processes the rows of a batch in order, so the result equals one call per
row. If a verb has exceptions to this rule, its docstring names them.

Guarantees:

- Each pool evicts its cached pages in exact LRU order: the page that was
  released first is evicted first. A sequence releases its last page first, so
  its prefix is evicted last. `CacheConfig.free_policy` decides when free pages
  that are not cached are reused.
- Hits are never false. A page is a hit only if its stored tokens equal the
  tokens looked up, and if its 128-bit key matches, a hash of these tokens, of
  the prefix before them, the salt, the number of calls of `new_epoch` and the
  secret `init(key=)`. The state contains the secret, so protect saved states.
- The cost of a decode loop does not depend on the sizes of pools: none of its
  verbs visits all pages, and the compiled loop copies no array of a pool.
- With `CacheConfig.offload_pages`, cached pages that the device evicts move to
  offload memory, in the same LRU order. Verbs return the moves that the caller
  must perform: `kv, offload = jaxkv.kv.move(kv, offload, out.moves)`.
- `fork` and `truncate` do not copy page contents. They return the copies that
  the caller must perform: `kv = jaxkv.kv.copy(kv, *out.copies)`.

Kinds of layer groups (`notebooks/02_groups_windows_states`):

| kind | the layers attend to |
|---|---|
| `FullAttention` | every earlier token |
| `SlidingWindow(window)` | the last `window` tokens |
| `ChunkedLocal(chunk)` | earlier tokens of the same chunk |
| `Recurrent` | a recurrent state; a page holds one state, of all layers |
| a subclass of `GroupKind` | the tokens that the subclass selects |

Every group has a separate page table, `state.page_table[:, g]`. A prefix is a
hit only if all groups can continue from it.

Pools. A state of a recurrent group can take as many bytes as the K/V of 1,000
tokens. So `CacheConfig.num_pages` can have a number for each of several pools,
and `GroupKind.pool` is the pool of a group's pages. Groups share a pool if
their pages have the same shape. A row gets pages of all pools that it needs, or
none:

  groups = (jaxkv.FullAttention(), jaxkv.Recurrent(pool=1))
  config = jaxkv.CacheConfig(num_pages=(4096, 64), groups=groups, ...)

All pools share one numbering: pool 0 has pages 0 .. 4095, and pool 1 has pages
4096 .. 4159. The first page of a pool is never given to a sequence.
`jaxkv.models.cache_config` sizes the pools of a model from bytes.

Packages. Most packages are imported when they are first used. Only modules of
`jaxkv.host` and `jaxkv.integrations` must be imported by name.

| package | description |
|---|---|
| `jaxkv` | the cache: its state and verbs |
| `jaxkv.results` | the result types of verbs |
| `jaxkv.kv` | the K/V memory, a second pytree, meant to be donated |
| `jaxkv.rollout` | the jitted generation loop: queue, prefill, decode, refill |
| `jaxkv.guides` | texts that match a regular expression or a JSON schema |
| `jaxkv.sharding` | rollouts on several devices |
| `jaxkv.workers` | rollouts on several workers, and a pool over them |
| `jaxkv.checkpoint` | snapshots of rollouts |
| `jaxkv.models` | decoders in plain JAX, with and without a cache |
| `jaxkv.rl` | losses and advantages for RL |
| `jaxkv.host` | a cache manager for schedulers in Python, over the same state |
| `jaxkv.host.vllm`, `jaxkv.host.esurge` | managers for vLLM and eSurge |
| `jaxkv.integrations.nnx` | `flax.nnx` models over the cache |
| `jaxkv.integrations.tunix` | a rollout engine for tunix |
| `jaxkv.integrations.ray` | workers as Ray actors |
| `jaxkv.kernels` | paged attention and page operations on plain arrays |

On a CPU, XLA runs parts of small operations in other threads, which costs more
time than it saves. `CPU_COMPILER_OPTIONS` prevents this. The compiled loop is
then faster, and its cost does not depend on the size of the pool:

  generate = jax.jit(generate, compiler_options=jaxkv.CPU_COMPILER_OPTIONS)

`enable_compilation_cache` keeps compiled programs for later processes.

Commands (`python -m jaxkv COMMAND --help` lists the options):

| command | description |
|---|---|
| `rollout` | continues prompts, by default with a small character model |
| `doctor` | prints versions, devices, backends and speeds, and runs a check |

Terms:

| term | meaning |
|---|---|
| page | memory for the K/V of `page_size` tokens or for a recurrent state |
| page number | the identity of a page, unique over all pools; also page id |
| null page | page 0, without tokens; replaces pages that a group skips |
| pool | pages of one size in bytes, with a queue of the free ones |
| slot | a place in the cache for one sequence, which can be empty |
| sequence | the tokens of a slot |
| page table | the page numbers of each slot and group, in order |
| column | a position in a row of the page table |
| group | layers with the same cache behaviour, with pages of one pool |
| row | one entry of a call's batch; in the page table, a slot and a group |
| prefix | the first tokens of a sequence, up to the end of a page |
| key | a 128-bit hash of a page's tokens and of the prefix before them |
| published | entered in the prefix index under its key |
| cached | published, and still in the prefix index |
| hit | a cached page that a lookup finds |
| held | referenced by a page-table entry or a pin |

Letters of array shapes:

| letter | size |
|---|---|
| G | groups |
| B | slots |
| R | rows of one call |
| M | columns of a page-table row |
| N, N2 | pages of all pools, offloaded pages |
| S | tokens per page |
| T | tokens |
| P | whole pages in T tokens, T // S; in counts of pages, pools |
| A | alignment: the least common multiple of the groups' page sizes |
| W | items that one iteration of a loop processes together |
| C, Z | entries of the free queue, buckets of the index |
| L, H, K, D | layers, query heads, K/V heads, head size |
| X | any other size |
"""

import importlib
from typing import Any

from jaxkv import kv
from jaxkv import rollout
from jaxkv._src.arrays.compiler_options import CPU_COMPILER_OPTIONS
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.config import OffloadPolicy
from jaxkv._src.cache.config import StateRetention
from jaxkv._src.cache.group_kinds import ChunkedLocal
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.group_kinds import Recurrent
from jaxkv._src.cache.group_kinds import SlidingWindow
from jaxkv._src.cache.invariants import CacheError
from jaxkv._src.cache.invariants import check
from jaxkv._src.cache.invariants import check_invariants
from jaxkv._src.cache.prefix.hashing import salt
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import init
from jaxkv._src.cache.verbs.admit import admit
from jaxkv._src.cache.verbs.admit import match
from jaxkv._src.cache.verbs.allocate import allocate
from jaxkv._src.cache.verbs.commit import commit
from jaxkv._src.cache.verbs.fork import fork
from jaxkv._src.cache.verbs.free import free
from jaxkv._src.cache.verbs.inspect import cached_pages
from jaxkv._src.cache.verbs.inspect import free_pages
from jaxkv._src.cache.verbs.inspect import num_common_prefix_pages
from jaxkv._src.cache.verbs.inspect import stats
from jaxkv._src.cache.verbs.inspect import usage
from jaxkv._src.cache.verbs.pin import evict
from jaxkv._src.cache.verbs.pin import pin
from jaxkv._src.cache.verbs.pin import touch
from jaxkv._src.cache.verbs.pin import unpin
from jaxkv._src.cache.verbs.recycle import recycle
from jaxkv._src.cache.verbs.reset import clear_error
from jaxkv._src.cache.verbs.reset import new_epoch
from jaxkv._src.cache.verbs.reset import reset_prefix_cache
from jaxkv._src.cache.verbs.truncate import truncate
from jaxkv._src.compilation_cache import enable_compilation_cache
from jaxkv._src.kv.view import view
from jaxkv._src.show import show

__version__ = "0.2.0"

# Imported when they are first used, so that `import jaxkv` stays fast.
_LAZY_MODULES = (
  "checkpoint",
  "guides",
  "host",
  "integrations",
  "kernels",
  "models",
  "results",
  "rl",
  "sharding",
  "workers",
)

__all__ = [
  "CPU_COMPILER_OPTIONS",
  "CacheConfig",
  "CacheError",
  "CacheState",
  "ChunkedLocal",
  "FullAttention",
  "GroupKind",
  "OffloadPolicy",
  "Recurrent",
  "SlidingWindow",
  "StateRetention",
  "Status",
  "admit",
  "allocate",
  "cached_pages",
  "check",
  "check_invariants",
  "clear_error",
  "commit",
  "enable_compilation_cache",
  "evict",
  "fork",
  "free",
  "free_pages",
  "init",
  "kv",
  "match",
  "new_epoch",
  "num_common_prefix_pages",
  "pin",
  "recycle",
  "reset_prefix_cache",
  "rollout",
  "salt",
  "show",
  "stats",
  "touch",
  "truncate",
  "unpin",
  "usage",
  "view",
]


def __getattr__(name: str) -> Any:
  if name in _LAZY_MODULES:
    return importlib.import_module(f"jaxkv.{name}")
  raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted({*globals(), *_LAZY_MODULES})
