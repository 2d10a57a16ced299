"""Tests of the host manager."""
