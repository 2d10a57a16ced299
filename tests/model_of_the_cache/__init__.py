"""The cache in Python lists: slow, obvious, the definition of correct.

| file | contents |
|---|---|
| `pool.py` | pages, the free queue, keys |
| `groups.py` | skipped, published and required pages of a layer group |
| `lookup.py` | the longest prefix with which every group can continue |
| `sequences.py` | pages of one sequence: grow, publish, recycle, release |
| `slots.py` | sequences in slots, and helpers of all verbs |
| `branching.py` | fork and truncate |
| `verbs.py` | all verbs of `jaxkv`: batches of slots, failures as codes |
| `manager.py` | the manager of the reference systems: one request a call |

`verbs.py` and `manager.py` are two interfaces to the rules in the other files.
Of the library they use only group kinds, configs and codes.
"""
