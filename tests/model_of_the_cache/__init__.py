"""The cache in Python lists: slow and obvious; it defines correct behaviour.

| file | content |
|---|---|
| `pool.py` | pages, the free queue, keys |
| `groups.py` | the pages that a layer group skips, needs and publishes |
| `lookup.py` | the longest prefix that every group can continue |
| `sequences.py` | pages of one sequence: grow, publish, recycle, release |
| `slots.py` | sequences in slots, and helpers of all verbs |
| `branching.py` | fork and truncate |
| `verbs.py` | all verbs of `jaxkv`: batches of slots, failures as codes |
| `manager.py` | the manager of the reference systems: one request a call |

`verbs.py` and `manager.py` apply the rules of the other files. The model uses
only the library's names for group kinds, configurations and codes.
"""
