"""Tests of models that others have written."""
