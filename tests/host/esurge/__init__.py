"""Tests of the classes of eSurge's cache manager."""
