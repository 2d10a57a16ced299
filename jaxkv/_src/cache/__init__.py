"""The cache: its state and the verbs that change it.

Verbs, by file: `admitting` (match, admit), `allocating` (allocate),
`committing` (commit), `forking` (fork), `releasing` (free, truncate),
`pinning` (touch, pin, unpin, evict), `forgetting` (reset_prefix_cache,
new_epoch), `looking` (stats, usage, ...), `invariants` (check, ...).

Mechanisms below them: `page_table` (rows that grow and shrink), `prefix` (the
longest cached prefix), `page_pool` (references), `free_queue` (eviction order),
`prefix_index` (key to pages), `hashing` (keys), `grants` (who gets pages),
`ragged` (windows over work), `indexing` (gathers and scatters).
"""
