"""The cache manager for schedulers in Python."""
