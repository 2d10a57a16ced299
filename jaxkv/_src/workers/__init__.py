"""Rollouts on several workers."""
