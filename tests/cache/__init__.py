"""Tests of the cache's state and verbs."""
