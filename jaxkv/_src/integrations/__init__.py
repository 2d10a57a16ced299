"""Clients of the library: models and trainers that others have written."""
