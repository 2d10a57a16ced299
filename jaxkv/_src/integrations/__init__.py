"""Adapters for models and trainers of other projects."""
