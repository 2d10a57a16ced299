"""Decoders in plain JAX over the cache."""
