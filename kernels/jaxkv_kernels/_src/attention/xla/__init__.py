"""Backend `xla`: a loop over blocks of tokens, for every platform."""
