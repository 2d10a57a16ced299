"""Tests of the generation loop."""
