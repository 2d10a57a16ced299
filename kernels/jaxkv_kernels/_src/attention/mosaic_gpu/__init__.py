"""Backend `mosaic_gpu`: Pallas Mosaic for Hopper GPUs."""
