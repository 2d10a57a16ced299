"""The rollout engine: its state, its step, and the loops over steps."""
