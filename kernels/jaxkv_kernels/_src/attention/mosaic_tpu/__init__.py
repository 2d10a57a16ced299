"""Backend `mosaic_tpu`: Pallas Mosaic for TPUs."""
