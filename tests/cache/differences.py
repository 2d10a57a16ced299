"""Compares a state with the oracle."""

import jax
import numpy as np

from jaxkv import CacheState
from tests.model_of_the_cache.verbs import Oracle


def differences(oracle: Oracle, state: CacheState) -> list[str]:
  """Returns all differences of a state from the oracle, one a line."""
  expected = _expected(oracle)
  actual = _actual(state)
  return [
    f"{name}: oracle {expected[name]}, state {actual[name]}"
    for name in expected
    if expected[name] != actual[name]
  ]


def _expected(oracle):
  pool = oracle.pool
  config = oracle.config
  tables = [
    [
      pages + [config.no_page] * (config.pages_per_slot - len(pages))
      for pages in slot.pages
    ]
    for slot in oracle.slots
  ]
  return {
    "page_table": tables,
    "num_pages": [[*map(len, slot.pages)] for slot in oracle.slots],
    "num_skipped_pages": [slot.num_skipped for slot in oracle.slots],
    "length": [len(slot.tokens) for slot in oracle.slots],
    "ref_count": pool.refs,
    "pin_count": pool.pins,
    "free_pages": pool.free,
    "cached_pages": sorted(pool.keys),
    "epoch": oracle.epoch,
    "error": int(oracle.error),
    "queried_tokens": oracle.queries,
    "hit_tokens": oracle.hits,
    "unusable_tokens": oracle.unusable,
    "popped_pages": pool.popped,
    "evicted_pages": pool.evicted,
    "published_pages": pool.published,
    "merged_pages": pool.merged,
    "failed_rows": oracle.failed,
    **(_expected_offload(pool) if config.offload_pages else {}),
    **(_expected_reasons(pool) if config.state_retention else {}),
  }


def _expected_offload(pool):
  return {
    "offload_queue": [
      [page - pool.num_pages for page in pages] for pages in pool.offload
    ],
    "num_saved": pool.saved,
    "num_restored": pool.restored,
    "num_forgotten": pool.forgotten,
    "num_dropped": pool.dropped,
  }


def _expected_reasons(pool):
  return {
    "has_evicted": pool.has_evicted,
    "reasons": [pool.reasons[page] for page in sorted(pool.keys)],
  }


def _actual(state):
  fetched = jax.device_get(state)
  fields = {
    "page_table": fetched.page_table,
    "num_pages": fetched.num_pages,
    "num_skipped_pages": fetched.num_skipped_pages,
    "length": fetched.length,
    "ref_count": fetched.pool.ref_count,
    "pin_count": fetched.pool.pin_count,
    "free_pages": _in_order(fetched.pool.queue),
    "cached_pages": _cached(fetched.pool.index),
    "epoch": fetched.epoch,
    "error": fetched.error,
  }
  if fetched.pool.has_evicted is not None:
    cached = fields["cached_pages"]
    fields["has_evicted"] = fetched.pool.has_evicted
    fields["reasons"] = fetched.pool.index.entry[cached, -1]
  fields |= {name: getattr(fetched.stats, name) for name in vars(fetched.stats)}
  if fetched.pool.offload is not None:
    fields |= vars(fetched.pool.offload)
    fields["offload_queue"] = _in_order(fetched.pool.offload.queue)
    del fields["queue"], fields["moves"]
  return {
    name: value if isinstance(value, list) else np.asarray(value).tolist()
    for name, value in fields.items()
    if value is not None
  }


def _in_order(queue):
  """Returns the live entries of each ring, to which their page points back."""
  pools = []
  for pool, ring in enumerate(queue.ring.reshape(len(queue.head), -1)):
    places = (queue.head[pool] + np.arange(queue.span[pool])) % len(ring)
    is_live = queue.position[ring[places]] == pool * len(ring) + places
    pools.append(ring[places][is_live].tolist())
  return pools


def _cached(index):
  """Returns the pages in the buckets."""
  return [] if index is None else np.sort(index.buckets[index.buckets > 0])
