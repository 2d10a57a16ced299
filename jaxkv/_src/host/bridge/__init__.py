"""Conversion between the state of a manager and a `CacheState`."""
