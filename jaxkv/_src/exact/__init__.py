"""Exact numerics: results that are the same bits in every program."""
