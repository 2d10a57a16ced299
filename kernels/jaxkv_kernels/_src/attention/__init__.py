"""Paged attention: one definition, one interface, several backends.

| file | what it is |
|---|---|
| `definition` | what is right, in float64 NumPy |
| `api` | the public functions: they check arguments, and choose a backend |
| `options` | what a backend is told besides its arrays |
| `backends` | which backend serves a call |
| `ragged` | packed queries as rows of a rectangle |
| `merge` | attention over parts of the keys, put together |
| `prefix`, `prefix_decode` | pages that rows share, read once |
| `latent` | multi-head latent attention |
| `plan` | equal pieces of decode work |
| `query_tiles` | rectangles of queries as tiles of rows; what each row sees |
| `block_softmax` | the online softmax of one block |
| `whole_heads` | options that act on a whole head, around a kernel |
| `xla` | a backend: a scan over blocks of tokens, for any platform |
| `triton`, `triton_kernel` | a backend: Pallas-Triton, for NVIDIA GPUs |
| `triton_api` | the one place that calls Pallas-Triton |
| `mosaic_gpu`, `mosaic_gpu_kernel` | a backend: Pallas, for Hopper GPUs |
| `mosaic_gpu_work` | what that kernel is told, and how it counts |
| `mosaic_gpu_narrow` | numbers of 8 bits in it, and scales of tokens |
| `merge_kernel` | its pieces of work, put together |
| `mosaic_gpu_api` | where releases of its dialect differ |
| `mosaic_tpu`, `mosaic_tpu_kernel` | a backend: Pallas, for TPUs |

A backend is a module with two functions, `backends.Backend`.
"""
