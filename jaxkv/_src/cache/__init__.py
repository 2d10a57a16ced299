"""The cache: its state and the verbs that change it.

Read `config` and `state` first, then a verb. The docstring of `jaxkv` defines
the terms and the letters of array shapes. A module imports only modules on its
own line of this table and on the lines below it:

| module | content |
|---|---|
| `verbs/` | the public functions, one file for each verb or family of verbs |
| `steps/` | steps that verbs share: find a prefix, reserve pages, publish |
| `state`, `stats` | the state, its counters, statuses, the decorator `verb` |
| `pool/` | pages: reference counts, the free queue, page-table rows |
| `prefix/` | page keys, the prefix index, publication rules |
| `pool_sizes` | sizes of pools, from bytes or numbers of pages |
| `config` | the static sizes and options |
| `page_numbers` | the numbers of the pages of all pools |
| `group_kinds` | kinds of layer groups, and their sizes in pages |

`invariants` checks a state; `describe` formats it for `repr`.
"""
