"""Backend `xla`: a scan over blocks of tokens, for every platform."""
