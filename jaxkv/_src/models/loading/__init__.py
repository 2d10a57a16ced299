"""Checkpoints of other libraries as decoders."""
