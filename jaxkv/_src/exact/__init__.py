"""Exact numerics: results with the same bits in every program."""
