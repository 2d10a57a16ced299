"""The rollout engine: a queue, slots and memory; one step; two loops."""
