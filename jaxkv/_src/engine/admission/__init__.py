"""Admission of waiting sequences to empty slots."""
