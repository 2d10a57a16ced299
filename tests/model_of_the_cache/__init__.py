"""The cache in Python lists: slow, obvious, the definition of correct."""
