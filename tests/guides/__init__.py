"""Tests of stop strings and guided decoding."""
