"""Tests of exports, imports and snapshots."""
