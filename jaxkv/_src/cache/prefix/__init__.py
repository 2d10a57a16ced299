"""The prefix cache: page keys, the prefix index, publication rules."""
