"""Sampling after a call of the model, and drafts before it."""
