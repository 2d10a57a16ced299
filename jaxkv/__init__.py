"""A functional, JAX-native paged key-value cache whose whole state is a value.

The verbs run on the device, inside your own `jit`, `scan`, `while_loop`, `vmap`
or `shard_map`, and never call the host. An old state stays usable.

| verb | description |
|---|---|
| `init` | creates an empty cache |
| `match` | finds the longest cached prefix of sequences |
| `admit` | puts sequences into slots, on top of their cached prefixes |
| `allocate` | makes room for more tokens |
| `commit` | declares tokens final: advances lengths, publishes full pages |
| `fork` | copies a sequence to other slots, which share its full pages |
| `recycle` | releases pages that windows and chunks no longer need |
| `truncate` | rolls sequences back |
| `free` | releases sequences, tail page first |
| `pin`, `touch`, `unpin` | hold prefixes or pages against eviction; undo it |
| `evict` | removes pages from the prefix index |
| `new_epoch` | starts a new weight epoch: no older page can be hit again |
| `reset_prefix_cache` | drops every key if no page is held |
| `stats`, `usage`, `num_common_prefix_pages` | read the state, on the device |
| `free_pages`, `cached_pages`, `show` | read the state, on the host |
| `check_invariants`, `check` | test the state's invariants |
| `clear_error` | clears a recorded failure |
| `salt`, `view` | make a salt; make the arguments of a `jaxkv.kv` call |

`CacheConfig` has the static sizes and options, `CacheState` is the state, and
`check` raises `CacheError`.

A verb takes the state first and returns `(state, out)`. A query returns only
its answer. `out.code` has a `Status` for each row, and `out.ok` is True for the
rows that succeeded. A row that fails changes nothing. Every optional argument
is a keyword. Verbs with a row for each slot take `slots=None` (all slots in
order) and `mask=None` (all rows). Integer arguments may be lists or arrays of
any integer dtype.

The rows of a batch are served in order: the result equals one call per row, in
that order. The docstring of a verb names its exceptions.

Guarantees:

- Pages are evicted in exact LRU order: in the order in which they were
  released, a sequence's tail before its prefix. `CacheConfig.free_policy`
  decides about pages without a key.
- There are only true hits. Keys have 128 bits, are chained page by page with
  the salt and the epoch in the root, and depend on the state's secret
  (`init(key=)`). A page is a hit only if its stored tokens equal the tokens
  looked up. Only a holder of the secret can construct two prefixes with the
  same key; an attacker who chooses prompts and sees hits and keys cannot. The
  secret is part of the state: protect saved states accordingly.
- The cost does not depend on the pool. No verb of a decode loop does work that
  grows with the number of pages, and the compiled loop copies no array of that
  size.
- `fork` and `truncate` return the copies of partly filled pages that the caller
  must make: `kv = jaxkv.kv.copy(kv, *out.copies)`.

Kinds of groups (`notebooks/02_groups_windows_states`):

| kind | its layers attend to |
|---|---|
| `FullAttention` | every earlier token |
| `SlidingWindow(window)` | the last `window` tokens |
| `ChunkedLocal(chunk)` | earlier tokens of the same chunk |
| `Recurrent` | a state; a page is a snapshot of the state at the page's end |
| `CrossAttention` | an encoder's tokens; its pages are never cached |
| a subclass of `GroupKind` | your own rule |

Every group has a separate page table, `state.page_table[:, g]`, and all groups
share one pool. A prefix is a hit only if all groups can continue from it.

Packages. `jaxkv.models` and most others are imported when they are first used;
modules of `jaxkv.host` and `jaxkv.integrations` must be imported by name.

| package | description |
|---|---|
| `jaxkv` | the cache: its state and verbs; it needs no other package here |
| `jaxkv.results`, `jaxkv.telemetry` | result types; events, page ages |
| `jaxkv.kv` | the K/V memory, a second pytree, meant to be donated |
| `jaxkv.rollout` | the jitted loop: queue, prefill, decode, refill |
| `jaxkv.models` | decoders in plain JAX, with and without a cache |
| `jaxkv.rl` | losses and advantages for RL |
| `jaxkv.host` | a cache manager for schedulers in Python, over the same state |
| `jaxkv.host.vllm`, `jaxkv.host.esurge` | the same under the systems' names |
| `jaxkv.integrations.nnx` | `flax.nnx` models over the cache |
| `jaxkv.integrations.tunix`, `jaxkv.integrations.skyrl_tx` | their rollouts |
| `jaxkv.kernels` | paged attention and page operations on plain arrays |

On a CPU, XLA hands small operations to other threads, which costs more than it
saves. With `CPU_COMPILER_OPTIONS` a loop over the cache is faster, and its cost
does not depend on the pool:

  generate = jax.jit(generate, compiler_options=jaxkv.CPU_COMPILER_OPTIONS)

Commands (`python -m jaxkv COMMAND --help` has all options):

| command | description |
|---|---|
| `rollout` | continues prompts with a small character model |
| `replay TRACE --pages N` | runs a request trace through the verbs in a scan |
| `grpo` | trains a small model by GRPO, in one program |
| `doctor` | prints versions, devices and backends, and runs a small check |

`replay` reads JSON lines with `timestamp, input_length, output_length,
hash_ids`, one id for every 512 tokens of a prompt, and prints hits, evictions
and the time per request. Commands print tables, and most write `--json FILE`.
On unusable input they print the reason and exit with status 2.

Terms:

| term | meaning |
|---|---|
| page | `page_size` tokens of K/V, and its number; page 0 is the null page |
| null page | placeholder for pages before a window; never read or written |
| pool | all pages, and the queue of free pages |
| slot | a row of the cache that holds one sequence, or is empty |
| sequence | the tokens of a slot |
| page table | the page numbers of each slot and group, in order |
| column | a position in a row of the page table |
| group | layers with the same cache behaviour; all groups share the pool |
| row | one entry of a call's batch |
| prefix | the first tokens of a sequence, up to the end of a page |
| key | a 128-bit hash of a page's tokens and of the prefix before them |
| published | entered in the prefix index under its key |
| cached | published and not evicted since: a lookup finds the page |
| hit | a cached page that a lookup finds |
| held | referenced by a page-table entry or a pin |

Letters of array shapes:

| letter | size |
|---|---|
| G | groups |
| B | slots |
| R | rows of one call |
| M | columns of a page-table row |
| N | pages in the pool |
| S | tokens a page |
| T | tokens |
| P | pages of a call's longest sequence, T // S |
| A | alignment: all groups end a page after every A tokens |
| W | items of a work window |
| C, Z, E | capacities: of the free queue's ring, of the index, of the log |
| L, H, K, D | layers, query heads, K/V heads, head size |
| X | any other size |
"""

import importlib
from typing import Any

from jaxkv import kv
from jaxkv import rollout
from jaxkv._src.arrays.compiler_options import CPU_COMPILER_OPTIONS
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import ChunkedLocal
from jaxkv._src.cache.group_kinds import CrossAttention
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
from jaxkv._src.cache.verbs.free import recycle
from jaxkv._src.cache.verbs.free import truncate
from jaxkv._src.cache.verbs.inspect import cached_pages
from jaxkv._src.cache.verbs.inspect import free_pages
from jaxkv._src.cache.verbs.inspect import num_common_prefix_pages
from jaxkv._src.cache.verbs.inspect import stats
from jaxkv._src.cache.verbs.inspect import usage
from jaxkv._src.cache.verbs.pin import evict
from jaxkv._src.cache.verbs.pin import pin
from jaxkv._src.cache.verbs.pin import touch
from jaxkv._src.cache.verbs.pin import unpin
from jaxkv._src.cache.verbs.reset import clear_error
from jaxkv._src.cache.verbs.reset import new_epoch
from jaxkv._src.cache.verbs.reset import reset_prefix_cache
from jaxkv._src.kv.view import view
from jaxkv._src.show import show

__version__ = "0.1.0"

# Imported when they are first used, so that `import jaxkv` stays fast.
_LAZY_MODULES = (
  "host",
  "integrations",
  "kernels",
  "models",
  "results",
  "rl",
  "telemetry",
)

__all__ = [
  "CPU_COMPILER_OPTIONS",
  "CacheConfig",
  "CacheError",
  "CacheState",
  "ChunkedLocal",
  "CrossAttention",
  "FullAttention",
  "GroupKind",
  "Recurrent",
  "SlidingWindow",
  "Status",
  "admit",
  "allocate",
  "cached_pages",
  "check",
  "check_invariants",
  "clear_error",
  "commit",
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
