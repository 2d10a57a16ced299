"""Tests of exact numerics."""
