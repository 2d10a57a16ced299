"""Paged attention: one definition, one interface, several backends.

| file | what it is |
|---|---|
| `definition` | what is right, in float64 NumPy |
| `api` | the public functions: they check arguments, and choose a backend |
| `options` | what a backend is told besides its arrays |
| `backends` | which backend serves a call |
| `ragged` | packed queries as rows of a rectangle |
| `merge` | attention over parts of the keys, put together |
| `prefix` | rows that begin with the same pages |
| `latent` | multi-head latent attention |
| `plan` | equal pieces of decode work |
| `xla` | a backend: a scan over blocks of tokens, for any platform |
| `triton`, `triton_kernel` | a backend: Pallas-Triton, for NVIDIA GPUs |

A backend is a module with three functions, `backends.Backend`.
"""
