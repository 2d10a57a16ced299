"""The cache: its state and the verbs that change it.

Read `config` and `state` first, then a verb. From the top down, where a module
imports only from its own line and those below:

| module | what it holds |
|---|---|
| `verbs/` | the public functions, a file for each verb or close family |
| `steps/` | steps that verbs share: find a prefix, reserve pages, publish |
| `state` | the state, statuses, and what makes a function a verb |
| `pool/` | pages: references, eviction order, page-table rows |
| `telemetry` | the event log, and the ages of evicted pages |
| `prefix/` | page keys, the prefix index, the rules of publication |
| `config` | everything that is fixed when a program is compiled |
| `group_kinds` | what the layers of a group keep, and its sizes in pages |

`invariants` says what holds between calls; `describe` is the state's `repr`.
"""
