"""Loads checkpoints of other libraries as decoders."""
