"""The cache: its state and the verbs that change it.

Read `config` and `state` first, then `verbs/`, a file for each verb or close
family. Below the verbs:

| folder | what it holds |
|---|---|
| `groups/` | layer groups: kinds, sizes in pages, recurrent columns |
| `pool/` | pages: references, eviction order, page-table rows, reservations |
| `prefix/` | page keys, the index, lookup, publication and its rules |
| `telemetry/` | the event log, and the ages of evicted pages |

`status` defines how calls fail, `checks` which arguments are refused, and
`invariants` what holds between calls. `ops` has the array operations: gathers
and scatters that are bounds-safe, loops whose cost follows the work, and the
idioms that XLA needs.
"""
