"""The backend `triton`, and a merge kernel that `mosaic_gpu` uses, too.

jax deprecated Pallas-Triton in 0.11, but it supports page sizes and GPUs that
Mosaic GPU does not, and its interpreter is fast on a CPU.
"""

import warnings

# Users can do nothing about this warning, which appears for each kernel.
warnings.filterwarnings(
  "ignore",
  message="The Pallas Triton backend is deprecated",
  category=DeprecationWarning,
)
