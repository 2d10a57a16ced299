"""The cache: its state and the verbs that change it.

Read `config` and `state` first, then `verbs/`, a file for each verb or close
family. Below the verbs:

| folder | what it holds |
|---|---|
| `groups/` | layer groups: kinds, sizes in pages, recurrent columns |
| `pool/` | pages: references, eviction order, page-table rows, reservations |
| `prefix/` | page keys, the index, lookup, publication and its rules |
| `telemetry/` | the event log, and the ages of evicted pages |

`status` defines how calls fail and `invariants` what holds between calls.
`masked` has bounds-safe array operations, `work_items` loops whose cost follows
the work, and `xla` the idioms that XLA needs.
"""
