"""Tests of rollouts on meshes and in several processes."""
