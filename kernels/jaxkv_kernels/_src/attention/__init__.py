"""Paged attention: one interface, several backends.

`tests/kernels/reference.py` is the definition, in float64 NumPy.

| module | contents |
|---|---|
| `api` | `paged_decode`, `paged_attention_padded`, `paged_attention` |
| `cascade` | decoding rows that share pages |
| `shared_prefix` | finding the rows that share pages |
| `options` | the options of a call, and its checked arguments |
| `calls` | steps that decoding and rectangles share |
| `choose` | choosing the backend of a call |
| `merge` | merging attention over disjoint parts of the keys |
| `query_packing` | cutting packed queries into tiles |
| `query_tiles` | cutting a rectangle of queries into tiles of rows |
| `online_softmax` | the online softmax of one block of keys |
| `head_epilogue` | per-head scales and sinks, outside a kernel |
| `xla` | backend: a loop over blocks of tokens, for every platform |
| `triton` | backend: Pallas-Triton, for NVIDIA GPUs from sm_80 |
| `mosaic_gpu` | backend: Pallas Mosaic GPU, for Hopper |
| `mosaic_tpu` | backend: Pallas Mosaic, for TPUs |

The folder of a backend has a module `backend`, which implements
`choose.Backend`. Backends written in Pallas also have a module `kernel`.

Letters in all of these modules:

| letter | size of |
|---|---|
| B | sequences: rows of the page table |
| T | queries of a row in a rectangle; queries of the call if they are packed |
| H, K | query heads, key-value heads |
| D, Dv | elements of a key, elements of a value |
| N | pages of a pool, including those of all layers that share it |
| S | tokens of a page |
| M | pages of a row of the page table |
| A | tokens of a block of keys, the unit of an online softmax step |
| J | blocks of keys in a row of the page table, or in a tree |
| Z | tiles of queries of all sequences |
| Y | rows of a tile that share a K/V head: H / K for each query, then padding |
| U | units of work: pieces of contexts |
| O | results of units of work |
| F | stages of a ring buffer |
| X | any length |
"""
