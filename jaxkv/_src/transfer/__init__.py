"""Rollouts that leave a program: exported sequences and snapshots."""
