"""Tests of array operations and of checks of arguments."""
