"""Backend `triton`: Pallas-Triton for NVIDIA GPUs from sm_80."""
