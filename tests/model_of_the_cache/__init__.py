"""The cache in Python lists: slow, obvious, the definition of correct.

| file | what it says |
|---|---|
| `pool.py` | pages, the free queue, keys |
| `groups.py` | what a layer group skips, keeps, publishes and asks for |
| `lookup.py` | the longest prefix from which every group can go on |
| `sequences.py` | pages of one sequence: grow, publish, recycle, release |
| `slots.py` | sequences in slots, and what every verb needs |
| `branching.py` | fork and truncate |
| `verbs.py` | all verbs of `jaxkv`: batches of slots, failures as codes |
| `manager.py` | the manager of the reference systems: one request a call |

`verbs.py` and `manager.py` are two faces of the rules in the others. Of the
library nothing is used but its names for group kinds, configurations and codes.
"""
